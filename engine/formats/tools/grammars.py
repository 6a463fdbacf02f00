"""What a reply may be that has to call a tool, or to keep to a JSON schema or texts: grammars as llguidance reads them.

Its syntax: https://github.com/guidance-ai/llguidance, docs/syntax.md.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.formats.tools.calls import functions
from engine.formats.tools.forms import HARMONY, Tags, ToolForm
from engine.formats.tools.gemma_grammar import GEMMA_RULES, gemma_call, parameters, separated
from engine.formats.tools.json_formats import with_strict_formats
from engine.formats.tools.json_kinds import KindsOf
from engine.formats.tools.json_leniency import closed, loosened, moved, without_needless
from engine.protocol.events import Grammar

# Where JSON may have white space: without a bound, a model could go on with it for ever.
WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
_ANY_TEXT = "/(?s:.*)/"
MAX_REPEATED = 1 << 20  # characters, of all tools together
_CHANNEL_NAMES = '("analysis" | "commentary" | "final")'


def reply_grammar(
    form: ToolForm | None, tools: str, schema: dict[str, Any] | None, *, is_required: bool
) -> Grammar | None:
    """What a reply may be; None if it may be anything. With `is_required`, it is a call of one of `tools`
    (`Chat.tools`). Else it keeps to the JSON `schema`, if there is one, or is such a call; without a schema, it is any
    text, but calls keep to the schemas of `tools` if one of these is strict."""
    if not (tools and form):
        return None if schema is None else schema_grammar(schema)
    if is_required:
        return _grammar(form, tools, "")
    if schema is not None:
        return _grammar(form, tools, f"answer: {_json(schema)}")
    if any(tool["function"].get("strict") is True for tool in json.loads(tools)):
        return _held_messages(form, tools) if form is HARMONY else _held_calls(form, tools)
    return None


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """As short as it can be: the length of a source has a limit."""
    source = json.dumps(with_strict_formats(schema), separators=(",", ":"))
    return Grammar(kind="json_schema", source=source)


def choice_grammar(texts: Iterable[str]) -> Grammar:
    """One of `texts`."""
    return Grammar(kind="lark", source=f"start: {' | '.join(map(_literal, texts))}", ends_numbers=False)


def _grammar(form: ToolForm, tools: str, answer: str) -> Grammar:
    """A call, or what the rule `answer` says, if there is one."""
    rules = [*_call(form, tools), *filter(None, [answer])]
    if form is HARMONY:
        final = ' | <|channel|> "final" <|message|> answer' if answer else ""
        rules += [
            f"start: thought? (call{final})",
            'thought: <|channel|> "analysis" <|message|> thinking <|end|> <|start|> "assistant"',
            f"thinking: {_ANY_TEXT}",
        ]
        return Grammar(kind="reply", source="\n".join(rules))
    opened = "" if form.bare else _literal(form.opens[0])
    rules.append(f"start: {opened} call{' | answer' if answer else ''}")
    return Grammar(kind="lark", source="\n".join(rules))


def _held_calls(form: ToolForm, tools: str) -> Grammar:
    """Any text, and calls after it. A text ends where a call is opened. Where a call alone is one, too, no other text
    begins so."""
    opened, bracket = _literal(form.opens[0]), r"\[" if form.in_python else "{"
    text = rf"/(?s:\s*([^{bracket}\s].*)?)/" if form.bare else _ANY_TEXT
    rules = [
        *_call(form, tools),
        f"start: text | before call (more call)*{' | bare call' if form.bare else ''}",
        f"text: {text}",
        f"before[suffix={opened}]: {text}",
        f"more: /\\s*/ {opened}",
    ]
    if form.bare:
        rules.append(r"bare: /\s*/")
    return Grammar(kind="lark", source="\n".join(rules))


def _held_messages(form: ToolForm, tools: str) -> Grammar:
    """Messages of gpt-oss on any channel, the last of which may be a call."""
    rules = [
        *_call(form, tools),
        "start: (said next)* (said | call)",
        'next: <|end|> <|start|> "assistant"',
        f"said: <|channel|> {_CHANNEL_NAMES} <|message|> text",
        f"text: {_ANY_TEXT}",
    ]
    return Grammar(kind="reply", source="\n".join(rules))


def _call(form: ToolForm, tools: str) -> Iterator[str]:
    """The rule `call`, which is what follows the mark that opens a call, and those that it needs."""
    known = _kept_schemas(tools)
    names = [f"call{i}" for i in range(len(known))]
    if form is HARMONY:
        begin = '<|channel|> "commentary to=functions.%s " <|constrain|> "json" <|message|>'
        yield from (f"{name}: {begin % tool} json{name}" for name, tool in zip(names, known, strict=True))
        yield from (
            f"json{name}: {_json(schema)}" for name, schema in zip(names, known.values(), strict=True)
        )
        yield f"call: {' | '.join(names)}"
    elif tags := form.tags:
        for name, (tool, schema) in zip(names, known.items(), strict=True):
            yield from _tagged(tags, name, tool, schema, MAX_REPEATED // len(known))
        around = ("", "") if tags.ends_call else ("\n", f"\n{form.close}")
        yield f"call: {_literal(around[0])} ({' | '.join(names)}) {_literal(around[1])}"
    elif form.before_name:
        for name, (tool, schema) in zip(names, known.items(), strict=True):
            yield from gemma_call(name, f"{form.before_name}{tool}", schema)
        yield f"call: ({' | '.join(names)}) {_literal(form.close)}"
        yield from GEMMA_RULES
    elif form.in_python:
        for name, (tool, schema) in zip(names, known.items(), strict=True):
            yield from _in_python(name, tool, schema, MAX_REPEATED // len(known))
        close = _literal(form.close) + ("?" if form.bare else "")
        yield f'call: "[" python_call (", " python_call)* "]" {close}'
        yield f"python_call: {' | '.join(names)}"
    elif form.between:
        for name, (tool, schema) in zip(names, known.items(), strict=True):
            yield f"{name}: {_literal(tool + form.between)} json{name} {_literal(form.close)}"
            yield f"json{name}: {_json(schema)}"
        yield f"call: {' | '.join(names)}"
    else:
        above = "/items/anyOf" if form.listed else "/anyOf"
        calls = [
            _call_schema(tool, form, moved(schema, f"{above}/{i}/properties/{form.key or tool}"))
            for i, (tool, schema) in enumerate(known.items())
        ]
        body: dict[str, Any] = {"anyOf": calls}
        if form.listed:
            body = {"type": "array", "items": body, "minItems": 1}
        line = _literal("\n") if form.close else ""
        yield f"call: {line} json_call {_literal(f'{chr(10)}{form.close}') if form.close else ''}"
        yield f"json_call: {_json(body)}"


def _kept_schemas(tools: str) -> dict[str, Any]:
    """The schemas of `tools` by name, `closed`, and of those that are not strict as far as they can be kept."""
    strict = {
        tool["function"]["name"] for tool in json.loads(tools) if tool["function"].get("strict") is True
    }
    kept = {True: without_needless, False: loosened}
    return {name: kept[name in strict](closed(schema)) for name, schema in functions(tools)}


def _tagged(tags: Tags, name: str, tool: str, schema: Any, room: int) -> Iterator[str]:
    """The rule `name` of a call in tags. Its parameters come in the order of the schema."""
    parts, kinds, is_repeatable = list[str](), KindsOf(schema), _is_repeatable(schema, room)
    for i, (key, value, is_required) in enumerate(parameters(schema)):
        rule = f"{name}_{i}"
        parts.append(rule if is_required else f"{rule}?")
        yield f"{rule}: {_literal(key.join(tags.key))} value_{rule}"
        yield from _value(f"value_{rule}", value, kinds, is_repeatable, tags.value_end)
    yield f"{name}: {_literal(tool.join(tags.name))} {' '.join(parts)} {_literal(tags.end)}"


def _value(name: str, schema: Any, kinds: KindsOf, is_repeatable: bool, end: str) -> Iterator[str]:
    """The rule `name` of a value and the `end` of its tag. A text is written as it is."""
    end = _literal(end)
    allowed = kinds(schema)
    may_be_text = not allowed or "string" in allowed
    if may_be_text and isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
        texts = [one if isinstance(one, str) else json.dumps(one) for one in schema["enum"]]
        yield f"{name}: ({' | '.join(map(_literal, texts))}) {end}"
    elif may_be_text:
        yield f"{name}[suffix={end}]: {_ANY_TEXT}"
    else:
        yield f"{name}: json_{name} {end}"
        yield f"json_{name}: {_json(_alone(schema, kinds.whole, is_repeatable))}"


def _in_python(name: str, tool: str, schema: Any, room: int) -> Iterator[str]:
    """The rule `name` of a call of a function, whose values are in JSON."""
    parts, is_repeatable = list[tuple[str, bool]](), _is_repeatable(schema, room)
    for i, (key, value, is_required) in enumerate(parameters(schema)):
        rule = f"{name}_{i}"
        parts.append((rule, is_required))
        yield f"{rule}: {_literal(f'{key}=')} json_{rule}"
        yield f"json_{rule}: {_json(_alone(value, schema, is_repeatable))}"
    yield from separated(f"{name}_all", parts, ", ")
    yield f'{name}: {_literal(f"{tool}(")} {name}_all ")"'


def _is_repeatable(whole: Any, room: int) -> bool:
    """Whether each parameter may repeat the `whole`, where there is room for so many characters."""
    n = sum(1 for _ in parameters(whole))
    return n == 0 or len(json.dumps(whole)) * n <= room


def _alone(schema: Any, whole: Mapping[str, Any], is_repeatable: bool) -> Any:
    """A part of the `whole`, to which its references lead, as a schema of its own; any JSON unless the whole
    `is_repeatable`, as each part repeats it."""
    if not isinstance(schema, Mapping) or "$ref" not in json.dumps(schema):
        return schema
    if not is_repeatable:
        return {}
    place = "/$defs/whole"
    return moved(schema, place) | {"$defs": {"whole": moved(whole, place)}}


def _json(schema: Any) -> str:
    schema = with_strict_formats(schema) if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': WHITE_SPACE}})}"


def _literal(text: str) -> str:
    """A text in a Lark grammar."""
    return json.dumps(text) if text else ""


def _call_schema(name: str, form: ToolForm, arguments: Any) -> dict[str, Any]:
    named = {form.name_key: {"const": name}, form.key: arguments} if form.key else {name: arguments}
    return {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}
