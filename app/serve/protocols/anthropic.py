"""Anthropic's messages, as chats: https://docs.anthropic.com/en/api/messages, and streams of them.

Caching is never asked for, because all prefixes are kept: `cache_control` is ignored. Thinking comes in blocks if it is
asked for, as the protocol has it; a thinking model is asked not to think otherwise.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from app.serve.answer import AnswerBegun, AnswerDelta, AnswerEnd
from app.serve.errors import ApiError, anthropic_form, wrong
from app.serve.http import NAMED_DATA, Framing
from app.serve.protocols import chat
from app.serve.protocols.common.blocks import Block, Blocks, Change, Grown, Opened
from app.serve.protocols.common.conversation import Call, CalledFunction, ChatMessage, Part, PicturePart
from app.serve.protocols.common.formats import JsonSchema, ResponseFormat
from app.serve.protocols.common.json_values import converted
from app.serve.protocols.common.pictures import NOT_READ, NOTHING_ELSE, PICTURES, from_part
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.requests import MAX_USER
from app.serve.protocols.common.text_files import from_file
from app.serve.protocols.common.tools import Choice, Named, ToolChoice
from app.serve.service import Service
from engine.protocol.events import Finished

_BILLING = re.compile(r"\A\s*+x-anthropic-billing-header:[^\n]*\n*")
"""Claude Code begins its system text with such a line. It differs in every request, so none would share a prefix."""
SIGNATURE = "orin-chat"  # of thinking, which clients send back unchanged; it is not looked at
_ELSEWHERE = re.compile(r"server_tool_use|mcp_tool_use|mcp_tool_listing|fallback|\w+_tool_result")
"""Calls that Anthropic's server made, their results and what else it notes: the model's texts say what came of them."""
_MAX_DEPTH = 4  # of blocks in the result of a tool


class ContentBlock(msgspec.Struct):
    """A part of a message, of any kind."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    source: Any = None
    image_url: Any = None
    image: Any = None
    url: Any = None
    title: str | None = None
    tool: Any = None


class AnthropicMessage(msgspec.Struct):
    role: str
    content: str | list[ContentBlock]


class MessageTool(msgspec.Struct):
    """`type` is that of a tool which Anthropic's server has, or "custom"."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    type: str


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct):
    user_id: str | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """What a prompt is made of."""

    model: str | None = None
    messages: list[AnthropicMessage]
    system: str | list[ContentBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its first form
    thread: Any = None
    compaction: Any = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None


def asked(body: MessagesBody, service: Service) -> Asked:
    """Raises ApiError."""
    if body.compaction:
        raise wrong("compaction is not supported: ask for a summary in a message.", "compaction")
    as_chat = chat_body(body)
    as_chat.max_tokens, as_chat.stop = body.max_tokens, body.stop_sequences
    as_chat.temperature, as_chat.top_p, as_chat.top_k = body.temperature, body.top_p, body.top_k
    request, tools = chat.chat_request(as_chat, service)
    user = _user(body.metadata.user_id or "") if body.metadata else ""
    reply = MessageReply(body.model or service.model)
    one_call = bool(body.tool_choice and body.tool_choice.disable_parallel_tool_use)
    return Asked([request], reply, bool(body.stream), as_chat.stops, user, tools.note, one_call)


def counted(body: CountBody, service: Service) -> Json:
    """How many tokens a prompt has. May take as long as the text is. Raises ApiError."""
    return {"input_tokens": len(chat.encoded(chat_body(body), service).ids)}


def _user(id: str) -> str:
    """The user for whom a client asks. Claude Code sends an object of several ids."""
    try:
        ids = msgspec.json.decode(id)
    except (msgspec.DecodeError, RecursionError):
        return id[:MAX_USER]
    session = ids.get("session_id") if isinstance(ids, dict) else None
    return session[:8] if isinstance(session, str) else ""


def chat_body(body: CountBody) -> chat.ChatBody:
    """The same in OpenAI's form. Raises ApiError."""
    if body.thread:
        raise wrong("thread is not supported: send the whole conversation.", "thread")
    messages = [ChatMessage("system", text)] if (text := _system(body.system)) else []
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    as_chat = chat.ChatBody(messages=messages)
    as_chat.tools = [_tool(tool) for tool in [*(body.tools or ()), *_defined_later(body)]]
    as_chat.tool_choice = _choice(body.tool_choice)
    is_thinking = body.thinking is not None and body.thinking.type != "disabled"
    config = body.output_config or OutputConfig()
    as_chat.chat_template_kwargs = {
        "enable_thinking": is_thinking,
        "reasoning_effort": config.effort if is_thinking else None,
    }
    format = config.format or body.output_format
    if format and format.type == "json_schema":
        as_chat.response_format = ResponseFormat("json_schema", JsonSchema(format.schema))
    return as_chat


def _defined_later(body: CountBody) -> Iterable[MessageTool]:
    """Tools that messages bring, each once; those that they only name are among the others. Raises ApiError."""
    found, names = dict[str, MessageTool](), {tool.name for tool in body.tools or ()}
    for i, message in enumerate(body.messages):
        for block in message.content if isinstance(message.content, list) else ():
            if (
                block.type == "tool_addition"
                and isinstance(tool := block.tool, dict)
                and "definition" in tool
            ):
                defined = converted(tool["definition"], MessageTool, f"messages[{i}]")
                found[defined.name] = defined
    return (tool for name, tool in found.items() if name not in names)


def _system(system: str | list[ContentBlock] | None) -> str:
    texts = [system] if isinstance(system, str) else [block.text or "" for block in system or ()]
    return "\n\n".join(text for each in texts if (text := _BILLING.sub("", each, count=1)))


def _messages(message: AnthropicMessage, param: str) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own, which come first."""
    if message.role not in ("user", "assistant", "system"):
        raise wrong("A role is user or assistant.", f"{param}.role")
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content)
        return
    parts, thinking, calls, has_others = list[Part](), list[str](), list[Call](), False
    joint = "\n\n" if message.role == "user" else ""
    for i, block in enumerate(message.content):
        match block.type:
            case "thinking":
                thinking.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_addition" | "tool_removal":
                has_others = True
            case kind if message.role == "assistant" and _ELSEWHERE.fullmatch(kind):
                pass
            case "tool_use":
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                calls.append(Call(CalledFunction(block.name or "", arguments), id=block.id or ""))
            case "tool_result":
                has_others = True
                result = _result(block.content, f"{param}.content[{i}]")
                if block.is_error:
                    result = [Part("text", "Error: "), *result]
                yield ChatMessage("tool", result, tool_call_id=block.tool_use_id)
            case kind if kind in PICTURES:
                parts.append(PicturePart(picture=from_part(block, f"{param}.content[{i}]")))
            case _:
                if parts and parts[-1].text is not None:
                    parts.append(Part("text", joint))
                parts.append(Part("text", _block_text(block, f"{param}.content[{i}]")))
    if not has_others or any(part.text or part.type == "picture" for part in parts):
        yield ChatMessage(message.role, parts, "".join(thinking), tool_calls=calls or None)


def _result(content: Any, param: str) -> list[Part]:
    """The texts of a tool's result, and its pictures. What cannot be read is said to be so."""
    if not isinstance(content, list):
        return [Part("text", _text(content, param))]
    parts = list[Part]()
    for given in content:
        block = converted(given, ContentBlock, param)
        joint = "\n" if parts and block.type not in PICTURES else ""
        try:
            if block.type in PICTURES:
                parts.append(PicturePart(picture=from_part(block, param)))
            else:
                parts.append(Part("text", joint + _block_text(block, param)))
        except ApiError:
            parts.append(Part("text", joint + NOT_READ))
    return parts


def _text(content: Any, param: str, depth: int = 0) -> str:
    """The text of what is given as a text or as blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        blocks = msgspec.convert(content, list[ContentBlock])
    except msgspec.ValidationError:
        raise wrong("The content is a text or a list of blocks.", param) from None
    return "\n".join(_block_text(block, param, depth) for block in blocks)


def _block_text(block: ContentBlock, param: str, depth: int = 0) -> str:
    source = block.source
    match block.type:
        case "text" | "input_text" | "output_text":
            return block.text or ""
        case "document" if isinstance(source, dict) and source.get("type") == "text":
            return f"{block.title or ''}\n{source.get('data') or ''}".strip()
        case "document" if isinstance(source, dict) and source.get("type") == "base64":
            return from_file({"filename": block.title, "file_data": source.get("data")}, param).strip()
        case "document" if (
            isinstance(source, dict) and source.get("type") == "content" and depth < _MAX_DEPTH
        ):
            return _text(source.get("content"), param, depth + 1)
        case "search_result" if depth < _MAX_DEPTH:
            return f"{block.title or ''}\n{_text(block.content, param, depth + 1)}".strip()
        case "compaction" if depth < _MAX_DEPTH:  # a summary of earlier turns
            return _text(block.content, param, depth + 1)
        case "tool_reference":
            return ""
    raise wrong(NOTHING_ELSE, param)


def _tool(tool: MessageTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        return {"type": tool.type}
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    function["parameters"] = tool.input_schema or {"type": "object"}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: MessageToolChoice | None) -> Choice:
    match choice:
        case MessageToolChoice(type="any"):
            return "required"
        case MessageToolChoice(type="tool"):
            return ToolChoice(function=Named(choice.name or ""))
        case MessageToolChoice(type="none"):
            return "none"
    return "auto"


_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass
class MessageReply(Reply):
    model: str
    id: str = field(default_factory=lambda: f"msg_{secrets.token_urlsafe(18)}")
    framing: Framing = NAMED_DATA
    _blocks: Blocks = field(default_factory=Blocks)
    _end: AnswerEnd | None = None

    def begun(self, i: int, begun: AnswerBegun) -> Iterable[Json]:
        usage = _usage(begun.prompt_n, begun.cached_n, 0)
        yield {"type": "message_start", "message": self._message([], None, None, usage)}

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        return self._written(self._blocks.feed(delta))

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        self._end = end
        yield from self._written(self._blocks.close())
        reason, stop = self._reason(end)
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": _usage_of(end.finished),
        }
        yield {"type": "message_stop"}

    def whole(self) -> Json:
        assert self._end
        content = [_content(block) for block in self._blocks.all]
        return self._message(content, *self._reason(self._end), _usage_of(self._end.finished))

    def pings(self) -> Iterable[Json]:
        yield {"type": "ping"}

    def failed(self, error: ApiError) -> Json:
        return anthropic_form(error)

    def _written(self, changes: Iterable[Change]) -> Iterator[Json]:
        for change in changes:
            block, index = change.block, {"index": change.block.index}
            if isinstance(change, Opened):
                yield {"type": "content_block_start", **index, "content_block": _content(block)}
            elif isinstance(change, Grown):
                yield {"type": "content_block_delta", **index, "delta": _delta(block, change.text)}
            else:
                if block.kind == "thinking":
                    signed = {"type": "signature_delta", "signature": SIGNATURE}
                    yield {"type": "content_block_delta", **index, "delta": signed}
                yield {"type": "content_block_stop", **index}

    def _reason(self, end: AnswerEnd) -> tuple[str, str | None]:
        if end.stop_text:
            return "stop_sequence", end.stop_text
        return _STOPS[end.finish_reason], None

    def _message(self, content: Sequence[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _content(block: Block) -> Json:
    match block.kind:
        case "thinking":
            return {
                "type": "thinking",
                "thinking": block.text,
                "signature": SIGNATURE if block.pieces else "",
            }
        case "text":
            return {"type": "text", "text": block.text}
    try:
        given = json.loads(block.text) if block.pieces else {}
    except (ValueError, RecursionError):  # the answer was cut off
        given = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _delta(block: Block, text: str) -> Json:
    match block.kind:
        case "thinking":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _usage_of(end: Finished) -> Json:
    return _usage(end.prompt_n, end.cached_n, end.predicted_n)


def _usage(prompt_n: int, cached_n: int, predicted_n: int) -> Json:
    """Cached tokens are not part of `input_tokens`."""
    return {
        "input_tokens": prompt_n - cached_n,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_n,
        "output_tokens": predicted_n,
    }
