"""Two engines that answer the same prompts, as one engine.

Its stream is the answer of our engine, so that a chat goes on as it does without a comparison. The answer of the
other engine, the figures of both and the token at which they part are in `ComparisonEngine.view()`.

Importing this imports neither an HTTP client nor a tokenizer, which an engine without a comparison does not need.

Both do the same work: they get the same token ids, sample greedily and compute the whole prompt, whatever they have
cached of it. They share the memory's bandwidth, so they answer in turn, and each goes first every second time. With
`together`, they answer at the same time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from msgspec.structs import replace

from app.chat.roofline import device_key, keep_best
from app.chat.slowdown import other_programs
from app.comparison.common_prefix import CommonPrefix
from app.comparison.side import Side
from engine.errors import OrinError
from engine.formats.thinking import split_thinking
from engine.measure.cpu_counters import CpuCounters
from engine.measure.memory import gpu_used_bytes
from engine.protocol.client import Engine, LocalEngine
from engine.protocol.event_stream import AnswerStats
from engine.protocol.events import (
    Chat,
    Counter,
    Effort,
    Event,
    Failed,
    Finished,
    Generate,
    KernelProfile,
    Measured,
    RawText,
    Ready,
    Sampling,
    Step,
    Token,
    TokenIds,
)
from widgets.dashboard.comparison_data import ComparisonData, Difference

if TYPE_CHECKING:
    from engine.formats.templates.template import Prompt
    from engine.peers.llama_server import LlamaServer

GREEDY = Sampling(temperature=0)
WATCH_S = 1.0
"""How often other programs are looked at while engines are compared."""
CANDIDATES = 20
"""Where the answers part, each engine gives the probabilities of this many tokens."""


Encode = Callable[[Chat | RawText | TokenIds, Effort | None, int | None], "Prompt"]


def compare_with_llama_server(
    ours: LocalEngine, llama_server: str = "", *, api_key: str = "", together: bool = False
) -> ComparisonEngine:
    """`ours` and llama.cpp on the same file, context and kind of device. `llama_server` is the path of the program
    ("": the one that is found), or the address of a server that runs and takes `api_key`."""

    from engine.formats.gguf import GGUF
    from engine.formats.templates.prompt import PromptEncoder
    from engine.peers.llama_server import LlamaServer

    def make_peer(ready: Ready) -> LlamaServer:
        options = replace(ours.options, backend=ready.backend, context_length=ready.context_length)
        if llama_server.startswith(("http://", "https://")):
            return LlamaServer(options, url=llama_server, api_key=api_key)
        return LlamaServer(options, llama_server)

    def make_encoder() -> Encode:
        with GGUF(ours.options.model_path) as file:
            return PromptEncoder(file).encode

    return ComparisonEngine(ours, make_peer, make_encoder, together=together)


class ComparisonEngine:
    """An `Engine`. `together`: from the next prompt on, both answer at once. `make_peer` makes the other engine when
    ours is ready. `make_encoder` returns the function that turns prompts into token ids; it is called in a thread. Both
    may raise OrinError."""

    name = "orin-chat"

    def __init__(
        self,
        ours: LocalEngine,
        make_peer: Callable[[Ready], LlamaServer],
        make_encoder: Callable[[], Encode],
        *,
        together: bool = False,
        read_counters: Callable[[], tuple[Counter, ...]] | None = None,
    ) -> None:
        self.ours = ours
        self.together = together
        self._make_peer = make_peer
        self._peer: LlamaServer | None = None
        self._peer_start: asyncio.Task[None] | None = None
        self._make_encoder = make_encoder
        self._encode: Encode | None = None
        self._left, self._right = Side(self.name), Side("llama.cpp")
        self._prefix = CommonPrefix()
        self._difference: Difference | None = None
        self._asked = ""
        self._asked_together = together
        self._is_complete = False
        self._peer_first = False
        cpu = CpuCounters()  # other counters take long (a Jetson's power mode), and an answer would wait
        self._read_counters = read_counters or (lambda: tuple(cpu.read()))
        self._remark = ""
        self._stopped = asyncio.Event()

    # --- Engine -----------------------------------------------------------------------------------------

    async def start(self) -> AsyncGenerator[Event, None]:
        """The events of our engine. When it is ready, the other one starts in the background."""
        async for event in self.ours.start():
            self._left.observe(event)
            yield event
            if isinstance(event, Ready):
                self._ensure_peer(event)

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """The answer of our engine. Its last event comes when both answers have ended."""
        self._stopped.clear()
        if not self._left.ready:
            async for event in self.start():
                if self._stopped.is_set():
                    event = _stopped_before(request)
                yield event
                if isinstance(event, Failed | Finished):
                    return
        assert self._left.ready
        self._reset()
        self._asked = request.prompt.messages[-1].content if isinstance(request.prompt, Chat) else ""
        peer_start = self._ensure_peer(self._left.ready)
        if not peer_start.done():
            self._left.wait_for(self._right.name)
        await self._unless_stopped(peer_start)
        try:
            prompt = await asyncio.to_thread(self._ids, request)
        except OrinError as error:
            yield Failed.from_error(error, request.request_id)
            return
        self._reset(len(prompt.ids))
        async with aclosing(self._both_answer(request, prompt)) as events:
            async for event in events:
                yield event

    async def _both_answer(self, request: Generate, prompt: Prompt) -> AsyncGenerator[Event, None]:
        """The answer of our engine to a request whose `prompt` is in tokens, before, after or beside the other
        one's."""
        work = replace(request, prompt=TokenIds(ids=tuple(prompt.ids)), sampling=GREEDY, fresh=True)
        self._asked_together, peer_first = self.together, self._peer_first
        self._peer_first = not peer_first
        peer_answer: asyncio.Task[None] | None = None
        others = asyncio.create_task(self._watch_other_programs())
        on_event = self.ours.on_event
        await asyncio.to_thread(self._read_counters)  # the next reading is of the time since this one
        try:
            if self._asked_together:
                self.ours.on_event = _ignore  # the speed on a shared machine is not the model's
                peer_answer = asyncio.create_task(self._follow_peer(work))
            elif peer_first:
                await self._follow_peer(work)
            end: Finished | Failed = _stopped_before(request)
            if not self._stopped.is_set():
                async with aclosing(self._our_answer(request, prompt, work)) as events:
                    async for event in events:
                        if isinstance(event, Finished | Failed):
                            end = event
                        else:
                            yield event
            if peer_answer:
                await peer_answer
            elif not peer_first:
                await self._follow_peer(work)
            others.cancel()
            await self._look_at_other_programs()
            await self._compare_candidates(prompt.ids)
            for side in (self._left, self._right):
                side.skip()
            self._is_complete = True
            self.view()  # records the memory of both while they hold it
            yield end
        finally:
            others.cancel()
            self.ours.on_event = on_event
            if peer_answer:
                peer_answer.cancel()

    def _our_answer(self, request: Generate, prompt: Prompt, work: Generate) -> AsyncGenerator[Event, None]:
        """The answer of our engine to `work`, in which thinking is told from the rest as `request` has it."""
        from engine.formats.templates.prompt import think_splitter

        ours = self._left.follow(self.ours.generate(work))
        return split_thinking(ours, think_splitter(request.prompt, prompt))

    async def _watch_other_programs(self) -> None:
        """Looks at them while the two answer, so that no ratio is shown meanwhile either."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._look_at_other_programs()

    async def _look_at_other_programs(self) -> None:
        # A peer that is no process of ours would count as another program.
        if self._peer and self._peer.pid:
            remark = other_programs(await asyncio.to_thread(self._read_counters))
            self._remark = self._remark or remark

    def forget(self) -> None:
        """Drops the last answers: the conversation is another one."""
        self._reset()
        self._asked = ""

    def _reset(self, prompt_tokens: int = 0) -> None:
        self._left.reset(prompt_tokens)
        self._right.reset(prompt_tokens)
        self._prefix, self._difference, self._is_complete = CommonPrefix(), None, False
        self._remark = ""

    async def stop(self) -> None:
        """Ends both answers."""
        self._stopped.set()
        await asyncio.gather(self.ours.stop(), *([self._peer.stop()] if self._peer else []))

    async def close(self) -> None:
        await asyncio.gather(self.release(), self.ours.close())

    async def measure(self) -> Measured | Failed:
        measured = await self.ours.measure()
        if isinstance(measured, Measured):
            ready, gbps = self._left.ready, measured.copy_gbps
            best = keep_best(device_key(ready), gbps) if ready else gbps
            for side in (self._left, self._right):
                side.copy_gbps = max(side.copy_gbps, best)
        return measured

    async def profile(self, step: Step = "decode") -> KernelProfile | Failed:
        return await self.ours.profile(step)

    async def release(self) -> LocalEngine:
        """Ends the comparison: closes the other engine and returns ours."""
        if self._peer_start:
            self._peer_start.cancel()
            await asyncio.gather(self._peer_start, return_exceptions=True)
        if self._peer:
            await self._peer.close()
        return self.ours

    @property
    def doing(self) -> str:
        """What the two are working on, in words; "" while they are idle."""
        return "; ".join(doing for side in (self._left, self._right) if (doing := side.doing))

    async def peer_problem(self) -> str:
        """Waits until the other engine has started or failed. Why it failed, or ""."""
        if self._peer_start is not None:
            await asyncio.wait([self._peer_start])
        return self._right.problem

    # --- the view ---------------------------------------------------------------------------------------

    def view(self) -> ComparisonData:
        """Both answers as they are now."""
        left, right = self._left, self._right
        self._prefix.update(left.tokens, right.tokens)
        same, differs = self._prefix.length, self._prefix.ended
        difference = self._difference
        if differs and difference is None:
            difference = Difference(same + 1, left.tokens[same].text, right.tokens[same].text)
        left.pid, right.pid = self.ours.pid, self._peer.pid if self._peer else None
        shown = same if differs else None
        return ComparisonData(
            left=left.view(shown, left.ready),
            right=right.view(shown, left.ready),
            asked=self._asked,
            together=self._asked_together,
            complete=self._is_complete,
            remark=self._remark,
            same=same,
            difference=difference,
        )

    # --- both engines -----------------------------------------------------------------------------------

    def _ensure_peer(self, ready: Ready) -> asyncio.Task[None]:
        """The start of the other engine, which may be over. One that failed is started again."""
        start = self._peer_start
        if start is None or (start.done() and not self._right.ready):
            self._right.start()
            start = self._peer_start = asyncio.create_task(self._start_peer(ready))
        return start

    async def _start_peer(self, ready: Ready) -> None:
        if isinstance(measured := await self.measure(), Measured):
            self._left.device_bytes = 0 if ready.is_on_cpu else measured.device_bytes
        used_before = gpu_used_bytes()
        if self._peer is None:
            try:
                self._peer = self._make_peer(ready)
            except OrinError as error:
                self._right.observe(Failed.from_error(error))
                return
        async for event in self._peer.start():
            self._right.observe(event)
        used_after = gpu_used_bytes()
        if used_before is not None and used_after is not None and self._peer.pid:
            self._right.device_bytes = max(0, used_after - used_before)

    async def _unless_stopped(self, task: asyncio.Task[None]) -> None:
        """Waits until `task` is done or the user stops the answers."""
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _follow_peer(self, work: Generate) -> None:
        if not self._stopped.is_set() and self._peer and self._right.ready:
            async for _ in self._right.follow(self._peer.generate(work)):
                pass

    async def _compare_candidates(self, prompt: Sequence[int]) -> None:
        """Where the answers part, asks each engine how probable both tokens are."""
        self._prefix.update(self._left.tokens, self._right.tokens)
        if not self._prefix.ended or self._stopped.is_set() or not self._peer:
            return
        same = self._prefix.length
        left, right = self._left.tokens[same], self._right.tokens[same]
        question = Generate(
            request_id=0,
            prompt=TokenIds(ids=(*prompt, *(token.id for token in self._left.tokens[:same]))),
            sampling=GREEDY,
            max_tokens=1,
            logprobs=CANDIDATES,
            ignore_eos=True,
        )
        by_left, by_right = (
            await _probabilities(self.ours, question),
            await _probabilities(self._peer, question),
        )
        right_id = right.id if right.id != -1 else next(iter(by_right), -1)
        self._difference = Difference(
            position=same + 1,
            left=left.text,
            right=right.text,
            left_odds=(by_left.get(left.id), by_left.get(right_id)),
            right_odds=(by_right.get(left.id), by_right.get(right_id)),
        )

    def _ids(self, request: Generate) -> Prompt:
        if self._encode is None:
            self._encode = self._make_encoder()
        most = self._left.ready.context_length if self._left.ready else None
        return self._encode(request.prompt, request.sampling.effort, most)


def _ignore(event: Event) -> None:
    pass


async def _probabilities(engine: Engine, question: Generate) -> dict[int, float]:
    """The most probable next tokens and their probabilities; empty if the engine does not report them."""
    probabilities: dict[int, float] = {}
    async for event in engine.generate(question):
        if isinstance(event, Token) and event.top:
            probabilities = {top.id: math.exp(top.logprob) for top in event.top}
    return probabilities


def _stopped_before(request: Generate) -> Finished:
    """The end of an answer that was stopped before it began."""
    return AnswerStats(request, prompt_ms=0.0, predicted_ms=0.0).finished("cancelled")


def answered_together(engine: Engine) -> bool:
    """Whether the last answer of `engine` shared the machine with another engine. Its speed says little then."""
    return isinstance(engine, ComparisonEngine) and engine.view().together
