"""The tools of a request: which the model is shown, and which it has to call.

Within the server, tools have the form of OpenAI's chat completions. A custom tool, whose input is any text, is shown to
the model as a function with the one parameter `input`.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from app.serve.errors import wrong
from app.serve.protocols.common.json_values import check_size, converted
from engine.formats.tools.forms import HARMONY, ToolForm

INPUT = "input"


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None

    @property
    def as_function(self) -> dict[str, Any]:
        """The form of its text is only described: a grammar of it would be one of text in JSON."""
        grammar = (self.format or {}).get("grammar") or self.format or {}
        definition = grammar.get("definition") if isinstance(grammar, dict) else None
        described = [
            self.description or "",
            f"The input keeps to this grammar:\n{definition}" if definition else "",
        ]
        parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        fields = {
            "name": self.name,
            "description": "\n\n".join(filter(None, described)),
            "parameters": parameters,
        }
        return {"type": "function", "function": fields}


class Tool(msgspec.Struct):
    type: str = "function"
    function: Function | None = None
    custom: Custom | None = None


class Named(msgspec.Struct):
    name: str


class Allowed(msgspec.Struct):
    tools: list[Tool]
    mode: Literal["auto", "required"] = "auto"


class ToolChoice(msgspec.Struct):
    """One tool, or some of those that there are."""

    type: Literal["function", "custom", "tool", "allowed_tools", "none", "auto", "required", "any"] = (
        "function"
    )
    function: Named | None = None
    custom: Named | None = None
    allowed_tools: Allowed | None = None
    name: str | None = None  # in the forms of responses and messages


Choice = Literal["none", "auto", "required", "any"] | ToolChoice | None
"""`any` is Mistral's and Anthropic's word for `required`."""


@dataclass(frozen=True)
class Tools:
    """`shown` are those that the model gets (`Chat.tools`); "" if there are none. If `is_required`, it has to call one.
    `custom` names those whose input is a text, `skipped` the kinds that the server does not have."""

    shown: str = ""
    is_required: bool = False
    custom: frozenset[str] = frozenset()
    skipped: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        kinds = ", ".join(dict.fromkeys(self.skipped))
        return f"tools that are not there: {kinds}" if kinds else ""

    def text_input(self, arguments: str) -> str:
        """What a call gives to a custom tool."""
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        text = value.get(INPUT) if isinstance(value, dict) else None
        return text if isinstance(text, str) else arguments


def chosen_tools(raw: list[dict[str, Any]] | None, choice: Choice, form: ToolForm | None) -> Tools:
    """The tools of a request for a model that writes calls in a `form` (None: it takes no tools). Raises
    ApiError."""
    if isinstance(choice, ToolChoice) and choice.type in ("none", "auto", "required", "any"):
        choice = choice.type
    if not raw or choice == "none":
        return Tools()
    check_size(raw, "tools")
    raw = [nested(tool) for tool in raw]
    tools = converted(raw, list[Tool], "tools")
    functions: dict[str, dict[str, Any]] = {}
    custom, skipped = list[str](), list[str]()
    for i, (tool, as_sent) in enumerate(zip(tools, raw, strict=True)):
        match tool.type:
            case "function" if tool.function:
                name, shown = tool.function.name, as_sent
                if form is HARMONY and tool.function.description is None:  # its template needs one
                    shown = {**as_sent, "function": {**as_sent["function"], "description": ""}}
            case "custom" if tool.custom:
                name, shown = tool.custom.name, tool.custom.as_function
                custom.append(name)
            case "function" | "custom":
                raise wrong(f"tools[{i}].{tool.type}: it is missing.", f"tools[{i}].{tool.type}")
            case _:
                skipped.append(tool.type)
                continue
        if not re.fullmatch(r"[\w.-]{1,128}", name) or name in functions:
            raise wrong("Tools need different names of letters, digits, _, - and dots.", "tools")
        functions[name] = shown
    names, is_required = _chosen(choice, functions)
    if is_required and not names:
        raise wrong("There is no tool that could be called.", "tool_choice")
    if not names:
        return Tools(skipped=tuple(skipped))
    if form is None:
        raise wrong("This model was trained for too short a context to take tools.", "tools")
    as_json = json.dumps([functions[name] for name in names], ensure_ascii=False)
    return Tools(as_json, is_required, frozenset(custom), tuple(skipped))


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of responses: with its fields beside the type."""
    tool = nested(tool)
    kind = tool.get("type")
    fields = tool.get(kind) if isinstance(kind, str) else None
    return {"type": kind, **fields} if isinstance(fields, dict) else tool


def nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat completions. Some clients send the forms of responses and messages here: `name` and
    `parameters` (or `input_schema`) beside the type, which may be missing."""
    kind = tool.get("type", "function")
    if kind not in ("function", "custom") or kind in tool or not isinstance(tool.get("name"), str):
        return tool
    fields = {name: value for name, value in tool.items() if name not in ("type", "input_schema")}
    if (schema := tool.get("input_schema")) is not None:
        kind, fields = "function", {**fields, "parameters": schema}
    return {"type": kind, kind: fields}


def _chosen(choice: Choice, names: Collection[str]) -> tuple[Collection[str], bool]:
    """The tools that may be called, each once, and whether one has to be. Raises ApiError."""
    if not isinstance(choice, ToolChoice):
        return names, choice in ("required", "any")
    if choice.allowed_tools:
        tools = [tool.function or tool.custom for tool in choice.allowed_tools.tools]
        wanted = dict.fromkeys(tool.name for tool in tools if tool)
        is_required = choice.allowed_tools.mode == "required"
    else:
        one = choice.function or choice.custom
        name = one.name if one else choice.name
        wanted, is_required = dict.fromkeys([name] if name else []), True
    if missing := [name for name in wanted if name not in names]:
        raise wrong(f"There is no tool {missing[0]!r}.", "tool_choice")
    if not wanted:
        raise wrong("tool_choice names no tool.", "tool_choice")
    return wanted, is_required
