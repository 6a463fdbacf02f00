"""One of two engines is killed or frozen while a chat switches from the one to the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from unittest import mock

from app.chat.history import History
from app.chat.session import Session
from engine.protocol.client import LocalEngine
from engine.protocol.events import Sampling
from tests import synthetic
from tests.soak.counts import Counts
from tests.soak.engine_faults import DEAF_S, FAULTS, PATIENCE_S, TOKENS

LIMIT_S = 60.0


def run(tries: int, number: int = 0) -> Counts:
    """A reply streams while another engine starts; the fault hits either of them at a random moment. Afterwards one of
    them must answer in full. A user whose reply does not come stops it and asks again, and gives up a switch that
    hangs."""
    counts = Counts("an engine is killed or freezes during a change of model, preset or backend")
    with mock.patch("engine.protocol.client.DEAF_S", DEAF_S):
        asyncio.run(_all(tries, random.Random(number), counts))
    return counts


async def _all(tries: int, choose: random.Random, counts: Counts) -> None:
    chat = _Chat()
    for count in range(tries):
        fault, is_new = choose.choice([*FAULTS]), choose.random() < 0.5
        what = f"{'new' if is_new else 'old'} engine {fault}"
        try:
            async with asyncio.timeout(LIMIT_S):
                counts.took(await chat.suffer(fault, is_new, f"number {count}", choose))
            counts.survived[what] += 1
        except Exception as error:
            counts.lost[f"{what}: {type(error).__name__} {error}"] += 1
            await chat.session.close()
            chat = _Chat()
    await chat.session.close()


def _engine() -> LocalEngine:
    return synthetic.engine(rate=400, tokens=TOKENS, load_s=0.1, prefill_s=0.02)


class _Chat:
    """A session without a screen."""

    def __init__(self) -> None:
        self._tasks = set[asyncio.Task[None]]()
        self.session = Session(
            _engine(), History(":memory:"), _NoView(), spawn=self._spawn,
            sampling=Sampling(), system="", max_tokens=None, think=True,
        )  # fmt: skip
        self.session.start()

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def suffer(self, fault: str, is_new: bool, prompt: str, choose: random.Random) -> float:
        """Milliseconds from the next prompt to its whole answer."""
        session, new = self.session, _engine()
        await session.open(None)
        await session.send(prompt)
        await asyncio.sleep(choose.uniform(0, 0.1))
        old = session.engine
        session.switch(new, "another")
        await asyncio.sleep(choose.uniform(0, 0.3))
        victim = new if is_new else old
        assert isinstance(victim, LocalEngine)
        if victim.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, FAULTS[fault])
        if not await self._holds(lambda: not session.is_answering):
            await session.stop()
        if not await self._holds(lambda: session.candidate is None):
            session.cancel_switch()
        started = time.perf_counter()
        # An engine may still load on a busy machine.
        is_over = lambda: not (session.is_busy or session.queued)
        for _ in range(4):
            if await self._holds(is_over):
                await session.send(f"{prompt} again")
            if not await self._holds(is_over):
                await session.stop()
            if not session.conversation.turns:  # the prompt was given back
                continue
            last = session.conversation.turns[-1]
            if (
                last.role == "assistant"
                and last.finished
                and len(synthetic._pieces(last.content)) >= TOKENS - 5
            ):
                return (time.perf_counter() - started) * 1e3
        raise RuntimeError(f"no whole answer: {session.conversation.turns}")

    async def _holds(self, condition: object) -> bool:
        """Within the time for which a user waits."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():  # type: ignore[operator]
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.005)
        return True


class _NoView:
    async def added(self, turn: object) -> None:
        pass

    changed = cut = added

    async def opened(self) -> None:
        pass

    def queue_changed(self) -> None:
        pass

    def give_back(self, text: str) -> None:
        pass

    def notice(self, text: str, *, warning: bool = False) -> None:
        pass

    def problem_changed(self, problem: object) -> None:
        pass
