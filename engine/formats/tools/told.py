"""Tools for models whose chat template shows none, or in a form that is not known: they are told of in the system text,
and calls and results become text. Calls are asked for in the form of Hermes, which most models have seen."""

import json
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from engine.formats.tools.forms import HERMES, ToolForm
from engine.protocol.events import Message, ToolCall

_OPEN, _CLOSE = f"{HERMES.opens[0]}\n", f"\n{HERMES.close}"
_TOLD = f"""You can use tools. Each line is one, with a JSON schema of its parameters:
{{tools}}

To use a tool, write a call in this form, and one more for each further call, and end your reply with it:
{_OPEN}{{{{"name": "the name of the tool", "arguments": {{{{"the name of a parameter": "its value"}}}}}}}}{_CLOSE}
The next message has the results. Where no tool helps, answer without one."""


def told(messages: Sequence[Message], tools: str) -> list[Message]:
    """The conversation without calls and results. `tools` is `Chat.tools`, or "" if the model may call none now."""
    kept = list(_as_text(messages))
    if not tools:
        return kept
    about = _TOLD.format(tools="\n".join(_line(tool["function"]) for tool in json.loads(tools)))
    if kept and kept[0].role == "system":
        return [replace(kept[0], content=f"{kept[0].content}\n\n{about}"), *kept[1:]]
    return [Message(role="system", content=about), *kept]


def written(calls: Sequence[ToolCall], form: ToolForm) -> str:
    """Calls as the model has written them, between the marks of `form`: for templates that show tools, but no calls
    (LFM2's). Arguments that are no JSON object are left out."""
    return ", ".join(_in_python(call) if form.in_python else _in_json(call) for call in calls)


def _in_python(call: ToolCall) -> str:
    try:
        given = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        given = {}
    fields = given.items() if isinstance(given, dict) else ()
    named = ", ".join(f"{key}={_python_literal(value)}" for key, value in fields)
    return f"{call.name}({named})"


def _python_literal(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _in_json(call: ToolCall) -> str:
    return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}'


def _line(function: dict[str, object]) -> str:
    fields = {key: function[key] for key in ("name", "description", "parameters") if function.get(key)}
    return json.dumps(fields, ensure_ascii=False)


def _as_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Calls stand in the reply, and results in a message of the user; several of them in one."""
    results: list[Message] = []
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            results.append(Message(role="user", content=text, pictures=message.pictures))
            continue
        if results:
            yield joined(results, "\n")
            results = []
        if message.tool_calls:
            calls = (f"{_OPEN}{_in_json(call)}{_CLOSE}" for call in message.tool_calls)
            content = "\n".join(filter(None, (message.content, *calls)))
            message = replace(message, content=content, tool_calls=())
        yield message
    if results:
        yield joined(results, "\n")


def joined(turn: Sequence[Message], between: str) -> Message:
    """Messages as the first one, with the texts and the pictures of all."""
    if len(turn) == 1:
        return turn[0]
    content = between.join(message.content for message in turn if message.content)
    pictures = tuple(picture for message in turn for picture in message.pictures)
    return replace(turn[0], content=content, pictures=pictures)
