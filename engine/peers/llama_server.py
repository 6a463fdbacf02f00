"""llama.cpp's llama-server as an engine, for comparisons with ours.

It gets token ids from our tokenizer and chat template, so that only the computation differs. Its figures follow from
its raw counts and times by the same formulas as ours (`engine.protocol.events`).
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.errors import BackendError, ModelFileError, OrinError, UsageError, one_line
from engine.formats.gguf import GGUF
from engine.formats.string_array import StringArray
from engine.formats.templates.prompt import PromptEncoder, think_splitter
from engine.formats.templates.template import Prompt
from engine.formats.thinking import split_thinking
from engine.measure.memory import resident_memory
from engine.peers import http
from engine.peers.llama_process import LlamaProcess, find_llama_server
from engine.peers.server_engine import ServerEngine, chosen_seed
from engine.protocol.event_stream import AnswerStats
from engine.protocol.events import (
    Chat,
    Effort,
    EngineOptions,
    Event,
    Generate,
    Loading,
    ModelInfo,
    Prefilling,
    RawText,
    Ready,
    Token,
    TokenIds,
    TopToken,
)
from engine.system.logs import log_path

START_TIMEOUT_S = 600.0  # a large model from a slow disk may take minutes
POLL_S = 0.05
HEALTH_TIMEOUT_S = 5.0


class LlamaServer(ServerEngine):
    """llama-server with the model of `options`. Either we start it (`binary`, else LLAMA_SERVER, else the one on
    PATH), or it runs at `url` with the same model. `start_s` bounds how long it may load."""

    name = "llama.cpp"

    def __init__(
        self,
        options: EngineOptions,
        binary: str | None = None,
        *,
        url: str | None = None,
        api_key: str = "",
        start_s: float = START_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self.options = options
        self._binary = binary
        self._url = url
        self._key = api_key
        self._start_s = start_s
        self._process: LlamaProcess | None = None
        self._prompts: PromptEncoder | None = None

    @property
    def pid(self) -> int | None:
        """The process id, if we started it."""
        return self._process.pid if self._process else None

    @property
    def log_path(self) -> Path:
        """The file with llama-server's output."""
        return log_path("llama-server")

    # --- starting ---

    async def _connect(self) -> AsyncGenerator[Event, None]:
        started = time.perf_counter()
        with await asyncio.to_thread(GGUF, self.options.model_path) as file:
            if self._url is None:
                program = find_llama_server(self._binary)
                process = self._process = await LlamaProcess.spawn(program, self.options, self.log_path)
                self._server = http.client(process.base_url, process.key, process.socket)
            else:
                self._server = http.client(self._url.removesuffix("/").removesuffix("/v1"), self._key)
            while not await self._is_healthy(self._server):
                memory = resident_memory(self.pid)
                done = min(memory.now_bytes, file.file_bytes) if memory else 0
                yield Loading(done_bytes=done, total_bytes=file.file_bytes)
                if time.perf_counter() - started > self._start_s:
                    raise BackendError(
                        f"llama-server was not ready after {self._start_s:.0f} s.",
                        f"Its log: {self.log_path}" if self._process else "See its log, where it runs.",
                    )
                await asyncio.sleep(POLL_S)
            yield await self._describe(self._server, file, started)

    async def _is_healthy(self, server: httpx.AsyncClient) -> bool:
        """Whether the model is loaded. Raises OrinError if the server ended or refuses."""
        try:
            async with http.connection_errors("llama-server", self._url or ""):
                response = await server.get("health", timeout=HEALTH_TIMEOUT_S)
        except BackendError:
            if self._process is None:  # the one that we start may not listen yet
                raise
            response = None
        # If our process has ended, the answer came from another server at the same address.
        if self._process and await self._process.ended_within(0):
            raise self._process.exit_error(was_ready=False)
        if response is None or response.status_code == 503:  # 503: the model is loading
            return False
        if not response.is_success:
            raise http.error_of(response, response.content, self.name)
        return True

    async def _describe(self, server: httpx.AsyncClient, file: GGUF, started: float) -> Ready:
        """Raises ModelFileError if the server runs another model than `file`."""
        properties = await http.get(server, "props", _Properties, self.name)
        models = await http.get(server, "v1/models", http.ModelList, self.name)
        meta = (models.data[0].meta if models.data else None) or http.ModelMeta()
        parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        vocab = len(file.get("tokenizer.ggml.tokens", StringArray))
        if (meta.n_params or parameters, meta.n_vocab or vocab) != (parameters, vocab):
            served, wanted = one_line(Path(properties.model_alias).name), one_line(file.path.name)
            raise ModelFileError(
                f"The llama-server runs {served}, which is not {wanted}.",
                "Start it with the same file, or let orin-chat start it.",
            )
        return Ready(
            model=ModelInfo(
                name=one_line(file.get("general.name", str, file.path.stem)),
                architecture=one_line(file.get("general.architecture", str, "")),
                quantization=one_line(properties.model_ftype),
                parameters=parameters,
                file_bytes=file.file_bytes,
                trained_context=meta.n_ctx_train,
                thinks="think>" in properties.chat_template,
                takes_effort="reasoning_effort" in properties.chat_template,
            ),
            backend=self.name,
            device_name=one_line(properties.build_info),
            context_length=properties.default_generation_settings.n_ctx,
            load_ms=(time.perf_counter() - started) * 1e3,
            parallel=properties.total_slots,
        )

    async def _disconnect(self) -> None:
        await super()._disconnect()
        process, self._process = self._process, None
        if process:
            await process.close()

    async def _exit_error(self, within_s: float = 0.0) -> OrinError | None:
        has_ended = self._process and await self._process.ended_within(within_s)
        return self._process.exit_error(was_ready=True) if self._process and has_ended else None

    # --- answering ---

    def _encode(self, prompt: Chat | RawText, effort: Effort | None) -> Prompt:
        if self._prompts is None:
            with GGUF(self.options.model_path) as file:
                self._prompts = PromptEncoder(file)
        most = (self._ready.context_length if self._ready else 0) or None
        return self._prompts.encode(prompt, effort, most)

    async def _answer(self, request: Generate, stats: AnswerStats) -> AsyncGenerator[Event, None]:
        if isinstance(request.prompt, TokenIds):
            prompt = Prompt(list(request.prompt.ids))
        else:
            if isinstance(request.prompt, Chat) and request.prompt.pictures:
                raise UsageError("llama.cpp gets token ids from orin-chat, so it gets no pictures.")
            prompt = await asyncio.to_thread(self._encode, request.prompt, request.sampling.effort)
        splitter = think_splitter(request.prompt, prompt)
        async for event in split_thinking(self._completed(request, prompt.ids, stats), splitter):
            yield event

    async def _completed(
        self, request: Generate, ids: list[int], stats: AnswerStats
    ) -> AsyncGenerator[Event, None]:
        assert self._server

        def token(id: int, text: str, **fields: Any) -> Token:
            stats.count_token()
            return Token(request_id=request.request_id, id=id, text=text, **fields)

        stats.prompt_n, stats.seed = len(ids), chosen_seed(request.sampling)
        body = _completion(request, ids, stats.seed)
        chunks = http.stream(self._server, "completion", body, _Chunk, self.name)
        async with aclosing(chunks):
            async for chunk in chunks:
                timings = chunk.timings
                stats.cached_n, stats.prompt_ms = timings.cache_n, timings.prompt_ms
                stats.predicted_ms = timings.predicted_ms
                if progress := chunk.prompt_progress:  # the token in such a chunk is not one
                    yield Prefilling(
                        request_id=request.request_id,
                        done=progress.processed,
                        total=progress.total,
                        cached=progress.cache,
                    )
                    continue
                at_ms = timings.prompt_ms + timings.predicted_ms
                # No chunk comes for a token that ends inside a character: its text comes with a later token.
                for _ in range(chunk.tokens_predicted - (not chunk.stop) - stats.predicted_n):
                    yield token(-1, "", at_ms=at_ms)
                if chunk.stop:
                    stats.reason = "length" if chunk.stop_type == "limit" else "stop"
                    return
                id = chunk.tokens[0] if chunk.tokens else -1
                asked: dict[str, Any] = {}
                for chosen in chunk.completion_probabilities[:1]:  # if they were asked for
                    top = tuple(TopToken(id=top.id, logprob=top.logprob) for top in chosen.top_logprobs)
                    asked = {"logprob": chosen.logprob, "top": top}
                yield token(id, chunk.content, at_ms=at_ms, **asked)
        raise self._broken_off()


def _completion(request: Generate, ids: list[int], seed: int) -> http.Json:
    """The body of POST /completion: the same sampling steps as ours, in the same order."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    return {
        "prompt": ids,
        "n_predict": -1 if request.max_tokens is None else request.max_tokens,
        "ignore_eos": request.ignore_eos,
        "cache_prompt": not request.fresh,
        "samplers": ["penalties", "top_k", *(() if greedy else ("top_p", "min_p")), "temperature"],
        "temperature": sampling.temperature,
        "top_k": 1 if greedy else sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "seed": seed,
        "n_probs": request.logprobs,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "timings_per_token": True,
    }


# --- the JSON that llama-server sends: tools/server/README.md in llama.cpp -----------------------------------


class _Timings(msgspec.Struct):
    cache_n: int = 0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0


class _Progress(msgspec.Struct):
    total: int
    cache: int
    processed: int


class _Probability(msgspec.Struct):
    id: int
    logprob: float


class _Probabilities(_Probability):
    top_logprobs: tuple[_Probability, ...] = ()


class _Chunk(http.Reply):
    content: str = ""
    tokens: tuple[int, ...] = ()
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    timings: _Timings = msgspec.field(default_factory=_Timings)
    prompt_progress: _Progress | None = None
    completion_probabilities: tuple[_Probabilities, ...] = ()


class _Settings(msgspec.Struct):
    n_ctx: int = 0


class _Properties(http.Reply):
    total_slots: int = 1
    default_generation_settings: _Settings = msgspec.field(default_factory=_Settings)
    model_alias: str = "another model"
    model_ftype: str = ""
    build_info: str = ""
    chat_template: str = ""
