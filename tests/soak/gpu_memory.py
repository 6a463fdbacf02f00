"""Another program takes an NVIDIA GPU's whole memory while the engine answers, while it starts, or while another model
starts beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

from engine.devices import cuda_driver
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Failed, Finished, Generate, Ready, Sampling, Token, TokenIds
from tests import generated_model
from tests.paths import ROOT
from tests.soak.counts import Counts

PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
LIMIT_S = 120.0
_START_S = 30.0
LEAK_BYTES = 64 << 20
_TAKES = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, free, total, size = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), 1 << 36
assert cuda.cuInit(0) == 0 and cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
print(free.value, flush=True)
for line in sys.stdin:
    while size >= 1 << 20:
        if cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size)):
            size //= 2
    print("full", flush=True)
"""


def run(tries: int, number: int = 0) -> Counts:
    """Each request and each start must end as without the other program, or with a sentence. Once the memory is there
    again, the same tokens as before must come. No memory may be missing in the end. No tries without such a GPU."""
    counts = Counts("another program takes the GPU's memory")
    if cuda_driver.unusable_because():
        return counts
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        path = generated_model.write(Path(folder, "model.gguf"), layers=2)
        asyncio.run(_all(tries, random.Random(number), counts, path))
    return counts


async def _all(tries: int, choose: random.Random, counts: Counts, path: Path) -> None:
    prompts = [[choose.randrange(200) for _ in range(n)] for n in (3, 40, 100, 300)]
    async with _engine(path) as engine:
        expected = [await _answer(engine, prompt) for prompt in prompts]
    async with other_program() as other:
        free = other.free_bytes
    moments = _while_it_answers, _while_it_starts, _while_another_starts
    for n in range(tries):
        moment = moments[n % len(moments)]
        name = moment.__name__.strip("_").replace("_", " ")
        try:
            async with asyncio.timeout(LIMIT_S):
                end = await moment(path, choose, prompts, expected, counts)
            counts.survived[f"{name}: {end}"] += 1
        except Exception as error:
            counts.lost[f"{name}: {type(error).__name__} {error}"] += 1
    async with other_program() as other:
        if (missing := free - other.free_bytes) > LEAK_BYTES:
            counts.lost[f"{missing >> 20} MB are missing"] += 1


Tokens = list[int]


async def _while_it_answers(
    path: Path, choose: random.Random, prompts: list[Tokens], expected: list[Tokens], counts: Counts
) -> str:
    async with _engine(path) as engine:
        await _answer(engine, prompts[0])
        async with other_program() as other:
            await other.take()
            ends = [await _try(engine, prompts, expected, choose) for _ in range(3)]
        await _recover(engine, prompts, expected, choose, counts)
    return "a sentence" if any(ends) else "answers"


async def _while_it_starts(
    path: Path, choose: random.Random, prompts: list[Tokens], expected: list[Tokens], counts: Counts
) -> str:
    async with _engine(path) as engine:
        async with other_program() as other:
            starting = asyncio.create_task(_start(engine))
            await asyncio.sleep(choose.uniform(0, 3))
            await other.take()
            end = await starting
        await _recover(engine, prompts, expected, choose, counts)
    return end


async def _while_another_starts(
    path: Path, choose: random.Random, prompts: list[Tokens], expected: list[Tokens], counts: Counts
) -> str:
    async with _engine(path) as engine:
        await _answer(engine, prompts[0])
        async with other_program() as other, _engine(path) as second:
            await other.take()
            end = await _start(second)
            await _try(engine, prompts, expected, choose)
        await _recover(engine, prompts, expected, choose, counts)
    return end


async def _start(engine: LocalEngine) -> str:
    events = [event async for event in engine.start()]
    match events[-1]:
        case Ready():
            return "it starts"
        case Failed(kind="backend"):
            return "a sentence"
    raise RuntimeError(f"the start ended with {events[-1]}")


async def _try(
    engine: LocalEngine, prompts: list[Tokens], expected: list[Tokens], choose: random.Random
) -> bool:
    """Whether a prompt ended with a sentence."""
    n = choose.randrange(len(prompts))
    try:
        if await _answer(engine, prompts[n]) != expected[n]:
            raise RuntimeError("other tokens than before")
    except _SaidError:
        return True
    return False


async def _recover(
    engine: LocalEngine, prompts: list[Tokens], expected: list[Tokens], choose: random.Random, counts: Counts
) -> None:
    started, n = time.perf_counter(), choose.randrange(len(prompts))
    if await _answer(engine, prompts[n]) != expected[n]:
        raise RuntimeError("other tokens than before")
    counts.took((time.perf_counter() - started) * 1e3)


class _SaidError(Exception):
    """It ended with a sentence about memory."""


async def _answer(engine: LocalEngine, prompt: Tokens) -> Tokens:
    request = Generate(
        request_id=1,
        prompt=TokenIds(ids=tuple(prompt)),
        max_tokens=8,
        sampling=Sampling(temperature=0.0),
        ignore_eos=True,
    )
    events = [event async for event in engine.generate(request)]
    if isinstance(events[-1], Failed) and events[-1].kind == "backend":
        raise _SaidError(events[-1].message)
    if not isinstance(events[-1], Finished):
        raise RuntimeError(str(events[-1]))
    return [event.id for event in events if isinstance(event, Token)]


@contextlib.asynccontextmanager
async def _engine(path: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(
        EngineOptions(model_path=str(path), backend="CUDA", context_length=512, parallel=2),
        environment={"PYTHONPATH": PYTHONPATH},
    )
    try:
        yield engine
    finally:
        await engine.close()


class _OtherProgram:
    def __init__(self, process: asyncio.subprocess.Process, free_bytes: int) -> None:
        self._process, self.free_bytes = process, free_bytes

    async def take(self) -> None:
        """Takes all memory that is free now."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(b"take\n")
        await asyncio.wait_for(self._process.stdout.readline(), _START_S)


@contextlib.asynccontextmanager
async def other_program() -> AsyncIterator[_OtherProgram]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _TAKES, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    try:
        yield _OtherProgram(process, int(await asyncio.wait_for(process.stdout.readline(), _START_S)))
    finally:
        process.kill()
        await process.wait()
