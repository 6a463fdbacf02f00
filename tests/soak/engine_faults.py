"""Deaths and freezes of the engine process at random moments: while it loads, reads a prompt, writes, or is idle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from unittest import mock

from engine.protocol.client import LocalEngine
from engine.protocol.events import Failed, Finished, Generate, RawText
from tests import synthetic
from tests.soak.counts import Counts

DEAF_S = 0.3
PATIENCE_S = 8.0
LIMIT_S = 60.0
TOKENS = 60
FAULTS = {"killed": signal.SIGKILL, "crashed": signal.SIGSEGV, "frozen": signal.SIGSTOP}


def run(tries: int, number: int = 0) -> Counts:
    """After each fault a user stops the reply, if it has not ended, and sends another prompt, which must be answered
    in full. If nothing comes for some seconds, the user stops that one too and asks again."""
    counts = Counts("the engine is killed, crashes or freezes")
    with mock.patch("engine.protocol.client.DEAF_S", DEAF_S):
        asyncio.run(_all(tries, random.Random(number), counts))
    return counts


async def _all(tries: int, choose: random.Random, counts: Counts) -> None:
    engine = _new()
    for _ in range(tries):
        fault = choose.choice([*FAULTS])
        try:
            async with asyncio.timeout(LIMIT_S):
                counts.took(await _suffer(engine, FAULTS[fault], choose.uniform(0, 0.25)))
            counts.survived[fault] += 1
        except Exception as error:
            counts.lost[f"{fault}: {type(error).__name__} {error}"] += 1
            await engine.close()
            engine = _new()
    await engine.close()


def _new() -> LocalEngine:
    return synthetic.engine(rate=400, tokens=TOKENS, load_s=0.05, prefill_s=0.03)


async def _suffer(engine: LocalEngine, fault: signal.Signals, after_s: float) -> float:
    """Milliseconds from the next prompt to its complete answer."""

    async def answer(number: int) -> Finished | Failed:
        last = None
        async for event in engine.generate(Generate(request_id=number, prompt=RawText(text="water"))):
            last = event
        assert isinstance(last, Finished | Failed)
        return last

    first = asyncio.create_task(answer(1))
    await asyncio.sleep(after_s)
    if pid := engine.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, fault)
    await asyncio.sleep(0.05)
    was_loading = engine._ready is None
    await engine.stop()
    await first
    if fault == signal.SIGSTOP and was_loading:
        await engine.close()  # nobody can tell a load that hangs from a long one: the user ends it
    started = time.perf_counter()
    # A death in the middle costs one prompt; so does stopping an engine that is frozen.
    for number in range(2, 5):
        reply = asyncio.create_task(answer(number))
        if not (await asyncio.wait([reply], timeout=PATIENCE_S))[0]:
            await engine.stop()
        end = await reply
        if isinstance(end, Finished) and end.predicted_n == TOKENS:
            return (time.perf_counter() - started) * 1e3
    raise RuntimeError(f"no answer: {end}")
