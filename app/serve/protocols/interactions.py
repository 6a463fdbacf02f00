"""Google's interactions, as responses: https://ai.google.dev/gemini-api/docs/interactions.

A conversation is a row of steps: what the user said, what the model thought and said, calls and their results. The
server remembers it, as it does that of responses, so that the next interaction may name the one before.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from starlette.requests import Request

from app.serve.errors import ApiError, wrong
from app.serve.protocols import chat
from app.serve.protocols.common.remembered import Conversations, Remembered
from app.serve.protocols.common.reply import Asked, Json
from app.serve.protocols.common.thinking import Reasoning
from app.serve.protocols.interaction_reply import InteractionReply, signature, text_content
from app.serve.protocols.response_body import ResponsesBody, ResponseToolChoice, TextConfig, TextFormat
from app.serve.protocols.responses import as_chat
from app.serve.service import Service

_CONTENTS = ("text", "image", "document", "audio", "video")
_NEW = "n_new_items"
"""A name beside those of a remembered interaction: how many of the items before its answer came with it."""
Level = Literal["minimal", "low", "medium", "high", "xhigh"]
_CHOICES: dict[Any, Literal["auto", "required", "none"]] = {"any": "required", "none": "none"}


class _Allowed(msgspec.Struct):
    mode: str | None = None
    tools: list[str] | None = None


class _ToolChoice(msgspec.Struct):
    allowed_tools: _Allowed | None = None


class _Generation(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    thinking_level: Level | None = None
    thinking_summaries: str | None = None
    tool_choice: str | _ToolChoice | None = None


class InteractionBody(msgspec.Struct, kw_only=True):
    """`input`: a text, a content, or a list of contents or of steps."""

    input: str | dict[str, Any] | list[dict[str, Any]] | None = None
    model: str | None = None
    agent: str | None = None
    system_instruction: str | None = None
    previous_interaction_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    generation_config: _Generation | None = None
    response_format: dict[str, Any] | list[dict[str, Any]] | None = None
    response_mime_type: str | None = None
    labels: dict[str, str] | None = None

    @property
    def earlier_id(self) -> str | None:
        """The id of the interaction that it goes on with."""
        return self.previous_interaction_id


def asked(body: InteractionBody, service: Service, kept: Conversations, owner: str) -> Asked:
    """May take as long as the text is. Raises ApiError."""
    if body.agent:
        raise wrong("This server runs no agents: name a model.", "agent")
    if body.background:
        raise wrong("background is not supported: let the interaction stream.", "background")
    config = body.generation_config or _Generation()
    response = ResponsesBody(
        input=None if body.input is None else [*_items(body.input)],
        instructions=body.system_instruction,
        previous_response_id=body.previous_interaction_id,
        tools=body.tools,
        tool_choice=_choice(config.tool_choice),
        max_output_tokens=config.max_output_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        text=_format(body),
        reasoning=Reasoning(effort=config.thinking_level),
    )
    made, _, items, _ = as_chat(response, kept, owner)
    made.seed, made.stop = config.seed, config.stop_sequences
    request, tools = chat.chat_request(made, service)
    shows_thoughts = config.thinking_summaries == "auto"
    reply = InteractionReply(service.model, shows_thoughts, body.previous_interaction_id, body.labels)
    if body.store is not False:

        def keep() -> None:
            output = [item for step in reply.steps for item in _items([step])]
            known = reply.whole() | {_NEW: len(response.input or ())}
            kept.keep(reply.id, Remembered(owner, [*items, *output], len(items), known))

        reply.keep = keep
    return Asked([request], reply, bool(body.stream), made.stops, note=tools.note)


def remembered(known: Remembered, request: Request) -> Json:
    """An interaction as its client had it, and what it asked if that is wanted. Raises ApiError."""
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "Only interactions in the background can be streamed later.")
    interaction = dict(known.response)
    n_new = interaction.pop(_NEW, None)
    if n_new is None:
        raise ApiError(404, "This is no interaction: GET /v1/responses/ID tells of a response.")
    if request.query_params.get("include_input") == "true":
        interaction["input"] = _input(known.items[known.given - n_new : known.given])
    return interaction


def _items(given: str | dict[str, Any] | list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The items of a response for a text, contents or steps. Those of kinds that the server does not know are left out.
    Contents that follow each other are one message; results of functions that are among them come before it. Raises
    ApiError."""
    if isinstance(given, str):
        yield _message("user", given)
        return
    contents = list[dict[str, Any]]()
    for step in given if isinstance(given, list) else [given]:
        if contents and step.get("type") not in (*_CONTENTS, "function_result"):
            yield _message("user", contents)
            contents = []
        match step:
            case {"type": "user_input", "content": content}:
                yield _message("user", content)
            case {"type": "model_output", "content": content}:
                yield _message("assistant", content)
            case {"role": role, "content": content}:  # how turns were given at first
                yield _message("assistant" if role == "model" else "user", content)
            case {"type": "thought"}:
                thought = {"type": "reasoning_text", "text": _thought(step)}
                yield {"type": "reasoning", "content": [thought]}
            case {"type": "function_call", "name": str(name)}:
                arguments = json.dumps(step.get("arguments") or {}, ensure_ascii=False)
                yield {
                    "type": "function_call",
                    "call_id": step.get("id"),
                    "name": name,
                    "arguments": arguments,
                }
            case {"type": "function_result"}:
                output = _result(step.get("result"))
                yield {"type": "function_call_output", "call_id": step.get("call_id"), "output": output}
            case {"type": kind} if kind in _CONTENTS:
                contents.append(step)
    if contents:
        yield _message("user", contents)


def _message(role: str, content: Any) -> dict[str, Any]:
    """Raises ApiError."""
    if not isinstance(content, str):
        content = [_part(each) for each in (content if isinstance(content, list) else [content])]
    return {"type": "message", "role": role, "content": content}


def _part(content: Any) -> dict[str, Any]:
    """A content as a part of a message. Raises ApiError."""
    match content:
        case str(text) | {"type": "text", "text": str(text)}:
            return {"type": "input_text", "text": text}
        case {"type": "image"}:
            url = content.get("data") or content.get("uri")
            return {"type": "input_image", "image_url": url, "mime_type": content.get("mime_type")}
        case {"type": "document", "data": data}:
            return {"type": "input_file", "file_data": data, "mime_type": content.get("mime_type")}
    raise wrong(
        "This server reads text, pictures and documents of text, whose data come with the request.", "input"
    )


def _input(items: list[dict[str, Any]]) -> str | list[Json]:
    """What was asked with items that `_items` made: a text alone as such, else steps."""
    match items:
        case [{"role": "user", "content": str(text)}]:
            return text
    return [*map(_step, items)]


def _step(item: dict[str, Any]) -> Json:
    match item:
        case {"type": "message", "role": role, "content": content}:
            parts = [text_content(content)] if isinstance(content, str) else [*map(_content, content)]
            return {"type": "model_output" if role == "assistant" else "user_input", "content": parts}
        case {"type": "function_call"}:
            return {
                "type": "function_call",
                "id": item["call_id"],
                "name": item["name"],
                "arguments": json.loads(item["arguments"]),
            }
        case {"type": "function_call_output", "output": output}:
            result = output if isinstance(output, str) else [*map(_content, output)]
            return {"type": "function_result", "call_id": item["call_id"], "result": result}
    return {"type": "thought", "signature": signature(item["content"][0]["text"])}


def _content(part: dict[str, Any]) -> Json:
    """A part of a message as it came."""
    match part:
        case {"type": "input_text", "text": text}:
            return text_content(text)
        case {"type": "input_image"}:
            name = "uri" if ":" in str(part["image_url"]) else "data"  # which base64 has not
            kind = {"mime_type": part["mime_type"]} if part["mime_type"] else {}
            return {"type": "image", name: part["image_url"]} | kind
    return {"type": "document", "data": part["file_data"], "mime_type": part["mime_type"]}


def _result(result: Any) -> str | list[dict[str, Any]]:
    """What a function returned: a text, contents, or any other value as JSON."""
    is_content = isinstance(result, list) and all(
        isinstance(each, dict) and "type" in each for each in result
    )
    if is_content:
        return [_part(each) for each in result]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _thought(step: dict[str, Any]) -> str:
    """What the model thought, by the step of an answer: its signature has all of it."""
    try:
        return base64.b64decode(step.get("signature") or "", validate=True).decode()
    except (TypeError, ValueError):
        return ""


def _choice(choice: str | _ToolChoice | None) -> Literal["auto", "required", "none"] | ResponseToolChoice:
    if not isinstance(choice, _ToolChoice):
        return _CHOICES.get(choice, "auto")
    allowed = choice.allowed_tools or _Allowed()
    mode = _CHOICES.get(allowed.mode, "auto")
    if mode == "none" or not allowed.tools:
        return mode
    return ResponseToolChoice("allowed_tools", mode=mode, tools=[{"name": name} for name in allowed.tools])


def _format(body: InteractionBody) -> TextConfig | None:
    """Raises ApiError for an answer that is no text."""
    given = body.response_format if isinstance(body.response_format, list) else [body.response_format or {}]
    texts = [each for each in given if each.get("type") not in ("audio", "image", "video")]
    if given and not texts:
        raise wrong("This server answers with text only.", "response_format")
    wanted = texts[0] if texts else {}
    if wanted.get("type") == "text" or not wanted:
        schema, kind = wanted.get("schema"), wanted.get("mime_type") or body.response_mime_type
    else:
        schema, kind = wanted, "application/json"
    if isinstance(schema, dict):
        return TextConfig(TextFormat("json_schema", schema=schema))
    return TextConfig(TextFormat("json_object")) if kind == "application/json" else None
