"""JSON schemas of clients that do not ask for strictness: what llguidance cannot keep is left out, so that the rest is
kept. Libraries write such parts by themselves: Zod `propertyNames` and patterns that look ahead, pydantic
`uniqueItems`.

Its keywords and formats: https://github.com/guidance-ai/llguidance, docs/json_schema.md.
"""

import re
from collections.abc import Mapping
from typing import Any

from engine.formats.tools.json_subschemas import with_subschemas

NOT_KEPT = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
)  # fmt: skip
FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_PARTS = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9bB<>]")
"""Looking ahead or behind, borders of words, and what an earlier group has matched."""


_NEEDLESS: dict[str, tuple[Any, ...]] = {
    "propertyNames": ({}, {"type": "string"}, True),
    "uniqueItems": (False,),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
}
"""Values with which keywords say nothing."""


def without_needless(schema: Any) -> Any:
    """A schema that allows the same, without keywords of `NOT_KEPT` that say nothing. Zod writes `propertyNames` so."""
    if not isinstance(schema, Mapping):
        return schema
    said = {key: value for key, value in schema.items() if value not in _NEEDLESS.get(key, ())}
    return with_subschemas(said, without_needless)


def loosened(schema: Any) -> Any:
    """A schema without what cannot be kept."""
    if not isinstance(schema, Mapping):
        return schema
    made = with_subschemas({key: value for key, value in schema.items() if key not in NOT_KEPT}, loosened)
    if isinstance(patterns := made.get("patternProperties"), Mapping):
        made["patternProperties"] = {
            pattern: value for pattern, value in patterns.items() if not _LOOKS_AROUND.search(pattern)
        }
    for key, is_kept in (("pattern", _is_pattern), ("format", _is_format), ("$ref", _is_reference)):
        if key in made and not is_kept(made[key]):
            del made[key]
    if "type" in made:
        kinds = made["type"] if isinstance(made["type"], list) else [made["type"]]
        if any(kind not in _TYPES for kind in kinds):
            del made["type"]
    return made


def closed(schema: Any) -> Any:
    """A schema whose objects have the properties that it names and no others, unless it says something of others. Most
    schemas mean that without saying it (pydantic's do), llama.cpp, Ollama and vLLM take them so, and a small model
    would go on with properties of its own. A schema that describes an object in several parts stays as it is: what one
    part names is another's other."""
    return schema if _has_parts(schema) else _closed(schema)


def _has_parts(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    within = list[bool]()
    with_subschemas(schema, lambda each: within.append(_has_parts(each)))
    all_of = schema.get("allOf")
    is_part = "properties" in schema and any(key in schema for key in _PARTS)
    return is_part or (isinstance(all_of, list) and len(all_of) > 1) or any(within)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = with_subschemas(schema, _closed)
    named, required = schema.get("properties"), schema.get("required", [])
    names = frozenset(named) if isinstance(named, Mapping) else frozenset()
    is_whole = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if names and is_whole and names.issuperset(required) and not any(key in schema for key in _OTHERS):
        made["additionalProperties"] = False
    return made


def _is_pattern(pattern: object) -> bool:
    return isinstance(pattern, str) and not _LOOKS_AROUND.search(pattern)


def _is_format(format: object) -> bool:
    return format in FORMATS


def _is_reference(reference: object) -> bool:
    """Whether this is a reference, and leads to a place within the schema."""
    return isinstance(reference, str) and reference.startswith("#")


def moved(schema: Any, place: str) -> Any:
    """A schema at a `place` within another one, whose references to itself lead there. A place is a JSON pointer:
    https://www.rfc-editor.org/rfc/rfc6901."""
    if not isinstance(schema, Mapping):
        return schema
    made = with_subschemas(schema, lambda within: moved(within, place))
    reference = made.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        made["$ref"] = f"#{place}{reference[1:]}"
    made.pop("$id", None)  # references would begin there
    return made
