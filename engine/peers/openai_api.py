"""Any server with OpenAI's protocol as an engine: vLLM, llama-server, another machine.

The protocol: https://platform.openai.com/docs/api-reference/chat. Servers add to it. Of these additions the engine uses
the reasoning field, and more sampling options for the servers in EXTRA_OPTIONS.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine.errors import BackendError, UsageError, one_line
from engine.formats.picture_kind import media_type
from engine.formats.thinking import ThinkSplitter, split_thinking
from engine.formats.tools.calls import functions
from engine.peers import http
from engine.peers.server_engine import ServerEngine, chosen_seed
from engine.protocol.event_stream import AnswerStats
from engine.protocol.events import (
    Chat,
    Event,
    Generate,
    Message,
    ModelInfo,
    RawText,
    Ready,
    Thinking,
    Token,
    TokenIds,
)

MOST_CALLS = 100  # of tools in an answer
MAX_TEXT = 100_000  # characters of an event: a screen that lays out more at once stands still
# By `owned_by`, which /models lists with a model.
NAMES = {"llamacpp": "llama.cpp", "vllm": "vLLM", "orin-chat": "orin-chat"}
# Sampling options beyond OpenAI's: our name, and the name that the server uses.
_OURS = {name: name for name in ("top_k", "min_p", "repeat_penalty", "repeat_last_n")}
EXTRA_OPTIONS = {
    "orin-chat": _OURS,
    "llamacpp": _OURS,
    "vllm": {"top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty"},
}


class OpenAIEngine(ServerEngine):
    """The server at `url`, the address that its paths begin with ("http://host:8000/v1"). `model` is a name that the
    server knows; "" takes the first one that it lists."""

    name = "server"
    takes_tools = True

    def __init__(self, url: str, *, api_key: str = "", model: str = "") -> None:
        super().__init__()
        self.url = url
        self._key = api_key
        self._model = model
        self._owner = ""

    async def _connect(self) -> AsyncGenerator[Event, None]:
        started = time.perf_counter()
        address = one_line(urlsplit(self.url).netloc.rpartition("@")[2] or self.url)
        self.name = f"The server {address}"
        models = await self._models()
        chosen = next((model for model in models if not self._model or model.id == self._model), None)
        if chosen is None:
            if not self._model:
                raise UsageError(f"{self.name} lists no model.", "Name the one to use: --model NAME.")
            if models:
                names = ", ".join(one_line(model.id) for model in models[:5])
                raise UsageError(f"{self.name} has no model {one_line(self._model)}.", f"It has {names}.")
            chosen = http.ListedModel(id=self._model)
        self._model, self._owner = chosen.id, chosen.owned_by
        meta = chosen.meta or http.ModelMeta()
        yield Ready(
            model=ModelInfo(
                name=one_line(chosen.id.rpartition("/")[2] or chosen.id),  # it may be a path, or owner/name
                architecture="",
                quantization=one_line(meta.ftype),
                parameters=meta.n_params,
                file_bytes=meta.size,
                trained_context=meta.n_ctx_train or chosen.max_model_len or 0,
                thinks=True,  # not known in advance
                takes_effort=True,
                sees=True,
            ),
            backend=NAMES.get(self._owner, "server"),
            device_name=address,
            context_length=meta.n_ctx or chosen.max_model_len or 0,
            load_ms=(time.perf_counter() - started) * 1e3,
            unheeded=tuple(name for name in _OURS if name not in EXTRA_OPTIONS.get(self._owner, {})),
        )

    async def _models(self) -> tuple[http.ListedModel, ...]:
        """The models that the server lists; empty if it has no list and a model was named. Adds a missing /v1 to the
        address. Raises OrinError."""
        urls = [self.url] if urlsplit(self.url).path.strip("/") else [f"{self.url.rstrip('/')}/v1", self.url]
        for url in urls:
            if self._server:
                await self._server.aclose()
            self._server = http.client(url, self._key)
            try:
                return (await http.get(self._server, "models", http.ModelList, self.name)).data
            except http.NotFoundError:
                if url == urls[-1] and not self._model:
                    raise
        return ()

    # --- answering ---

    async def _answer(self, request: Generate, stats: AnswerStats) -> AsyncGenerator[Event, None]:
        if request.logprobs:
            raise UsageError(
                "This server's protocol has no log-probabilities by token id.",
                "Leave --logprobs out, or use orin-chat's own engine.",
            )
        splitter = ThinkSplitter() if isinstance(request.prompt, Chat) else None
        async for event in split_thinking(self._completed(request, stats), splitter):
            yield event

    async def _completed(self, request: Generate, stats: AnswerStats) -> AsyncGenerator[Event, None]:
        assert self._server
        body = self._body(request)
        stats.seed = body.get("seed", 0)
        path = "chat/completions" if "messages" in body else "completions"
        ended, usage, calls = False, _Usage(), _Calls(request)
        async for chunk in http.stream(self._server, path, body, _Chunk, self.name):
            usage = chunk.usage or usage  # in the last chunk, or in every one
            for choice in (chunk.choices or ())[:1]:
                delta = choice.delta or _Delta()
                thought = delta.reasoning_content or delta.reasoning
                answered = delta.content or choice.text or delta.refusal
                for kind, text in ((Thinking, thought), (Token, answered)):
                    if text:  # maybe of several tokens; `usage` counts them
                        stats.count_token()
                        yield kind(request_id=request.request_id, id=-1, text=text[:MAX_TEXT])
                    if text and len(text) > MAX_TEXT:
                        raise BackendError(
                            f"{self.name} sent {len(text):,} characters at once; the first {MAX_TEXT:,} are here."
                        )
                calls.take(delta.tool_calls or ())
                if choice.finish_reason:
                    ended = True
                    stats.reason = "length" if choice.finish_reason == "length" else "stop"
        if not ended:
            raise self._broken_off()
        if text := calls.text:
            stats.count_token()
            yield Token(request_id=request.request_id, id=-1, text=text)
        stats.prompt_n = usage.prompt_tokens
        stats.predicted_n = usage.completion_tokens or stats.predicted_n
        if usage.prompt_tokens_details:
            stats.cached_n = usage.prompt_tokens_details.cached_tokens or 0

    def _body(self, request: Generate) -> http.Json:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._owner in EXTRA_OPTIONS:
            body["seed"] = chosen_seed(sampling)
        elif sampling.seed is not None:
            body["seed"] = sampling.seed
        for name in ("temperature", "top_p"):
            # A gateway passes on what its model may refuse: 1 is what there is without them in the protocol.
            if self._owner in EXTRA_OPTIONS or getattr(sampling, name) != 1:
                body[name] = getattr(sampling, name)
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        match request.prompt:
            case Chat(messages=messages, think=think):
                body["messages"] = [_message(message) for message in messages]
                if tools := request.prompt.tools:
                    body["tools"] = _functions(tools)
                variables: dict[str, Any] = {}  # of the chat template
                if not think:
                    variables["enable_thinking"] = False
                elif sampling.effort:
                    variables["reasoning_effort"] = body["reasoning_effort"] = sampling.effort
                if variables and self._owner in EXTRA_OPTIONS:
                    body["chat_template_kwargs"] = variables
            case RawText(text=text):
                body["prompt"] = text
            case TokenIds(ids=ids):
                body["prompt"] = ids
        for option, name in EXTRA_OPTIONS.get(self._owner, {}).items():
            body[name] = getattr(sampling, option)
        if self._owner == "vllm" and not sampling.top_k:
            body["top_k"] = -1
        if self._owner in EXTRA_OPTIONS and request.ignore_eos:
            body["ignore_eos"] = True
        if self._owner in ("llamacpp", "orin-chat") and request.fresh:
            body["cache_prompt"] = False
        return body


def _content(message: Message) -> str | list[http.Json]:
    """A turn's text or, if it has pictures, its parts."""
    if not message.pictures:
        return message.content
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": _data_url(part.data)}}
        for part in message.parts
    ]


def _data_url(data: bytes) -> str:
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


# --- tools ---------------------------------------------------------------------------------------------


def _message(message: Message) -> http.Json:
    fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": _on_the_wire(call.name), "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _functions(tools: str) -> list[Any]:
    functions: list[Any] = json.loads(tools)
    for tool in functions:
        tool["function"]["name"] = _on_the_wire(tool["function"]["name"])
    return functions


def _on_the_wire(name: str) -> str:
    """OpenAI's protocol has no dots in names of functions."""
    return name.replace(".", "__")


class _Calls:
    """Collects the calls of tools in an answer."""

    def __init__(self, request: Generate) -> None:
        tools = request.prompt.tools if isinstance(request.prompt, Chat) else ""
        self._names = {_on_the_wire(name): name for name, _ in functions(tools or "[]")}
        self._calls: dict[int, _Function] = {}

    def take(self, pieces: tuple[_CallPiece, ...]) -> None:
        for piece in pieces:
            if piece.function and (piece.index in self._calls or len(self._calls) < MOST_CALLS):
                call = self._calls.setdefault(piece.index, _Function("", ""))
                call.name = call.name or piece.function.name or ""
                call.arguments = ((call.arguments or "") + (piece.function.arguments or ""))[:MAX_TEXT]

    @property
    def text(self) -> str:
        """The calls as `engine.formats.tools.calls.HERMES` has them."""
        calls = (
            json.dumps(
                {"name": self._names.get(call.name or "", call.name), "arguments": call.arguments or "{}"}
            )
            for call in self._calls.values()
        )
        return "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)


# --- the JSON that servers send --------------------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPiece(msgspec.Struct):
    index: int = 0
    function: _Function | None = None


class _Delta(msgspec.Struct):
    tool_calls: tuple[_CallPiece, ...] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(http.Reply):
    choices: tuple[_Choice, ...] | None = None  # gateways send null beside the usage
    usage: _Usage | None = None
