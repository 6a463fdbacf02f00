"""The engine is killed or frozen while it searches for faster kernels: tinygrad's search on a CPU, or ours on a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from pathlib import Path
from unittest import mock

from engine.devices import cuda_driver
from engine.protocol.client import LocalEngine
from engine.protocol.events import (
    EngineOptions,
    Failed,
    Finished,
    Generate,
    RawText,
    Ready,
    Sampling,
    Token,
    Warming,
)
from tests import generated_model
from tests.soak.counts import Counts
from tests.soak.engine_faults import FAULTS

LIMIT_S = 120.0
END_S = 5.0


def run(tries: int, number: int = 0, on_gpu: bool = False) -> Counts:
    """Each search goes on where the last one was ended. Its start must end with a sentence, and the next start, without
    a search, must give the same tokens as before: what a search has left on the disk spoils nothing. No tries on a GPU
    if there is none."""
    device = "a GPU" if on_gpu else "a CPU"
    counts = Counts(f"the engine is killed or freezes while it searches for faster kernels, on {device}")
    if on_gpu and cuda_driver.unusable_because():
        return counts
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        path = generated_model.write(Path(folder, "model.gguf"), layers=1)
        asyncio.run(_all(tries, random.Random(number), counts, path, on_gpu))
    return counts


async def _all(tries: int, choose: random.Random, counts: Counts, path: Path, on_gpu: bool) -> None:
    expected = await _answer(path, on_gpu)
    for _ in range(tries):
        fault = choose.choice([*FAULTS])
        try:
            async with asyncio.timeout(LIMIT_S):
                end = await _suffer(path, fault, choose, on_gpu)
                started = time.perf_counter()
                if await _answer(path, on_gpu) != expected:
                    raise RuntimeError("other tokens than before")
                counts.took((time.perf_counter() - started) * 1e3)
            counts.survived[f"{fault}{end}"] += 1
        except Exception as error:
            counts.lost[f"{fault}: {type(error).__name__} {error}"] += 1


def _engine(path: Path, search_width: int, on_gpu: bool) -> LocalEngine:
    backend, kernels = ("CUDA", "fused") if on_gpu else ("CPU", "graph")
    return LocalEngine(
        EngineOptions(
            model_path=str(path),
            backend=backend,
            kernels=kernels,
            context_length=64,
            search_width=2 * search_width if on_gpu else search_width,
        )
    )


async def _suffer(path: Path, fault: str, choose: random.Random, on_gpu: bool) -> str:
    """The fault comes at a random moment of the search. " after the search" if that had ended before."""
    engine, searching, last = _engine(path, 1, on_gpu), asyncio.Event(), []

    async def start() -> None:
        async for event in engine.start():
            last[:] = [event]
            if isinstance(event, Warming | Ready | Failed):
                searching.set()

    starting = asyncio.create_task(start())
    try:
        await searching.wait()
        await asyncio.sleep(choose.uniform(0, 2))
        was_ready = isinstance(last[0], Ready)
        if engine.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, FAULTS[fault])
        if fault == "frozen":  # nobody can tell that from a long search: the user ends it
            await asyncio.wait_for(engine.close(), END_S)
        await asyncio.wait_for(starting, END_S)
        if was_ready:
            return " after the search"
        if not (isinstance(last[0], Failed) and last[0].message):
            raise RuntimeError(f"the start ended with {type(last[0]).__name__}")
        return ""
    finally:
        await engine.close()


async def _answer(path: Path, on_gpu: bool) -> list[int]:
    engine = _engine(path, 0, on_gpu)
    request = Generate(
        request_id=1,
        prompt=RawText(text="water"),
        max_tokens=8,
        sampling=Sampling(temperature=0.0),
        ignore_eos=True,
    )
    try:
        events = [event async for event in engine.generate(request)]
    finally:
        await engine.close()
    if not isinstance(events[-1], Finished):
        raise RuntimeError(str(events[-1]))
    return [event.id for event in events if isinstance(event, Token)]
