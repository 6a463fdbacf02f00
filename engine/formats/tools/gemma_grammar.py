"""The grammar of a call as Gemma 4 writes it, after the schema of the tool; and what grammars of calls share."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.formats.tools.json_kinds import KindsOf

_QUOTE = json.dumps('<|"|>')
_MAX_DEPTH = 4
GEMMA_RULES = (  # of any value, for all calls of a grammar
    "gemma_any: gemma_text | gemma_plain | gemma_list | gemma_object",
    f"gemma_text: {_QUOTE} gemma_inner",
    f"gemma_inner[suffix={_QUOTE}]: /(?s:.*)/",
    r"gemma_plain: /true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    'gemma_list: "[" (gemma_any ("," gemma_any)*)? "]"',
    'gemma_object: "{" (gemma_field ("," gemma_field)*)? "}"',
    'gemma_field: /[^:,{}<]+/ ":" gemma_any',
)


def parameters(schema: Any) -> Iterator[tuple[str, Any, bool]]:
    """The name, the schema and whether it must be there, of each parameter in the schema of a tool."""
    fields = schema if isinstance(schema, Mapping) else {}
    properties, required = fields.get("properties"), fields.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    for key, value in properties.items() if isinstance(properties, Mapping) else ():
        yield key, value, key in names


def separated(name: str, parts: Sequence[tuple[str, bool]], separator: str) -> Iterator[str]:
    """The rule `name`: the rules in `parts`, of which those that need not be there may be missing, with `separator`
    between them. `begin_i`: from part i on, with none before it; `more_i`: with some before it."""
    literal = json.dumps(separator)
    yield f"{name}: {name}_begin_0"
    for i, (rule, is_required) in enumerate(parts):
        begin, more = f"{name}_begin_{i + 1}", f"{name}_more_{i + 1}"
        yield f"{name}_begin_{i}: {rule} {more}{'' if is_required else f' | {begin}'}"
        yield f"{name}_more_{i}: {literal} {rule} {more}{'' if is_required else f' | {more}'}"
    yield f'{name}_begin_{len(parts)}: ""'
    yield f'{name}_more_{len(parts)}: ""'


def gemma_call(name: str, begin: str, schema: Any) -> Iterator[str]:
    """The rule `name` of a call that begins with `begin`, and those that it needs."""
    yield f"{name}: {json.dumps(begin)} {name}_value"
    yield from _object(f"{name}_value", schema, KindsOf(schema), 0)


def _object(name: str, schema: Any, kinds: KindsOf, depth: int) -> Iterator[str]:
    parts = list[tuple[str, bool]]()
    for i, (key, value, is_required) in enumerate(parameters(schema)):
        rule = f"{name}_{i}"
        parts.append((rule, is_required))
        yield f"{rule}: {json.dumps(f'{key}:')} {rule}_v"
        yield from _value(f"{rule}_v", value, kinds, depth + 1)
    yield from separated(f"{name}_all", parts, ",")
    yield f'{name}: "{{" {name}_all "}}"'


def _value(name: str, schema: Any, kinds: KindsOf, depth: int) -> Iterator[str]:
    match schema:
        case {"enum": list(values)}:
            yield f"{name}: {' | '.join(json.dumps(_written(value)) for value in values)}"
        case {"type": "object", "properties": dict()} if depth < _MAX_DEPTH:
            yield from _object(name, schema, kinds, depth)
        case {"type": "array", "items": dict(items)} if depth < _MAX_DEPTH:
            yield f'{name}: "[" ({name}_i ("," {name}_i)*)? "]"'
            yield from _value(f"{name}_i", items, kinds, depth + 1)
        case _:
            rules = [_RULES[kind] for kind in sorted(kinds(schema)) if kind in _RULES]
            yield f"{name}: {' | '.join(dict.fromkeys(rules)) or 'gemma_any'}"


_RULES = {
    "string": "gemma_text",
    "integer": r"/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    "boolean": "/true|false/",
    "null": "/null/",
    "array": "gemma_list",
    "object": "gemma_object",
}


def _written(value: Any) -> str:
    """A value as Gemma writes it."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_written, value))}]"
        case dict():
            return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
