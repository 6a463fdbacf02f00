"""Deaths and misbehaviour: of the worker, of its children, of its client."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.client import LocalEngine
from engine.events import EngineOptions, Failed, Finished, Load, Ready, Token
from engine.logs import LIMIT_BYTES
from engine.transport import pack
from tests.engine.conftest import running
from tests.engine.test_client import ask, collect, token_ids, until
from tests.paths import ROOT


def scripted(code):
    """An engine whose process runs `code`, with its socket as `sock`."""
    prelude = (
        "import os, signal, socket, subprocess, sys, time\nsock = socket.socket(fileno=int(sys.argv[1]))\n"
    )
    command = (sys.executable, "-c", prelude + code)
    return LocalEngine(EngineOptions(model_path="none"), command=command)


async def vanish(pid, within_s=60.0):
    deadline = time.monotonic() + within_s
    while running(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        await asyncio.sleep(0.01)


# --- the worker dies -----------------------------------------------------------------------------------


async def test_sigkill_in_mid_answer_ends_it_and_the_next_prompt_works(engines):
    engine = engines(rate=100)
    await collect(engine.start())
    first_pid = engine.pid
    stream = engine.generate(ask(1))
    await until(stream, lambda e: isinstance(e, Token) and e.id == 5)
    os.kill(first_pid, signal.SIGKILL)
    events = await collect(stream)
    last = events[-1]
    assert (last.kind, last.request_id) == ("backend", None)
    assert last.message == "The engine process died (signal 9, SIGKILL)."
    assert last.hint.endswith(f"The engine's log: {engine.log_path}")
    assert "next prompt" not in last.hint  # which is the chat's to say: a single answer has none
    assert engine.pid is None
    events = await collect(engine.generate(ask(2, max_tokens=5)))
    assert any(isinstance(e, Ready) for e in events)
    assert token_ids(events) == [0, 1, 2, 3, 4] and isinstance(events[-1], Finished)
    assert engine.pid != first_pid


async def test_what_came_before_the_death_is_kept(engines):
    events = await collect(engines(rate=1000, die_at=300).generate(ask()))
    ids = token_ids(events)
    assert ids == list(range(len(ids))) and len(ids) > 200
    assert events[-1].message == "The engine process died (signal 9, SIGKILL)."


async def test_a_model_file_that_is_cut_short_while_it_is_read(engines, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1 << 20))
    code = f"""
import mmap
with open({str(file)!r}, "r+b") as file:
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.truncate(100)
bytes(data)
"""
    [end] = await collect(engines.add(scripted(code)).start())
    assert end.message == "The engine process died (signal 7, SIGBUS)."
    assert end.hint.startswith("The model file was cut short or replaced while it was read.")


async def test_a_death_while_idle_is_noticed_by_the_next_prompt(engines):
    engine = engines(tokens=2)
    await collect(engine.start())
    os.kill(engine.pid, signal.SIGSEGV)
    while engine.pid:
        await asyncio.sleep(0.01)
    assert token_ids(await collect(engine.generate(ask()))) == [0, 1]
    assert "Segmentation fault" in engine.log_path.read_text()


async def test_a_death_while_loading(engines):
    engine = engines(load_s=10)
    stream = engine.start()
    await anext(stream)
    os.kill(engine.pid, signal.SIGTERM)
    last = (await collect(stream))[-1]
    assert isinstance(last, Failed) and "SIGTERM" in last.message


# --- the worker misbehaves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        r"b'\xff' * 100",
        r"b'\5\0\0\0hello'",
        r"b'\x0a\0\0\0\x81\xa4type\xa4Evil'",
        r"b'\0\0\0\0'",
        r"b'\x0e\0\0\0\x82\xa4type\xa6Failed\xa1'",
        r"(lambda p: len(p).to_bytes(4, 'little') + p)(b'\x91' * 1000000)",
    ],
)
async def test_garbage_is_a_failure_and_the_end_of_the_process(engines, garbage, children):
    engine = engines.add(scripted(f"sock.sendall({garbage}); time.sleep(60)"))
    [event] = await collect(engine.start())
    assert event.message == "The engine process sent something that is not an event."
    assert engine.pid is None
    await engine.close()
    assert not children()


async def test_a_worker_that_hangs_up_and_lives_is_ended(engines):
    engine = engines.add(scripted("sock.close(); time.sleep(600)"))
    async with asyncio.timeout(60):
        [event] = await collect(engine.start())
    assert isinstance(event, Failed)


@pytest.mark.parametrize("how", ["close", "aclose", "task"])
async def test_a_silent_worker_can_be_ended(engines, how):
    engine = engines.add(scripted("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"))
    task = asyncio.create_task(collect(stream := engine.start()))
    while engine.pid is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    pid, started = engine.pid, time.perf_counter()
    if how == "close":
        await engine.close()
        assert time.perf_counter() - started > 1, "it is asked and told before it is made"
        assert isinstance((await task)[-1], Failed)
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
    await vanish(pid)


async def test_children_of_the_worker_end_with_it(engines):
    spawn = (
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[sock.fileno()]); print(child.pid, flush=True)\n"
    )
    for end in ("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()", "time.sleep(60)"):
        engine = engines.add(scripted(spawn + end))
        engine.log_path.unlink(missing_ok=True)
        task = asyncio.create_task(collect(engine.start()))
        while not (engine.log_path.exists() and engine.log_path.read_text().strip()):
            await asyncio.sleep(0.01)
        child = int(engine.log_path.read_text())
        if "sleep" in end:
            await engine.close()
        await task
        await vanish(child)


async def test_nothing_leaks(engines, children):
    fds = lambda: len(list(Path("/proc/self/fd").iterdir()))
    engine = engines(rate=1000, die_at=20)
    await collect(engine.start())
    await engine.close()
    before = fds()
    for round_ in range(6):
        if round_ % 3 == 0:
            await collect(engine.generate(ask()))  # dies
        elif round_ % 3 == 1:
            await collect(engine.start())
        else:
            async for _ in engine.start():
                break
        await engine.close()
    assert not children() and fds() == before


async def test_the_log_stays_small(engines):
    engine = engines(tokens=1)
    engine.log_path.parent.mkdir(parents=True)
    engine.log_path.write_bytes(bytes(LIMIT_BYTES + 1))
    await collect(engine.generate(ask()))
    assert engine.log_path.stat().st_size < 1000


# --- the client dies -----------------------------------------------------------------------------------

PARENT = """
import asyncio
from tests import synthetic
from tests.engine.test_client import ask
async def main():
    engine = synthetic.engine(rate=0, hang_at={hang_at}, tokens=10**9, context_length=10**9, load_s={load_s})
    async for event in engine.start():
        if {load_s}: print(engine.pid, flush=True)
    print(engine.pid, flush=True)
    async for event in engine.generate(ask()): pass
asyncio.run(main())
"""


@pytest.mark.parametrize(("hang_at", "load_s"), [(-1, 0), (10, 0), (-1, 10)], ids=["busy", "hangs", "loads"])
async def test_the_worker_dies_with_its_client(hang_at, load_s):
    code = PARENT.format(hang_at=hang_at, load_s=load_s)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        assert running(pid)
        await asyncio.sleep(0.1)
        parent.kill()
    await vanish(pid)


async def test_the_worker_and_its_children_die_when_the_pipe_closes():
    ours, theirs = socket.socketpair()
    code = (
        "import subprocess\n"
        "print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid, flush=True)\n"
        "from tests.synthetic import main; main()"
    )
    command = (sys.executable, "-c", code, str(theirs.fileno()))
    with subprocess.Popen(
        command,
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        theirs.close()
        child = int(worker.stdout.readline())
        ours.sendall(pack(Load(options=EngineOptions(model_path="none"))))
        received = b""
        while b"Ready" not in received:
            received += ours.recv(1 << 16)
        ours.close()  # it has nothing to send, and would not notice by that
        try:
            worker.wait(2)
            await vanish(child)
        finally:
            worker.kill()
