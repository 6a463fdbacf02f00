"""Calls of tools in a reply: how families of models write them, and how they are taken out of streamed text.

A client describes tools in OpenAI's form: a JSON array of {"type": "function", "function": {"name", "description",
"parameters"}}, in which the parameters are a JSON schema. The chat template shows them to the model.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine.formats.thinking import overlap
from engine.protocol.events import Grammar

CALL_TOKENS = frozenset(
    ("<tool_call>", "</tool_call>", "<|tool_call|>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
)
"""Special tokens that are part of a call: `ToolCallParser` has to see them."""


@dataclass(frozen=True)
class ToolForm:
    """How a family writes a call: after one of `opens`, and before `close` ("": before the next call, or the end of the
    reply). `bare`: a reply that is nothing but a JSON object is a call, too. A call is a JSON object with the name and,
    under `key`, the arguments, or a list of these; or the name, then `between`, then the arguments. `other`: it is
    written in another way, so it cannot be demanded."""

    opens: tuple[str, ...]
    close: str = ""
    bare: bool = False
    key: str = "arguments"
    listed: bool = False
    between: str = ""
    other: bool = False


HERMES = ToolForm(("<tool_call>",), "</tool_call>")  # Qwen 2.5 and 3 too
QWEN_XML = replace(HERMES, other=True)  # Qwen 3.5, Qwen3-Coder: <function=NAME><parameter=KEY>…
MISTRAL = ToolForm(("[TOOL_CALLS]",), listed=True)
MISTRAL_ARGS = ToolForm(("[TOOL_CALLS]",), between="[ARGS]")  # Ministral 3
GRANITE = ToolForm(("<|tool_call|>",), listed=True)
LLAMA = ToolForm(("<|python_tag|>",), bare=True, key="parameters")
HARMONY = ToolForm((" to=functions.",), other=True)  # gpt-oss, as `channels` shows it
_SIGNS = (  # what a template with the form holds; the first one that fits counts
    (("<|channel|>", " to=functions."), HARMONY),
    (("<|channel|>commentary",), HARMONY),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call|>",), GRANITE),
    (("<tool_call>", "<function="), QWEN_XML),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA),
    (('"parameters": dictionary',), LLAMA),
)


def tool_form(template: str) -> ToolForm | None:
    """The form that a chat template describes; None if it takes no tools, or in a form that is not known."""
    if not re.search(r"\btools\b", template):
        return None
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), None)


class FunctionCall(NamedTuple):
    """`arguments` is JSON."""

    name: str
    arguments: str


class ToolCallParser:
    """Takes the text of a reply piece by piece, without its thinking. Text that could be the beginning of a call is
    held back until the next pieces decide. What begins like a call and is none is text."""

    def __init__(self, form: ToolForm, tools: str) -> None:
        """`tools` is `Chat.tools`."""
        self._form = form
        self._schemas = dict(_functions(tools))
        self._held = ""
        self._open: str | None = None  # what opened the call that is being read
        self._at_start = form.bare
        self._after_call = False

    def feed(self, text: str) -> Iterator[str | FunctionCall]:
        """The texts and calls that `text` completes."""
        self._held += text
        while True:
            if self._open is None:
                yield from self._before_call()
                if self._open is None:
                    return
            body, mark, rest = self._partition_body()
            if not mark:
                return
            self._held = rest
            yield from self._read(body, mark)
            if not self._form.close:
                self._open = mark

    def flush(self) -> Iterator[str | FunctionCall]:
        """What is still held back at the end of the reply."""
        text, self._held = self._held, ""
        yield from self._text(text) if self._open is None else self._read(text, "")

    def _before_call(self) -> Iterator[str]:
        """Yields the text before the next call, and opens the call if it is there."""
        if self._at_start and (stripped := self._held.lstrip()):
            self._at_start = False
            if stripped.startswith("{"):
                self._open = ""
                return
        found = [(at, -len(mark), mark) for mark in self._form.opens if (at := self._held.find(mark)) >= 0]
        if found:
            at, _, self._open = min(found)
            text, self._held = self._held[:at], self._held[at + len(self._open) :]
        elif self._at_start:
            return
        else:
            keep = max(overlap(self._held, mark) for mark in self._form.opens)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield from self._text(text)

    def _partition_body(self) -> tuple[str, str, str]:
        """The held text before the end of the call, the mark that ends it ("" if there is none yet), and the rest."""
        if self._open == "":
            return self._held, "", ""
        ends = (self._form.close,) if self._form.close else self._form.opens
        return max((self._held.partition(mark) for mark in ends), key=lambda parts: len(parts[2] + parts[1]))

    def _read(self, body: str, end: str) -> Iterator[str | FunctionCall]:
        opened, self._open = self._open, None
        calls = list(_calls(body, self._schemas))
        if calls and (opened or all(call.name in self._schemas for call in calls)):
            self._after_call = True
            yield from calls
        else:
            yield from self._text(f"{opened}{body}{end if self._form.close else ''}")

    def _text(self, text: str) -> Iterator[str]:
        if self._after_call:  # the white space between calls
            text = text.lstrip()
        if text:
            self._after_call = False
            yield text


def reply_grammar(
    form: ToolForm | None, tools: str, schema: dict[str, Any] | None, *, is_required: bool
) -> Grammar | None:
    """What a reply may be. With `is_required`, it is a call of one of `tools` (`Chat.tools`). Else it keeps to the JSON
    `schema`, if there is one, or is such a call. Raises ValueError if calls in this form cannot be demanded."""
    if not (tools and form and (is_required or schema is not None)):
        return None if schema is None else Grammar(kind="json_schema", source=json.dumps(schema))
    if not (source := demand(form, tools)):
        raise ValueError("This model's calls cannot be demanded: let tool_choice be auto.")
    if not is_required:
        source = (
            f"{source.replace('start:', 'demanded:', 1)}\nstart: demanded | answer\nanswer: {_json(schema)}"
        )
    return Grammar(kind="lark", source=source)


def demand(form: ToolForm, tools: str, name: str = "") -> str:
    """A Lark grammar, as llguidance reads it, of a reply that is a call of one of `tools` (`Chat.tools`), or of the one
    called `name`. "" if calls in this form cannot be demanded."""
    if form.other:
        return ""
    schemas = {known: schema for known, schema in _functions(tools) if name in ("", known)}
    line = "\n" if form.close else ""
    opened, closed = "" if form.bare else form.opens[0] + line, line + form.close
    if form.between:
        calls = [f"{_literal(opened + known + form.between)} call{i}" for i, known in enumerate(schemas)]
        rules = [f"call{i}: {_json(schema)}" for i, schema in enumerate(schemas.values())]
        return "\n".join((f"start: {' | '.join(calls)}", *rules))
    body: dict[str, Any] = {"anyOf": [_call_schema(known, form.key, schemas[known]) for known in schemas]}
    if form.listed:
        body = {"type": "array", "items": body, "minItems": 1}
    return f"start: {_literal(opened)} call {_literal(closed)}\ncall: {_json(body)}"


def _json(schema: Any) -> str:
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': WHITE_SPACE}})}"


def _literal(text: str) -> str:
    """A text in a Lark grammar."""
    return json.dumps(text) if text else ""


# Where JSON may have white space: without a bound, a model could go on with it for ever.
WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"


def _call_schema(name: str, key: str, arguments: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _functions(tools: str) -> Iterator[tuple[str, Any]]:
    """The name and the schema of the parameters of each tool."""
    for tool in json.loads(tools):
        function = tool["function"]
        yield function["name"], function.get("parameters") or {"type": "object"}


_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\]|<\|message\|>)?\s*(?=\{)")
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_decoder = json.JSONDecoder()


def _calls(body: str, schemas: dict[str, Any]) -> Iterator[FunctionCall]:
    """The calls in the text of one or more calls, without the marks around it; none if it is something else."""
    body = body.strip()
    if body.startswith("<function="):
        for name, parameters in _FUNCTION.findall(body):
            yield FunctionCall(
                name, json.dumps(_parameters(parameters, schemas.get(name)), ensure_ascii=False)
            )
        return
    try:
        if named := _NAMED.match(body):
            arguments, _ = _decoder.raw_decode(body, named.end())
            yield FunctionCall(named[1], json.dumps(arguments, ensure_ascii=False))
            return
        values: list[Any] = []
        while body:
            value, end = _decoder.raw_decode(body)
            values += value if isinstance(value, list) else [value]
            body = body[end:].lstrip(" \t\r\n,;")
    except (ValueError, RecursionError):
        return
    calls = [_call(value) for value in values]
    yield from (call for call in calls if call and all(calls))


def _call(value: Any) -> FunctionCall | None:
    match value:
        case {"function": {"name": str()} as function}:
            return _call(function)
        case {"name": str(name), "arguments": arguments} | {"name": str(name), "parameters": arguments}:
            as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return FunctionCall(name, as_text)
    return None


def _parameters(text: str, schema: Any) -> dict[str, Any]:
    """<parameter=KEY>VALUE</parameter>, in which a text has no quotation marks."""
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return {key: _parameter(value, properties.get(key)) for key, value in _PARAMETER.findall(text)}


def _parameter(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
