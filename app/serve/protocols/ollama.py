"""Ollama's protocol, as chats: https://github.com/ollama/ollama/blob/main/docs/api.md. Streams are lines of JSON.

Models are loaded by who runs the server: requests that pull, create or delete one find nothing.
"""

import hashlib
import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from app.serve.answer import AnswerDelta, AnswerEnd
from app.serve.errors import ApiError, ollama_form, wrong
from app.serve.http import LINES, Framing
from app.serve.model_pool import ModelPool
from app.serve.protocols import chat, generate_context
from app.serve.protocols.common import logprobs
from app.serve.protocols.common.blocks import Block, Blocks, Closed, Grown
from app.serve.protocols.common.conversation import Call, CalledFunction, ChatMessage, Part, PicturePart
from app.serve.protocols.common.formats import JsonSchema, ResponseFormat, grammar_of
from app.serve.protocols.common.pictures import from_base64
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.requests import generate
from app.serve.protocols.common.tools import Tools
from app.serve.protocols.completions import TextBody, ends_of_fill_in, fill_in
from app.serve.protocols.models import capabilities
from app.serve.protocols.shortening import shorten
from app.serve.service import Service
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import RawText
from widgets.text import as_count

VERSION = "0.20.5"
"""The version of the protocol. Some clients need a minimum, as Codex CLI does with 0.13.4."""
GREETING = "Ollama is running"
"""Some clients look for these words at `/`."""
_EFFORTS = ("low", "medium", "high", "max")


class Options(msgspec.Struct):
    """Other options are ignored: the context, for one, is the server's."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class GivenFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str | None = None


class GivenCall(msgspec.Struct):
    function: GivenFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[GivenCall] | None = None
    tool_name: str | None = None
    name: str | None = None  # its older name
    tool_call_id: str | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """The fields of both kinds of answers. `keep_alive` is only looked at in requests that ask nothing."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: Any = None
    truncate: bool | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    context: list[int] | None = None


class ShowBody(msgspec.Struct):
    model: str | None = None
    name: str | None = None  # its older name

    def __post_init__(self) -> None:
        self.model = self.model or self.name


class PullBody(msgspec.Struct):
    model: str | None = None
    name: str | None = None  # its older name


UNMANAGED = (
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/push"),
    ("GET", "/api/blobs/{digest}"),
    ("POST", "/api/blobs/{digest}"),
)
"""What changes the models of a server."""


def chat_asked(body: OllamaChatBody, service: Service) -> Asked | Json:
    """Answers a chat. One without messages only asks to load the model, which is loaded already. May take as long as
    the text is. Raises ApiError."""
    if not body.messages:
        return _line(service.model, {"message": {"role": "assistant", "content": ""}}) | _loaded(body)
    as_chat = chat.ChatBody(messages=_conversation(body.messages), tools=body.tools)
    return _asked_as_chat(body, as_chat, service, "message")


def generate_asked(body: OllamaGenerateBody, service: Service) -> Asked | Json:
    """May take as long as the text is. Raises ApiError."""
    if body.images and (body.raw or body.suffix):
        raise wrong("raw and suffix take no images: a chat template says where they stand.", "images")
    if not body.prompt and not body.suffix and not body.images:
        return _line(service.model, {"response": ""}) | _loaded(body)
    if not (body.raw or body.suffix):
        before = generate_context.turns(body.context or (), body.system or "")
        messages = [ChatMessage(role, text) for role, text in before]
        messages.append(ChatMessage("user", _content(body.prompt, body.images, "images")))
        asked = _asked_as_chat(body, chat.ChatBody(messages=messages), service, "response")
        assert isinstance(asked.reply, OllamaReply)
        asked.reply.turns = [*before, ("user", body.prompt or "")]
        return asked
    as_text = TextBody(prompt=body.prompt or "")
    _set_options(as_text, body)
    prompt = (
        fill_in(service, body.prompt or "", body.suffix)
        if body.suffix
        else RawText(text=body.prompt or "", special=True)
    )
    shown = max(body.top_logprobs or 0, 1) if body.logprobs else 0
    limit, grammar = as_text.max_tokens, grammar_of(as_text)
    request = generate(as_text, prompt, service.sampling, limit, shown, grammar)
    return Asked(
        [request],
        _reply(body, service, "response", Tools()),
        body.stream is not False,
        as_text.stops,
        stop_ids=ends_of_fill_in(service) if body.suffix else frozenset(),
    )


def _asked_as_chat(
    body: OllamaBody, as_chat: chat.ChatBody, service: Service, place: Literal["message", "response"]
) -> Asked:
    _set_options(as_chat, body)
    as_chat.logprobs, as_chat.top_logprobs = body.logprobs, body.top_logprobs
    if body.think not in (None, True, False, *_EFFORTS):
        raise wrong("think is true, false, low, medium, high or max.", "think")
    as_chat.think = body.think
    shortened = "" if body.truncate is False else shorten(as_chat, service)
    request, tools = chat.chat_request(as_chat, service)
    reply, note = _reply(body, service, place, tools), "; ".join(filter(None, (tools.note, shortened)))
    return Asked([request], reply, body.stream is not False, as_chat.stops, note=note)


def _reply(
    body: OllamaBody, service: Service, place: Literal["message", "response"], tools: Tools
) -> "OllamaReply":
    shown = body.top_logprobs or 0 if body.logprobs else None
    return OllamaReply(service.model, service.file.tokenizer, place, tools, shown)


def _set_options(as_openai: chat.ChatBody | TextBody, body: OllamaBody) -> None:
    """Raises ApiError."""
    options = body.options or Options()
    for name in Options.__struct_fields__:
        if name != "num_predict":
            setattr(as_openai, name, getattr(options, name))
    limit = options.num_predict
    as_openai.max_tokens = None if limit is None or limit <= 0 else limit
    if body.format == "json":
        as_openai.response_format = ResponseFormat("json_object")
    elif isinstance(body.format, dict):
        as_openai.response_format = ResponseFormat("json_schema", JsonSchema(body.format))
    elif body.format:
        raise wrong("format is json, or a JSON schema.", "format")


def _conversation(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """Calls have ids here, of as many characters as all templates take; results of tools follow in the same order.
    Raises ApiError."""
    turns, n = list[ChatMessage](), 0
    due = dict[int, tuple[str, str]]()  # calls without a result: names and ids
    order = defaultdict[str, deque[int]](deque)  # in which they came: of each name, and of all ("")
    for i, message in enumerate(messages):
        calls = list[Call]()
        for call in message.tool_calls or ():
            n += 1
            given = call.function.arguments
            arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
            id = call.id or f"{n:09d}"
            calls.append(Call(CalledFunction(call.function.name, arguments), id=id))
            due[n] = call.function.name, id
            for name in {"", call.function.name}:
                order[name].append(n)
        id, name = message.tool_call_id or "", message.tool_name or message.name or ""
        if message.role == "tool" and not id:
            calls_due = order.get(name)
            while calls_due and not id:
                name, id = due.pop(calls_due.popleft(), (name, ""))
        turns.append(
            ChatMessage(
                message.role,
                _content(message.content, message.images, f"messages[{i}].images"),
                message.thinking,
                tool_calls=calls or None,
                tool_call_id=id,
                name=name,
            )
        )
    return turns


def _content(text: str | None, images: Sequence[str] | None, param: str) -> str | list[Part] | None:
    """The pictures before the text. Raises ApiError."""
    if not images:
        return text
    return [*(PicturePart(picture=from_base64(image, param)) for image in images), Part("text", text)]


@dataclass
class OllamaReply(Reply):
    """`place` is the field that has the answer. `shown`: as in `chat.ChatReply`."""

    model: str
    tokenizer: Tokenizer
    place: Literal["message", "response"]
    tools: Tools
    shown: int | None = None
    framing: Framing = LINES
    takes_pieces: bool = False
    turns: Sequence[generate_context.Turn] = ()
    """The turns before the answer, if the client gets them back (`context`)."""
    _asked: float = field(default_factory=time.perf_counter)
    _blocks: Blocks = field(default_factory=Blocks)
    _end: AnswerEnd | None = None

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        return self._written(self._blocks.feed(delta))

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        yield from self._written(self._blocks.close())
        self._end = end
        yield self._value("") | self._figures()

    def whole(self) -> Json:
        blocks = self._blocks.all
        texts = {kind: "".join(b.text for b in blocks if b.kind == kind) for kind in ("text", "thinking")}
        calls = [self._call(block) for block in blocks if block.kind == "call"]
        shown = self._logprobs([token for block in blocks for token in block.tokens])
        return self._value(texts["text"], texts["thinking"], calls, shown) | self._figures()

    def pings(self) -> Iterable[Json]:
        """A piece without text: lines of JSON have no comments."""
        yield self._value("") | {"done": False}

    def failed(self, error: ApiError) -> Json:
        return ollama_form(error)

    def _written(self, changes: Iterable[Any]) -> Iterator[Json]:
        for change in changes:
            if isinstance(change, Grown) and change.block.kind != "call":
                texts = (change.text, "") if change.block.kind == "text" else ("", change.text)
                yield self._value(*texts, logprobs=self._logprobs(change.tokens)) | {"done": False}
            elif isinstance(change, Closed) and change.block.kind == "call":
                yield self._value("", calls=[self._call(change.block)]) | {"done": False}

    def _value(
        self, text: str, thinking: str = "", calls: Sequence[Json] = (), logprobs: Sequence[Json] = ()
    ) -> Json:
        thought = {"thinking": thinking} if thinking else {}
        called = {"tool_calls": list(calls)} if calls else {}
        shown = {"logprobs": list(logprobs)} if logprobs else {}
        if self.place == "response":
            return _line(self.model, {"response": text} | thought | shown)
        return _line(
            self.model, {"message": {"role": "assistant", "content": text} | thought | called} | shown
        )

    def _call(self, block: Block) -> Json:
        try:
            arguments = json.loads(block.text)
        except (ValueError, RecursionError):  # the answer was cut off
            arguments = {}
        calls = [each.id for each in self._blocks.all if each.kind == "call"]
        function = {"index": calls.index(block.id), "name": block.name, "arguments": arguments}
        return {"id": block.id, "function": function}

    def _logprobs(self, tokens: Sequence[Any]) -> list[Json]:
        if self.shown is None:
            return []
        return logprobs.of_chat(logprobs.reported(tokens, self.tokenizer), self.tokenizer, self.shown)

    def _figures(self) -> Json:
        """Times are in nanoseconds. The request may have waited for its turn, or for the model to load."""
        assert self._end
        end = self._end.finished
        total_ms = (time.perf_counter() - self._asked) * 1e3
        text = "".join(block.text for block in self._blocks.all if block.kind == "text")
        context = {"context": generate_context.packed([*self.turns, ("assistant", text)])}
        return {
            "done": True,
            **(context if self.turns else {}),
            "done_reason": "length" if self._end.finish_reason == "length" else "stop",
            "total_duration": _ns(total_ms),
            "load_duration": _ns(max(total_ms - end.prompt_ms - end.predicted_ms, 0)),
            "prompt_eval_count": end.prompt_n,
            "prompt_eval_duration": _ns(end.prompt_ms),
            "eval_count": end.predicted_n,
            "eval_duration": _ns(end.predicted_ms),
        }


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def _line(model: str, fields: Json) -> Json:
    return {"model": model, "created_at": _time(datetime.now(UTC)), **fields}


def _loaded(body: OllamaBody) -> Json:
    """The model stays, whatever the client asks: who runs the server loads and unloads."""
    asks_to_unload = str(body.keep_alive).rstrip("hms") == "0"
    return {"done": True, "done_reason": "unload" if asks_to_unload else "load"}


def _time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- what there is ---------------------------------------------------------------------------------------


def tags(models: ModelPool) -> Json:
    """The list of models. If a model's file has not been read, only its name is known. Its entry has all fields all the
    same, because clients with strict types could not read the list otherwise."""
    known = {service.model: service for service in models.known}
    created = models.default.created
    return {"models": [_listed(name, created, known.get(name)) for name in models.names]}


def running(models: ModelPool) -> Json:
    """Models that are loaded. They do not expire."""
    loaded = [service for service in models.known if service.ready]
    never = {"expires_at": "9999-12-31T23:59:59Z"}
    return {
        "models": [
            _listed(service.model, service.created, service) | _memory(service) | never for service in loaded
        ]
    }


def show(body: ShowBody, service: Service) -> Json:
    architecture = service.file.architecture
    info: Json = {"general.architecture": architecture, "general.basename": service.model}
    if ready := service.ready:
        info |= {
            "general.parameter_count": ready.model.parameters,
            f"{architecture}.context_length": ready.context_length,
        }
    if service.file.dimensions:
        info[f"{architecture}.embedding_length"] = service.file.dimensions
    can = capabilities(service)
    note = "{# .Suffix #}" if "insert" in can else ""  # by which Continue knows that a model fills in
    return {
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": service.file.templates.chat + note,
        "details": _details(service),
        "model_info": info,
        "capabilities": can,
        "modified_at": _time(datetime.fromtimestamp(service.created, UTC)),
    }


def _listed(name: str, created: int, service: Service | None) -> Json:
    """The digest only tells models apart."""
    size = service.ready.model.file_bytes if service and service.ready else 0
    return {
        "name": name,
        "model": name,
        "modified_at": _time(datetime.fromtimestamp(created, UTC)),
        "size": size,
        "digest": hashlib.sha256(f"{name} {size}".encode()).hexdigest(),
        "details": _details(service),
        **({"capabilities": capabilities(service)} if service else {}),
    }


def _details(service: Service | None) -> Json:
    ready = service.ready if service else None
    info, family = ready.model if ready else None, service.file.architecture if service else ""
    lengths = {
        "context_length": ready.context_length if ready else 0,
        "embedding_length": service.file.dimensions if service else 0,
    }
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": as_count(info.parameters) if info else "",
        "quantization_level": info.quantization if info else "",
        **{name: length for name, length in lengths.items() if length},
    }


def _memory(service: Service) -> Json:
    assert service.ready
    device_bytes = service.slots.device_bytes if service.slots else 0
    on_gpu = 0 if service.ready.is_on_cpu else device_bytes
    return {"size_vram": on_gpu, "context_length": service.ready.context_length}
