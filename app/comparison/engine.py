"""Two engines asked the same: a comparison, which is an engine itself.

What it streams is what the engine of ours answers, so that a chat goes on as it does without a comparison;
the other one's answer, the figures of both and where they part are in `Comparison.view()`.

Both get the same token ids, draw greedily and compute the whole prompt, whatever they have of it in their
caches: the same work. They answer in turn, since they share the memory's bandwidth, the first one
alternating; `together` lets them compete.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from app.chat.slowdown import other_programs
from app.comparison.figures import Agreement, Side
from engine.client import Engine, LocalEngine
from engine.errors import OrinError
from engine.events import (
    Chat,
    Counter,
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
from engine.formats.gguf import GGUF
from engine.formats.prompt import PromptEncoder
from engine.formats.template import Prompt
from engine.formats.thinking import ThinkSplitter
from engine.measure.counters import Cpu
from engine.measure.memory import gpu_used_bytes
from engine.peers.llama_server import LlamaServer
from engine.peers.server_engine import split_thinking
from widgets.comparison_data import ComparisonData, Difference

GREEDY = Sampling(temperature=0)
ODDS_OF = 20  # the most probable tokens that are looked through for a candidate


class Rival(Engine, Protocol):
    """An engine to compare with: its process can be looked at, if there is one on this machine."""

    @property
    def pid(self) -> int | None: ...


def with_llama_server(
    ours: LocalEngine, where: str = "", *, api_key: str = "", together: bool = False
) -> Comparison:
    """`ours` and llama.cpp on the same file, context and kind of device. `where` is the llama-server to start
    (its path; empty: the one that is found), or the address of one that runs and wants `api_key`."""

    def rival(ready: Ready) -> LlamaServer:
        options = replace(ours.options, backend=ready.backend, context_length=ready.context_length)
        if where.startswith(("http://", "https://")):
            return LlamaServer(options, url=where, api_key=api_key)
        return LlamaServer(options, where)

    def encoder() -> Encode:
        with GGUF(ours.options.model_path) as file:
            return PromptEncoder(file).encode

    return Comparison(ours, rival, encoder, together=together)


Encode = Callable[[Chat | RawText | TokenIds], Prompt]


class Comparison:
    """An `Engine`. `rival` makes the other one when it is known what ours is; `encoder`, called in a thread,
    makes what turns prompts into ids. Both of these may raise OrinError."""

    name = "orin-chat"

    def __init__(
        self,
        ours: LocalEngine,
        rival: Callable[[Ready], Rival],
        encoder: Callable[[], Encode],
        *,
        together: bool = False,
        read_counters: Callable[[], tuple[Counter, ...]] | None = None,
    ) -> None:
        self.ours = ours
        self.together = together
        self._make_rival = rival
        self._rival: Rival | None = None
        self._rival_start: asyncio.Task[None] | None = None
        self._make_encode = encoder
        self._encode: Encode | None = None
        self._left, self._right = Side(self.name), Side("llama.cpp")
        self._agreement = Agreement()
        self._odds: Difference | None = None
        self._asked = ""
        self._asked_together = together
        self._is_complete = False
        self._rival_first = False
        self._read = read_counters or _cpu_counters()
        self._remark = ""
        self._stopped = asyncio.Event()

    # --- Engine -----------------------------------------------------------------------------------------

    async def start(self) -> AsyncGenerator[Event, None]:
        """As ours does; the other engine is started beside, once ours is ready."""
        async for event in self.ours.start():
            self._left.observe(event)
            yield event
            if isinstance(event, Ready):
                self._ensure_rival(event)

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """The answer of ours; it ends when both have."""
        self._stopped.clear()
        if not self._left.ready:
            async for event in self.start():
                if self._stopped.is_set():
                    event = _stopped_before(request)
                yield event
                if isinstance(event, Failed | Finished):
                    return
        assert self._left.ready
        self._begin()
        self._asked = request.prompt.messages[-1].content if isinstance(request.prompt, Chat) else ""
        start = self._ensure_rival(self._left.ready)
        if not start.done():
            self._left.waits_for(self._right.name)
        await self._unless_stopped(start)
        try:
            prompt = await asyncio.to_thread(self._ids, request)
        except OrinError as error:
            yield Failed.from_error(error, request.request_id)
            return
        asked = replace(request, prompt=TokenIds(ids=tuple(prompt.ids)), sampling=GREEDY, fresh=True)
        self._begin(len(prompt.ids))
        self._asked_together, rival_first = self.together, self._rival_first
        self._rival_first = not rival_first
        other: asyncio.Task[None] | None = None
        heard = self.ours.on_event
        await asyncio.to_thread(self._read)  # loads are of the time since
        try:
            if self._asked_together:
                self.ours.on_event = _unheard  # a shared machine's speed is not what the model is known for
                other = asyncio.create_task(self._follow_rival(asked))
            elif rival_first:
                await self._follow_rival(asked)
            end: Finished | Failed = _stopped_before(request)
            if not self._stopped.is_set():
                async with aclosing(self._answer_of_ours(asked, request, prompt)) as events:
                    async for event in events:
                        if isinstance(event, Finished | Failed):
                            end = event
                        else:
                            yield event
            if other:
                await other
            elif not rival_first:
                await self._follow_rival(asked)
            # Of a rival that is no process of ours, the load would be taken for another program's.
            if self._rival and self._rival.pid:
                self._remark = other_programs(await asyncio.to_thread(self._read))
            await self._ask_for_odds(prompt.ids)
            for side in (self._left, self._right):
                side.passed_over()
            self._is_complete = True
            self.view()  # notes how much memory they hold, which cannot be seen later
            yield end
        finally:
            self.ours.on_event = heard
            if other:
                other.cancel()

    def forget(self) -> None:
        """Both are as before the first prompt."""
        self._begin()
        self._asked = ""

    def _begin(self, prompt_tokens: int = 0) -> None:
        self._left.begin(prompt_tokens)
        self._right.begin(prompt_tokens)
        self._agreement, self._odds, self._is_complete = Agreement(), None, False
        self._remark = ""

    async def stop(self) -> None:
        """Ends both answers."""
        self._stopped.set()
        await asyncio.gather(self.ours.stop(), *([self._rival.stop()] if self._rival else []))

    async def close(self) -> None:
        await asyncio.gather(self.release(), self.ours.close())

    async def measure(self) -> Measured | Failed:
        """As ours does."""
        return await self.ours.measure()

    async def profile(self, step: Step = "decode") -> KernelProfile | Failed:
        """As ours does."""
        return await self.ours.profile(step)

    async def release(self) -> LocalEngine:
        """Ends the comparison: the other engine is closed, ours goes on."""
        if self._rival_start:
            self._rival_start.cancel()
            await asyncio.gather(self._rival_start, return_exceptions=True)
        if self._rival:
            await self._rival.close()
        return self.ours

    @property
    def doing(self) -> str:
        return "; ".join(doing for side in (self._left, self._right) if (doing := side.doing))

    # --- the view ---------------------------------------------------------------------------------------

    def view(self) -> ComparisonData:
        """Both answers as they are now."""
        left, right = self._left, self._right
        self._agreement.update(left.tokens, right.tokens)
        same, differs = self._agreement.same, self._agreement.differs
        difference = self._odds
        if differs and difference is None:
            difference = Difference(same + 1, left.tokens[same].text, right.tokens[same].text)
        bytes_per_token = (
            (left.ready.weight_bytes_per_token, left.ready.kv_bytes_per_token) if left.ready else (0, 0)
        )
        left.pid, right.pid = self.ours.pid, self._rival.pid if self._rival else None
        columns = [
            side.column(same if differs else None, bytes_per_token, self._left.copy_gbps)
            for side in (left, right)
        ]
        return ComparisonData(
            left=columns[0],
            right=columns[1],
            asked=self._asked,
            together=self._asked_together,
            complete=self._is_complete,
            remark=self._remark,
            same=same,
            difference=difference,
        )

    # --- the two ----------------------------------------------------------------------------------------

    def _ensure_rival(self, ready: Ready) -> asyncio.Task[None]:
        """The start of the other engine: under way or done, or begun anew where it has failed."""
        start = self._rival_start
        if start is None or (start.done() and not self._right.ready):
            self._right.starting()
            start = self._rival_start = asyncio.create_task(self._start_rival(ready))
        return start

    async def _start_rival(self, ready: Ready) -> None:
        if isinstance(measured := await self.ours.measure(), Measured):
            self._left.copy_gbps = self._right.copy_gbps = measured.copy_gbps
            self._left.device_bytes = 0 if ready.backend.startswith("CPU") else measured.device_bytes
        used_before = gpu_used_bytes()
        if self._rival is None:
            try:
                self._rival = self._make_rival(ready)
            except OrinError as error:
                self._right.observe(Failed.from_error(error))
                return
        async for event in self._rival.start():
            self._right.observe(event)
        used_after = gpu_used_bytes()
        if used_before is not None and used_after is not None and self._rival.pid:
            self._right.device_bytes = max(0, used_after - used_before)

    async def _unless_stopped(self, task: asyncio.Task[None]) -> None:
        """Waits for `task`, but not when the user has had enough of it."""
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _answer_of_ours(
        self, asked: Generate, request: Generate, prompt: Prompt
    ) -> AsyncGenerator[Event, None]:
        """The answer to the bare ids, told as the one to the chat that they stand for."""
        splitter = ThinkSplitter(inside=prompt.opens_thinking) if isinstance(request.prompt, Chat) else None
        async with aclosing(split_thinking(self._observed(asked), splitter)) as events:
            async for event in events:
                yield event

    async def _observed(self, asked: Generate) -> AsyncGenerator[Event, None]:
        self._left.asked()
        async with aclosing(self.ours.generate(asked)) as events:
            async for event in events:
                self._left.observe(event)
                yield event

    async def _follow_rival(self, asked: Generate) -> None:
        if self._stopped.is_set() or not self._rival or not self._right.ready:
            return
        self._right.asked()
        async for event in self._rival.generate(asked):
            self._right.observe(event)

    async def _ask_for_odds(self, prompt: Sequence[int]) -> None:
        """Where the answers part: how probable both candidates are to both engines."""
        self._agreement.update(self._left.tokens, self._right.tokens)
        if not self._agreement.differs or self._stopped.is_set() or not self._rival:
            return
        at = self._agreement.same
        left, right = self._left.tokens[at], self._right.tokens[at]
        ids = (*prompt, *(token.id for token in self._left.tokens[:at]))
        question = Generate(
            request_id=0,
            prompt=TokenIds(ids=ids),
            sampling=GREEDY,
            max_tokens=1,
            logprobs=ODDS_OF,
            ignore_eos=True,
        )
        to_left, to_right = await _odds(self.ours, question), await _odds(self._rival, question)
        theirs = right.id if right.id != -1 else next(iter(to_right), -1)
        self._odds = Difference(
            position=at + 1,
            left=left.text,
            right=right.text,
            left_odds=(to_left.get(left.id), to_left.get(theirs)),
            right_odds=(to_right.get(left.id), to_right.get(theirs)),
        )

    def _ids(self, request: Generate) -> Prompt:
        if self._encode is None:
            self._encode = self._make_encode()
        return self._encode(request.prompt)


def _cpu_counters() -> Callable[[], tuple[Counter, ...]]:
    """Reads what the CPU alone tells: an answer need not wait for the rest of the machine (a Jetson's power mode)."""
    cpu = Cpu(Path("/"), os.getpid())
    return lambda: tuple(cpu.read())


def _unheard(event: Event) -> None:
    pass


async def _odds(engine: Engine, question: Generate) -> dict[int, float]:
    """The most probable next tokens, and their probabilities; none where the engine does not tell."""
    odds: dict[int, float] = {}
    async for event in engine.generate(question):
        if isinstance(event, Token) and event.top:
            odds = {top.id: math.exp(top.logprob) for top in event.top}
    return odds


def _stopped_before(request: Generate) -> Finished:
    """The end of an answer that was not begun."""
    return Finished(
        request_id=request.request_id,
        reason="cancelled",
        prompt_n=0,
        cached_n=0,
        prompt_ms=0.0,
        predicted_n=0,
        predicted_ms=0.0,
        load_ms=0.0,
        seed=0,
    )
