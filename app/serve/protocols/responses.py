"""OpenAI's responses, as chats: https://platform.openai.com/docs/api-reference/responses, and streams of them.

The server remembers responses for as long as `Conversations` has room, so that the next request may name one. What a
model thought is an item of its own. Clients that keep conversations themselves (`store: false`) get it in
`encrypted_content`, too, since that is what they send back.
"""

import base64
import binascii
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from app.serve.answer import AnswerDelta, AnswerEnd
from app.serve.errors import CONTEXT, ApiError, wrong
from app.serve.http import NAMED_DATA, Framing
from app.serve.protocols import chat, logprobs
from app.serve.protocols.blocks import Block, Blocks, Change, Grown, Opened
from app.serve.protocols.conversation import (
    PICTURES,
    TEXTS,
    Call,
    CalledFunction,
    ChatMessage,
    CustomInput,
    Part,
)
from app.serve.protocols.figures import usage
from app.serve.protocols.pictures import NOTHING_ELSE
from app.serve.protocols.remembered import Conversations, Remembered
from app.serve.protocols.reply import Asked, Json, Reply
from app.serve.protocols.requests import MAX_USER, JsonSchema, ResponseFormat, StreamOptions
from app.serve.protocols.tools import Allowed, Choice, Function, Named, Tool, ToolChoice, Tools
from app.serve.service import Service
from engine.formats.tokenizer import Tokenizer

_SEALED = "orin-chat:"  # begins `encrypted_content`, which is not encrypted


class Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None


class ResponseToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def is_stored(self) -> bool:
        return self.store is not False


Spaces = dict[str, tuple[str, str]]
"""Of functions that are in a namespace: that, and their own name, by the name that the model sees."""


def asked(body: ResponsesBody, service: Service, kept: Conversations, owner: str) -> Asked:
    """Raises ApiError."""
    if body.background:
        raise wrong("background is not supported.", "background")
    given = body.input if isinstance(body.input, list) else [{"role": "user", "content": body.input or ""}]
    before = kept.get(body.previous_response_id, owner).items if body.previous_response_id else []
    items = [*before, *given]
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    messages += _Messages().of(items, len(before))
    as_chat = chat.ChatBody(messages=messages)
    as_chat.tools, spaces = _tools(body.tools or ())
    as_chat.tool_choice = _choice(body.tool_choice)
    as_chat.max_tokens, as_chat.temperature, as_chat.top_p = (
        body.max_output_tokens,
        body.temperature,
        body.top_p,
    )
    as_chat.logprobs, as_chat.top_logprobs = body.wants_logprobs, body.top_logprobs
    as_chat.reasoning_effort = body.reasoning.effort if body.reasoning else None
    as_chat.chat_template_kwargs = body.chat_template_kwargs
    if body.text and (format := body.text.format):
        as_chat.response_format = ResponseFormat(format.type, JsonSchema(format.schema))
    request, tools = chat.chat_request(as_chat, service)
    reply = ResponseReply(body, service.model, service.file.tokenizer, tools, spaces)
    if body.is_stored:
        reply.keep = lambda: kept.keep(
            reply.id, Remembered(owner, [*items, *reply.output], reply.response("completed"))
        )
    user = (body.safety_identifier or body.user or "")[:MAX_USER]
    one_call = body.parallel_tool_calls is False
    return Asked([request], reply, bool(body.stream), asker=user, note=tools.note, one_call=one_call)


def _tools(tools: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], Spaces]:
    """In the form of chat completions. Codex CLI has functions in namespaces: the model sees both names as one."""
    made, spaces = list[dict[str, Any]](), Spaces()
    for tool in tools:
        space, inner = tool.get("name"), tool.get("tools")
        if tool.get("type") != "namespace" or not (isinstance(space, str) and isinstance(inner, list)):
            made.append(_tool(tool))
            continue
        for each in inner:
            if isinstance(each, dict) and isinstance(name := each.get("name"), str):
                spaces[_named_within(space, name)] = space, name
                made.append(_tool({**each, "name": _named_within(space, name)}))
    return made, spaces


def _named_within(space: str, name: str) -> str:
    return f"{space}__{name}" if space else name


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """In the form of chat completions; kinds that are not known stay as they are."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        return {"type": kind if isinstance(kind, str) else "unknown"}
    return {"type": kind, kind: {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: Literal["none", "auto", "required"] | ResponseToolChoice | None) -> Choice:
    """Raises ApiError."""
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type == "allowed_tools":
        named = [tool["name"] for tool in choice.tools or () if isinstance(tool.get("name"), str)]
        tools = [Tool(function=Function(name)) for name in named]
        return ToolChoice("allowed_tools", allowed_tools=Allowed(tools, choice.mode))
    if choice.type in ("function", "custom") and choice.name:
        return ToolChoice(function=Named(choice.name))
    raise wrong(f"There is no tool of the kind {choice.type!r}.", "tool_choice")


class _Messages:
    """Makes messages of items: what the model thought, said and called in one turn is one message."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._turn: ChatMessage | None = None

    def of(self, items: Sequence[dict[str, Any]], known: int) -> list[ChatMessage]:
        """The first `known` items were taken before. Raises ApiError for an item that is wrong; items of kinds that
        the server does not know are left out."""
        for i, item in enumerate(items):
            try:
                self._take(item, f"input[{i - known}]")
            except msgspec.ValidationError as error:
                raise wrong(f"input[{i - known}]: {error}.", f"input[{i - known}]") from None
        return self._messages

    def _take(self, item: dict[str, Any], param: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(item, param)
            case "reasoning":
                turn = self._assistant(begins=True)
                turn.reasoning_content = (turn.reasoning_content or "") + _thought(item)
            case "function_call":
                call = msgspec.convert(item, CalledFunction)
                call.name = _named_within(_text_field(item, "namespace"), call.name)
                self._call(Call(call, id=_text_field(item, "call_id")))
            case "custom_tool_call":
                self._call(Call(custom=msgspec.convert(item, CustomInput), id=_text_field(item, "call_id")))
            case "function_call_output" | "custom_tool_call_output":
                self._turn = None
                content = _output(item.get("output"), param)
                texts = [part for part in content if part.type not in PICTURES]
                self._messages.append(ChatMessage("tool", texts, tool_call_id=_text_field(item, "call_id")))
                if pictures := [part for part in content if part.type in PICTURES]:
                    self._messages.append(ChatMessage("user", pictures))
            case "item_reference":
                raise wrong("Items cannot be named by id: send them.", param)

    def _message(self, item: dict[str, Any], param: str) -> None:
        role, content = _text_field(item, "role"), _output(item.get("content"), param)
        if role == "assistant":
            turn = self._assistant(begins=bool(self._turn and (self._turn.content or self._turn.tool_calls)))
            turn.content = "".join(part.text or part.refusal or "" for part in content)
            return
        self._turn = None
        self._messages.append(ChatMessage(role, content))

    def _call(self, call: Call) -> None:
        turn = self._assistant(begins=False)
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _assistant(self, *, begins: bool) -> ChatMessage:
        """The model's turn that items belong to. `begins`: a new one, if this one has said or called anything."""
        if self._turn is None or (begins and (self._turn.content or self._turn.tool_calls)):
            self._turn = ChatMessage("assistant", None)
            self._messages.append(self._turn)
        return self._turn


def _text_field(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    return value if isinstance(value, str) else ""


def _output(content: Any, param: str) -> list[Part]:
    """What is given as a text or as parts. Raises ApiError."""
    if content is None or isinstance(content, str):
        return [Part("text", content or "")]
    parts = msgspec.convert(content, list[Part])
    if any(part.type not in TEXTS + PICTURES for part in parts):
        raise wrong(NOTHING_ELSE, param)
    return parts


def _thought(item: dict[str, Any]) -> str:
    content, sealed = item.get("content"), item.get("encrypted_content")
    if isinstance(content, list) and content:
        return "".join(part.text or "" for part in msgspec.convert(content, list[Part]))
    if isinstance(sealed, str) and sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed[len(_SEALED) :], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


@dataclass
class ResponseReply(Reply):
    body: ResponsesBody
    model: str
    tokenizer: Tokenizer
    tools: Tools
    spaces: Spaces = field(default_factory=dict)
    keep: Any = None
    """Remembers the response, if that is asked for."""
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    created: int = field(default_factory=lambda: int(time.time()))
    framing: Framing = NAMED_DATA
    output: list[Json] = field(default_factory=list)
    _blocks: Blocks = field(default_factory=Blocks)
    _ids: dict[int, str] = field(default_factory=dict)
    _end: AnswerEnd | None = None
    _sequence: int = -1
    _is_created: bool = False

    # --- the stream ---

    def begin(self) -> Iterable[Json]:
        if not self._is_created:
            self._is_created = True
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self.response("in_progress"))

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        return self._written(self._blocks.feed(delta))

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        yield from self._written(self._blocks.close())
        self._end = end
        if self.keep:
            self.keep()
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def pings(self) -> Iterable[Json]:
        """Events, since Codex CLI does not count comments."""
        if not self._is_created:
            yield from self.begin()
        else:
            yield self._event("response.in_progress", response=self.response("in_progress"))

    def failed(self, error: ApiError) -> Json:
        code = error.code if error.code == CONTEXT else error.kind
        response = self.response("failed") | {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=response)

    def whole(self) -> Json:
        is_cut = self._end is not None and self._end.finish_reason == "length"
        return self.response("incomplete" if is_cut else "completed")

    # --- parts ---

    def response(self, status: str) -> Json:
        body, sampling = self.body, {"temperature": self.body.temperature, "top_p": self.body.top_p}
        tool_choice = (
            body.tool_choice if isinstance(body.tool_choice, str) else msgspec.to_builtins(body.tool_choice)
        )
        format = body.text.format if body.text and body.text.format else TextFormat()
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": list(self.output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.is_stored,
            **sampling,
            "text": {"format": {k: v for k, v in msgspec.to_builtins(format).items() if v is not None}},
            "tool_choice": tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": self._usage(),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> Json | None:
        if not self._end:
            return None
        used = usage([self._end])
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence, **fields}

    def _written(self, changes: Iterable[Change]) -> Iterator[Json]:
        for change in changes:
            block = change.block
            if isinstance(change, Opened):
                yield from self._opened(block)
            elif isinstance(change, Grown):
                yield from self._grown(block, change)
            else:
                yield from self._closed(block)

    def _opened(self, block: Block) -> Iterator[Json]:
        yield self._event(
            "response.output_item.added", output_index=block.index, item=self._item(block, False)
        )
        if block.kind != "call":
            part = self._part(block) | {"text": ""}
            yield self._event("response.content_part.added", **self._place(block), part=part)

    def _grown(self, block: Block, grown: Grown) -> Iterator[Json]:
        place = self._place(block)
        match block.kind:
            case "thinking":
                yield self._event("response.reasoning_text.delta", **place, delta=grown.text)
            case "text":
                shown = self._logprobs(list(grown.tokens))
                yield self._event("response.output_text.delta", **place, delta=grown.text, logprobs=shown)
            case "call" if block.name not in self.tools.custom and grown.text:
                yield self._event("response.function_call_arguments.delta", **place, delta=grown.text)

    def _closed(self, block: Block) -> Iterator[Json]:
        place, text = self._place(block), block.text
        match block.kind:
            case "thinking":
                yield self._event("response.reasoning_text.done", **place, text=text)
            case "text":
                shown = self._logprobs(block.tokens)
                yield self._event("response.output_text.done", **place, text=text, logprobs=shown)
            case "call" if block.name in self.tools.custom:
                given = self.tools.text_input(text)
                yield self._event("response.custom_tool_call_input.delta", **place, delta=given)
                yield self._event("response.custom_tool_call_input.done", **place, input=given)
            case "call":
                done = "response.function_call_arguments.done"
                yield self._event(done, **place, name=block.name, arguments=text)
        if block.kind != "call":
            yield self._event("response.content_part.done", **place, part=self._part(block))
        item = self._item(block, True)
        self.output.append(item)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> Json:
        place: Json = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _id(self, block: Block) -> str:
        kinds = {"thinking": "rs", "text": "msg", "call": "ctc" if block.name in self.tools.custom else "fc"}
        return self._ids.setdefault(block.index, f"{kinds[block.kind]}_{secrets.token_hex(24)}")

    def _part(self, block: Block) -> Json:
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": block.text}
        shown = self._logprobs(block.tokens)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": shown}

    def _item(self, block: Block, is_done: bool) -> Json:
        """A block as an item. One that is not done has no content yet."""
        head: Json = {"id": self._id(block), "status": "completed" if is_done else "in_progress"}
        parts = [self._part(block)] if is_done else []
        match block.kind:
            case "thinking":
                item = {"type": "reasoning", **head, "summary": [], "content": parts}
                if is_done and "reasoning.encrypted_content" in (self.body.include or ()):
                    item["encrypted_content"] = _SEALED + base64.b64encode(block.text.encode()).decode()
                return item
            case "text":
                return {"type": "message", **head, "role": "assistant", "content": parts}
        space, name = self.spaces.get(block.name, ("", block.name))
        call = {**head, "call_id": block.id, "name": name} | ({"namespace": space} if space else {})
        if block.name in self.tools.custom:
            given = self.tools.text_input(block.text) if is_done else ""
            return {"type": "custom_tool_call", **call, "input": given}
        return {"type": "function_call", **call, "arguments": block.text if is_done else ""}

    def _logprobs(self, tokens: Sequence[Any]) -> list[Json]:
        if not self.body.wants_logprobs:
            return []
        reported = logprobs.reported(tokens, self.tokenizer)
        return logprobs.of_chat(reported, self.tokenizer, self.body.top_logprobs or 0)
