"""Two programs chat through one served engine and one history, while the engine or one of them is killed or frozen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from app.serve.routes import application
from app.serve.server import Server, listen
from app.serve.service import ModelFile, Service
from engine.protocol.client import LocalEngine
from tests import generated_model, synthetic
from tests.paths import ROOT
from tests.soak import engine_faults
from tests.soak.counts import Counts
from tests.soak.tides import ANSWERS, TEXT, TOKENS, whole

PATIENCE_S, DEAF_S, START_S, LIMIT_S = 3.0, 0.3, 20.0, 120.0
FAULTS = [
    *(f"engine {fault}" for fault in engine_faults.FAULTS),
    "one program killed",
    "one reply stopped",
    "none",
]


def run(tries: int, number: int = 0) -> Counts:
    """Both programs ask at once. After the fault each must get its whole answer and have it in the history: at once, or
    when the user asks again. Another chat's messages must never be in a chat."""
    counts = Counts("two programs, one history, one served engine: deaths and freezes")
    with tempfile.TemporaryDirectory() as folder, mock.patch("engine.protocol.client.DEAF_S", DEAF_S):
        asyncio.run(_all(tries, random.Random(number), counts, Path(folder)))
    return counts


async def _all(tries: int, choose: random.Random, counts: Counts, home: Path) -> None:
    engine = synthetic.engine(rate=400, tokens=TOKENS, text=TEXT, load_s=0.05, prefill_s=0.03)
    with listen("127.0.0.1", 0) as sock:
        file = ModelFile.read(generated_model.write(home / "model.gguf"))
        service = Service(engine, model="synthetic", file=file)
        server = Server(service, engine, application(service), sock, lambda event: None)
        serving = asyncio.create_task(server.run())
        while not service.ready:  # a server whose model does not load ends
            await asyncio.sleep(0.01)
        programs = [_Program(home, f"http://127.0.0.1:{sock.getsockname()[1]}/v1") for _ in range(2)]
        for count in range(tries):
            fault = choose.choice(FAULTS)
            try:
                async with asyncio.timeout(LIMIT_S):
                    counts.took(await _suffer(engine, programs, fault, f"number {count}", choose))
                counts.survived[fault] += 1
            except Exception as error:
                counts.lost[f"{fault}: {type(error).__name__} {error}"] += 1
                for program in programs:
                    await program.end()
        for program in programs:
            await program.end()
        await server._stop()
        await serving


async def _suffer(
    engine: LocalEngine, programs: list[_Program], fault: str, prompt: str, choose: random.Random
) -> float:
    """Milliseconds from the fault to the last of the answers."""
    prompts = [f"{prompt} of program {i}" for i in range(len(programs))]
    await asyncio.gather(*(program.ask(text) for program, text in zip(programs, prompts, strict=True)))
    await asyncio.sleep(choose.uniform(0, 0.3))
    victim = choose.choice(programs)
    of, _, how = fault.partition(" ")
    if of == "engine" and engine.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, engine_faults.FAULTS[how])
    elif fault == "one program killed":
        await victim.end()
    elif fault == "one reply stopped":
        await victim.stop()
    started = time.perf_counter()
    await asyncio.gather(*(_answered(p, text) for p, text in zip(programs, prompts, strict=True)))
    return (time.perf_counter() - started) * 1e3


async def _answered(program: _Program, prompt: str) -> None:
    """Waits for the whole answer; a user who has waited long stops the reply and asks again."""
    for _ in range(5):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and program.is_alive:
            if program.answer_to(prompt) == whole(prompt).strip():
                return
            await asyncio.sleep(0.01)
        await program.stop()
        await program.ask(prompt)
    raise RuntimeError(f"no whole answer, but {program.answer_to(prompt)!r}")


class _Program:
    """A chat in lines, started when it is needed."""

    def __init__(self, home: Path, address: str) -> None:
        self._command = (sys.executable, "-m", "app", "--plain", "--engine", address)
        folders = {f"XDG_{kind}_HOME": str(home / kind) for kind in ("DATA", "STATE", "CACHE")}
        self._environment = {**os.environ, **folders, "PYTHONPATH": str(ROOT)}
        self._history = home / "DATA" / "orin-chat" / "history.sqlite3"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ask(self, prompt: str) -> None:
        if not self.is_alive:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
        assert self._process and self._process.stdin
        before, deadline = self._times_sent(prompt), time.monotonic() + START_S
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(f"{prompt}\n".encode())
            await self._process.stdin.drain()
        while self.is_alive and self._times_sent(prompt) == before and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ctrl+C, which also ends a program that is not answering."""
        if self.is_alive:
            assert self._process
            self._process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        if self.is_alive:
            assert self._process
            self._process.kill()
            await self._process.wait()

    def answer_to(self, prompt: str) -> str:
        """The last one in the history, whole or not, of the chats in which the prompt was sent last."""
        rows = self._rows(ANSWERS, prompt)
        return str(rows[0][0]).strip() if rows else ""

    def _times_sent(self, prompt: str) -> int:
        return len(self._rows("SELECT id FROM messages WHERE content = ?", prompt))

    def _rows(self, query: str, prompt: str) -> list[tuple[object, ...]]:
        with contextlib.suppress(sqlite3.OperationalError):  # the file is not there, or being made
            database = sqlite3.connect(f"file:{self._history}?mode=ro", uri=True)
            with contextlib.closing(database):
                return database.execute(query, [prompt]).fetchall()
        return []
