"""Takes the calls of tools out of a streamed reply, in the form in which its model writes them (`forms`)."""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from engine.formats.thinking import overlap
from engine.formats.tools.arguments import Arguments, GemmaArguments, JsonArguments, TagArguments
from engine.formats.tools.forms import QWEN_XML, ToolForm


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
        self._tools = tools
        self._thought: list[str] | None = []  # of a reply that has nothing else
        self._schemas = dict(functions(tools))
        self._spelling = _spelling(form)
        self._held = ""
        self._open: str | None = None  # what opened the call that is being read
        self._arguments: Arguments | None = None  # of the call that is being handed on in pieces
        self._name = ""  # of that call, until it is given
        self._has_called = False  # whether there was such a call since `_open`
        self._at_start = form.bare
        self._after_call = False

    def feed(self, text: str) -> Iterator[str | FunctionCall]:
        """The texts and calls that `text` completes."""
        if text.strip():
            self._thought = None
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

    def think(self, text: str) -> None:
        """Takes thinking. Calls at the end of a reply that is nothing else count: models forget to close it."""
        if self._thought is not None:
            self._thought.append(text)

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
        if self._thought and not is_cut:
            yield from self._calls_in_thought()

    def _calls_in_thought(self) -> Iterator[FunctionCall]:
        thought = "".join(self._thought or ())
        opened = [found.start() for found in re.finditer("|".join(map(re.escape, self._form.opens)), thought)]
        for at in opened[-_MOST_IN_THOUGHT:]:
            parser = ToolCallParser(self._form, self._tools)
            parts = [*parser.feed(thought[at:]), *parser.flush()]
            calls = [part for part in parts if isinstance(part, FunctionCall)]
            if calls and not "".join(part for part in parts if isinstance(part, str)).strip():
                yield from (call for call in calls if call.name in self._schemas)
                return

    def _can_begin(self) -> bool:
        """Whether a call of a known tool begins here. Reads up to its arguments, and yields its name with them."""
        beginning = self._held[:_MAX_BEGINNING]  # each piece asks again
        for pattern, takes in (*_JSON_BEGINNINGS, self._spelling):
            found = pattern.match(beginning)
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
            if stripped.startswith("[" if self._form.in_python else "{"):
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
        calls = list(self._calls(body))
        if calls and (opened or all(call.name in self._schemas for call in calls)):
            self._after_call = True
            yield from calls
        elif has_called:  # what follows a call, and is none
            yield from self._text(body.lstrip("}] \n"))
        else:
            self.misread += bool(opened)
            yield from self._text(f"{opened}{body}{end if self._form.close else ''}")

    def _calls(self, body: str) -> Iterator[FunctionCall]:
        """The calls in the text of one or more calls, without the marks around it; none if it is something else."""
        body = body.strip()
        pattern, takes = self._spelling
        tags = self._form.tags
        whole = f"{body}{tags.end}" if tags and tags.ends_call else body
        if pattern.match(whole):
            while found := pattern.match(whole):
                reader = takes(self._schemas.get(found["name"]))
                arguments, whole = reader.feed(whole[found.end() :])
                arguments += "" if reader.is_done else reader.flush(whole)
                if not _is_json(arguments):
                    return
                yield FunctionCall(found["name"], arguments)
        elif self._form.in_python and not body.startswith(("{", "[{")):
            yield from _python_calls(body, self._schemas)
        else:
            yield from _json_calls(body, _call if self._form.key else _keyed_call)

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


_Spelling = tuple[re.Pattern[str], Callable[[Any], Arguments]]
_MOST_IN_THOUGHT = 16
_MAX_BEGINNING = 1024
"""Characters of a call before its arguments, where these are given in pieces."""
_ID = r'"(?:tool_call_)?id"\s*:\s*"[\w-]*"'
_CLOSING = re.compile(rf"(?:[\s}}\],;]|{_ID})+")  # what may follow the arguments of a call
_NAMED = re.compile(
    r"\s*+(?P<name>[\w.-]++)\s*+(?:\[CALL_ID\][\w-]*|:\d+)?"
    r"(?:\[ARGS\]|<\|message\|>|<\|tool_call_argument_begin\|>|>)?\s*(?=\{)"
)
_IN_JSON = re.compile(
    rf'(?:[\s{{}}\[\],;]|{_ID})*"(?:tool_)?name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_JSON_BEGINNINGS: tuple[_Spelling, ...] = (
    (_IN_JSON, lambda _: JsonArguments()),
    (_NAMED, lambda _: JsonArguments()),
)
_FENCES = re.compile(r"^```\w*\n|\n```$")
_NAMES = {"true": True, "false": False, "null": None}
_decoder = json.JSONDecoder()
# What Python thinks of the Python that a model writes is nothing for the terminal.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")


def _spelling(form: ToolForm) -> _Spelling:
    """How a call begins that is not in JSON, up to its arguments, and what reads these. A model whose calls are in JSON
    may still write one as Qwen's models do."""
    if form.before_name:
        before = re.escape(form.before_name)
        return re.compile(rf"\s*{before}(?P<name>[\w.-]+)\s*(?=\{{)"), lambda _: GemmaArguments()
    tags = form.tags or QWEN_XML.tags
    assert tags
    before, after = re.escape(tags.name[0]), re.escape(tags.name[1].strip())
    if not after:
        after = rf"\s*(?={re.escape(tags.key[0])}|{re.escape(tags.end)})"
    return re.compile(rf"\s*{before}(?P<name>[^>\s<]+){after}"), lambda schema: TagArguments(tags, schema)


def _json_calls(body: str, read: Callable[[Any], FunctionCall | None]) -> Iterator[FunctionCall]:
    """The calls in JSON, or with arguments in JSON; none if it is something else."""
    try:
        if named := _NAMED.match(body):
            arguments, _ = _decoder.raw_decode(body, named.end())
            yield FunctionCall(named["name"], json.dumps(arguments, ensure_ascii=False))
            return
        values: list[Any] = []
        while body:
            value, end = _decoder.raw_decode(body)
            values += value if isinstance(value, list) else [value]
            body = body[end:].lstrip(" \t\r\n,;")
    except (ValueError, RecursionError):
        return
    calls = [read(value) for value in values]
    yield from (call for call in calls if call and all(calls))


def _python_calls(body: str, schemas: dict[str, Any]) -> Sequence[FunctionCall]:
    """The calls in a list of calls of functions, or in lines of them; none if it is something else."""
    try:
        lines = [line.value for line in ast.parse(_FENCES.sub("", body)).body if isinstance(line, ast.Expr)]
        nodes = [node for line in lines for node in (line.elts if isinstance(line, ast.List) else [line])]
        return [_python_call(node, schemas) for node in nodes]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr, schemas: dict[str, Any]) -> FunctionCall:
    """Values without a name are those of the first parameters. Raises ValueError and TypeError."""
    if not isinstance(node, ast.Call):
        raise ValueError
    name = ast.unparse(node.func)
    schema = schemas.get(name)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    given = dict(zip(properties or (), node.args, strict=False))
    if len(given) < len(node.args):
        raise ValueError
    given |= {word.arg or "": word.value for word in node.keywords}
    values = {key: ast.literal_eval(_JsonNames().visit(value)) for key, value in given.items()}
    return FunctionCall(name, json.dumps(values, ensure_ascii=False))


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _keyed_call(value: Any) -> FunctionCall | None:
    """A call whose name is the key of its arguments, or one as others write it."""
    if isinstance(value, dict) and len(value) == 1:
        [(name, arguments)] = value.items()
        if isinstance(arguments, dict):
            return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))
    return _call(value)


def _call(value: Any) -> FunctionCall | None:
    match value:
        case {"function": {"name": str()} as function}:
            return _call(function)
        case {"name": str(name), "arguments": arguments} | {"name": str(name), "parameters": arguments}:
            as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return FunctionCall(name, as_text)
        case {"tool_name": str(name), "parameters": arguments}:
            return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))
    return None
