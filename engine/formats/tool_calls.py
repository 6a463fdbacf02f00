"""Calls of tools in a reply: how families of models write them, and how they are taken out of streamed text.

A client describes tools in OpenAI's form: a JSON array of {"type": "function", "function": {"name", "description",
"parameters"}}, in which the parameters are a JSON schema. The chat template shows them to the model.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine.formats.json_kinds import kinds, read
from engine.formats.thinking import overlap
from engine.formats.tool_arguments import Arguments, JsonArguments, TagArguments

CALL_TOKENS = frozenset(
    ("<tool_call>", "</tool_call>", "<|tool_call|>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
)
"""Special tokens that are part of a call: `ToolCallParser` has to see them."""


@dataclass(frozen=True)
class ToolForm:
    """How a family writes a call: after one of `opens`, and before `close` ("": before the next call, or the end of the
    reply). `bare`: a reply that is nothing but a JSON object is a call, too. A call is a JSON object with the name and,
    under `key`, the arguments, or a list of these; or the name, then `between`, then the arguments; or, with `tagged`,
    the name and the arguments in tags."""

    opens: tuple[str, ...]
    close: str = ""
    bare: bool = False
    key: str = "arguments"
    listed: bool = False
    between: str = ""
    tagged: bool = False


HERMES = ToolForm(("<tool_call>",), "</tool_call>")  # Qwen 2.5 and 3 too
QWEN_XML = replace(HERMES, tagged=True)  # Qwen 3.5, Qwen3-Coder: <function=NAME><parameter=KEY>…
MISTRAL = ToolForm(("[TOOL_CALLS]",), listed=True)
MISTRAL_ARGS = ToolForm(("[TOOL_CALLS]",), between="[ARGS]")  # Ministral 3
GRANITE = ToolForm(("<|tool_call|>",), listed=True)
LLAMA = ToolForm(("<|python_tag|>",), bare=True, key="parameters")
HARMONY = ToolForm((" to=functions.",), between="<|message|>")  # gpt-oss, as `channels` shows it
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
    """A call, or its beginning. `arguments` is JSON. Without a name, these are more arguments of the last call."""

    name: str
    arguments: str


class ToolCallParser:
    """Takes the text of a reply piece by piece, without its thinking. Text that could be the beginning of a call is
    held back until the next pieces decide. What begins like a call and is none is text: there were `misread` of it."""

    def __init__(self, form: ToolForm, tools: str, *, in_pieces: bool = False) -> None:
        """`tools` is `Chat.tools`. With `in_pieces`, the arguments of a call are given as they come, once it has begun
        with the name of one of `tools`: so they may turn out to be no JSON."""
        self._form, self._in_pieces = form, in_pieces
        self.misread = 0
        self._schemas = dict(functions(tools))
        self._held = ""
        self._open: str | None = None  # what opened the call that is being read
        self._arguments: Arguments | None = None  # of the call that is being handed on in pieces
        self._name = ""  # of that call, until it is given
        self._has_called = False  # whether there was such a call since `_open`
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
            if self._arguments or (self._in_pieces and self._can_begin()):
                yield from self._more_arguments()
                if self._arguments:
                    return
                continue
            body, mark, rest = self._partition_body()
            if not mark:
                return
            self._held = rest
            yield from self._read(body, mark)
            if not self._form.close:
                self._open = mark

    def flush(self, *, is_cut: bool = False) -> Iterator[str | FunctionCall]:
        """What is still held back at the end of the reply. `is_cut`: it was ended in the middle, so a call of a known
        tool is given with the arguments that it has so far."""
        if is_cut and self._open is not None:
            self._in_pieces = True
            yield from self.feed("")
        text, self._held = self._held, ""
        if self._arguments:
            if piece := self._arguments.flush(text):
                yield FunctionCall("", piece)
            return
        yield from self._text(text) if self._open is None else self._read(text, "")

    def _can_begin(self) -> bool:
        """Whether a call of a known tool begins here. Reads up to its arguments, and yields its name with them."""
        for pattern, takes in _BEGINNINGS:
            found = pattern.match(self._held)
            if found and (schema := self._schemas.get(found["name"])) is not None:
                self._held = self._held[found.end() :]
                self._arguments, self._name = takes(schema), found["name"]
                self._has_called = self._after_call = True
                return True
        return False

    def _more_arguments(self) -> Iterator[FunctionCall]:
        assert self._arguments
        piece, self._held = self._arguments.feed(self._held)
        if piece or self._name:
            yield FunctionCall(self._name, piece)
        self._name = ""
        if self._arguments.is_done:
            self._arguments = None

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
        has_called, self._has_called = self._has_called, False
        if has_called and not _CLOSING.sub("", body):
            return
        calls = list(_calls(body, self._schemas))
        if calls and (opened or all(call.name in self._schemas for call in calls)):
            self._after_call = True
            yield from calls
        elif has_called:  # what follows a call, and is none
            yield from self._text(body.lstrip("}] \n"))
        else:
            self.misread += bool(opened)
            yield from self._text(f"{opened}{body}{end if self._form.close else ''}")

    def _text(self, text: str) -> Iterator[str]:
        if self._after_call:  # the white space between calls
            text = text.lstrip()
        if text:
            self._after_call = False
            yield text


def functions(tools: str) -> Iterator[tuple[str, Any]]:
    """The name and the schema of the parameters of each tool."""
    for tool in json.loads(tools):
        function = tool["function"]
        yield function["name"], function.get("parameters") or {"type": "object"}


_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\]|<\|message\|>)?\s*(?=\{)")
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_CLOSING = re.compile(r"[\s}\],;]+")  # what may follow the arguments of a call
_BEGINNINGS: tuple[tuple[re.Pattern[str], Callable[[Any], Arguments]], ...] = (
    (
        re.compile(
            r'[\s{}\[\],;]*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
        ),
        lambda _: JsonArguments(),
    ),
    (
        re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\]|<\|message\|>)?\s*(?=\{)"),
        lambda _: JsonArguments(),
    ),
    (re.compile(r"\s*<function=(?P<name>[^>\s]+)>"), TagArguments),
)
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
    return {key: read(value, kinds(properties.get(key), schema)) for key, value in _PARAMETER.findall(text)}
