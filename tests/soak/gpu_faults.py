"""An NVIDIA GPU fails while the engine answers or is idle: a kernel fails or hangs, or the device falls off."""

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
    Prefilling,
    Sampling,
    Token,
    TokenIds,
)
from engine.system.child_process import module_command
from engine.system.whole_file import write_whole
from tests import generated_model
from tests.soak.counts import Counts
from tests.soak.faulty_gpu import FAULTS, FILE, TAKEN
from tests.soak.gpu_memory import LEAK_BYTES, PYTHONPATH, other_program

DEAF_S = 1.0
PATIENCE_S = 2.0
TAKE_S = 10.0  # for the process to have the fault, beside other programs
LIMIT_S = 60.0


def run(tries: int, number: int = 0) -> Counts:
    """The reply must end with a sentence, or be stopped by the user if the device hangs. The next prompt must be
    answered as before, by another process. No memory may be missing in the end. No tries without such a GPU."""
    counts = Counts("the GPU fails: a kernel fails or hangs, the device falls off")
    if cuda_driver.unusable_because():
        return counts
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
        mock.patch("engine.protocol.client.DEAF_S", DEAF_S),
    ):
        asyncio.run(_all(tries, random.Random(number), counts, Path(folder)))
    return counts


async def _all(tries: int, choose: random.Random, counts: Counts, folder: Path) -> None:
    path, file = generated_model.write(folder / "model.gguf", layers=2), folder / "fault"
    engine = LocalEngine(
        EngineOptions(model_path=str(path), backend="CUDA", context_length=512),
        environment={"PYTHONPATH": PYTHONPATH, FILE: str(file)},
        command=module_command("tests.soak.faulty_gpu"),
    )
    async with other_program() as other:
        free = other.free_bytes
    expected, _ = await _answer(engine)
    for n in range(tries):
        fault = FAULTS[n % len(FAULTS)]
        try:
            async with asyncio.timeout(LIMIT_S):
                end = await _suffer(engine, file, fault, choose.choice([0.0, 0.02, 0.05, 0.1]))
                started = time.perf_counter()
                tokens, _ = await _answer(engine)
                counts.took((time.perf_counter() - started) * 1e3)
            if tokens != expected:
                raise RuntimeError("other tokens than before")
            counts.survived[f"{fault}: {end}"] += 1
        except Exception as error:
            counts.lost[f"{fault}: {type(error).__name__} {error}"] += 1
    await engine.close()
    async with other_program() as other:
        if (missing := free - other.free_bytes) > LEAK_BYTES:
            counts.lost[f"{missing >> 20} MB are missing"] += 1


async def _suffer(engine: LocalEngine, file: Path, fault: str, after_s: float) -> str:
    """How the reply ended in which the fault came."""
    began = asyncio.Event()
    reply = asyncio.create_task(_answer(engine, began))
    await began.wait()
    await asyncio.sleep(after_s)
    pid, taken = engine.pid, file.with_suffix(TAKEN)
    taken.unlink(missing_ok=True)
    write_whole(file, fault.encode())  # a file that is still empty names no fault
    try:
        async with asyncio.timeout(TAKE_S):
            while engine.pid == pid and not taken.exists():
                await asyncio.sleep(0.002)
        if not (await asyncio.wait([reply], timeout=PATIENCE_S))[0]:
            await engine.stop()
        _, end = await reply
        if isinstance(end, Failed) and not end.message.endswith("."):
            raise RuntimeError(f"no sentence: {end.message}")
        with contextlib.suppress(TimeoutError):  # a reply that ended before the fault, or was stopped
            async with asyncio.timeout(PATIENCE_S):
                _, later = await _answer(engine)
                if isinstance(later, Finished) and later.reason != "cancelled" and engine.pid == pid:
                    raise RuntimeError(f"the fault did nothing: {end}")
    finally:
        file.unlink()
    await engine.stop()
    await asyncio.sleep(DEAF_S)
    return "a sentence" if isinstance(end, Failed) else end.reason


async def _answer(
    engine: LocalEngine, began: asyncio.Event | None = None
) -> tuple[list[int], Failed | Finished]:
    request = Generate(
        request_id=1,
        prompt=TokenIds(ids=(1, 2, 3)),
        max_tokens=400,
        sampling=Sampling(temperature=0.0),
        ignore_eos=True,
    )
    tokens = list[int]()
    async for event in engine.generate(request):
        if began and isinstance(event, Prefilling):
            began.set()
        if isinstance(event, Token):
            tokens.append(event.id)
    assert isinstance(event, Failed | Finished)
    if began:
        began.set()
    return tokens, event
