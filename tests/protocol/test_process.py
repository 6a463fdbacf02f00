"""Deaths and misbehaviour: of the worker, of its children, of its client."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.protocol import process
from engine.protocol.client import LocalEngine
from engine.protocol.events import EngineOptions, Failed, Finished, Load, ModelInfo, Ready, Token
from engine.protocol.process import EngineProcess
from engine.protocol.transport import pack
from engine.system.logs import LIMIT_BYTES
from tests.paths import ROOT
from tests.protocol.conftest import running
from tests.protocol.test_client import ask, collect, token_ids, until
from tests.thorough import rarely
from tests.waiting import until as soon
from tests.waiting import wait_until


def scripted(code):
    """An engine whose process runs `code`, with its socket as `sock`."""
    prelude = (
        "import os, signal, socket, subprocess, sys, time\nsock = socket.socket(fileno=int(sys.argv[1]))\n"
    )
    command = (sys.executable, "-c", prelude + code)
    return LocalEngine(EngineOptions(model_path="none"), command=command)


# What follows from an end of the process, however it was started.
forked = pytest.mark.usefixtures("forked_engines")


async def vanish(pid):
    await soon(lambda: not running(pid), lambda: f"process {pid} lives on")


async def test_a_process_that_the_system_holds_is_not_waited_for(engines, monkeypatch):
    engine = engines.add(scripted("time.sleep(60)"))
    ends = asyncio.ensure_future(collect(engine.start()))
    await soon(lambda: engine.pid, lambda: "no process")
    pid, kill = engine.pid, os.kill
    with monkeypatch.context() as holds:
        holds.setattr(process.os, "kill", lambda *_: None)
        holds.setattr(process, "signal_group", lambda *_: None)
        holds.setattr(process, "UNKILLABLE_S", 0.05)
        engine._process.kill()
        assert "the system holds it" in (await ends)[-1].message and running(pid)
    kill(pid, signal.SIGKILL)


# --- the worker dies -----------------------------------------------------------------------------------


@forked
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


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such\x41", "exit status 1: ModuleNotFoundError: No module named 'no_suchA'"),
        ("raise OSError('\x1b]0;x\x07' + 'y' * 999)", f"exit status 1: OSError: ]0;x{'y' * 187}…"),
        ("raise ValueError('a prompt\\nOSError: a prompt')", "exit status 1: ValueError"),
        ("print('OSError: a prompt'); sys.exit(4)", "exit status 4"),
    ],
)
async def test_a_process_that_ends_by_itself_says_why(code, said):
    for earlier in "raise MemoryError('of an earlier process')", code:
        engine = scripted(earlier)
        *_, last = await collect(engine.start())
        await engine.close()
    assert last.message == f"The engine process ended by itself ({said})."


@forked
async def test_what_came_before_the_death_is_kept(engines, tmp_path):
    arrived = tmp_path / "arrived"
    engine = engines(die_at=300, until=arrived)
    engine.on_event = lambda event: arrived.touch() if getattr(event, "id", None) == 299 else None
    seen = await collect(engine.generate(ask()))
    assert token_ids(seen) == list(range(300))
    assert seen[-1].message == "The engine process died (signal 9, SIGKILL)."


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
    await soon(lambda: not engine.pid)
    assert token_ids(await collect(engine.generate(ask()))) == [0, 1]
    assert "Segmentation fault" in engine.log_path.read_text()


@forked
async def test_a_death_that_nobody_has_noticed_costs_no_prompt(engines):
    """The line mode waits for a line of a pipe, and its event loop stands still meanwhile."""
    engine = engines(tokens=2)
    await collect(engine.start())
    pid = engine.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not running(pid))
    events = await collect(engine.generate(ask(4)))
    assert token_ids(events) == [0, 1] and isinstance(events[-1], Finished)
    assert events[-1].request_id == 4 and engine.pid not in (None, pid)


async def test_a_prompt_that_meets_a_death_is_sent_once_to_the_next_process(engines):
    """The process has ended, and nobody was told so. Sent twice, the prompt would end the next one."""
    engine = engines(tokens=2)
    await collect(engine.start())
    process = engine._process
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: process._process.returncode is not None)
    pids = []
    for id in (1, 2):
        assert token_ids(await collect(engine.generate(ask(id)))) == [0, 1]
        pids.append(engine._process.pid)
    assert process.pid != pids[0] == pids[1]


async def test_a_prompt_of_which_each_process_dies_is_sent_twice_only(engines):
    info = ModelInfo(
        name="", architecture="", quantization="", parameters=1, file_bytes=1, trained_context=1, thinks=False
    )
    ready = Ready(model=info, backend="CPU", device_name="", context_length=9, load_ms=1.0)
    code = f"""
said = sock.recv(1 << 16)
sock.sendall({pack(ready)!r})
while b"hello" not in said:
    said += sock.recv(1 << 16)
"""
    engine = engines.add(scripted(code))
    assert isinstance((await collect(engine.start()))[-1], Ready)
    events = await collect(engine.generate(ask()))
    assert [type(event) for event in events] == [Ready, Failed]


@forked
@pytest.mark.parametrize("how", ["hangs", rarely("stopped")])
async def test_a_process_that_does_not_end_a_cancelled_answer_is_replaced(engines, monkeypatch, how):
    monkeypatch.setattr("engine.protocol.client.DEAF_S", 0.1)
    engine = engines(rate=500, hang_at=5 if how == "hangs" else -1, deaf=how == "hangs")
    await collect(engine.start())
    pid = engine.pid
    stream = engine.generate(ask(1))
    await until(stream, lambda e: isinstance(e, Token) and e.id == 4)
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    await engine.stop()
    assert (await collect(stream))[-1].reason == "cancelled"
    assert token_ids(await collect(engine.generate(ask(2, max_tokens=3)))) == [0, 1, 2]
    assert engine.pid not in (None, pid)


@forked
async def test_a_death_while_loading(engines, tmp_path):
    engine = engines(until=tmp_path / "never")
    stream = engine.start()
    await anext(stream)
    os.kill(engine.pid, signal.SIGTERM)
    last = (await collect(stream))[-1]
    assert isinstance(last, Failed) and "SIGTERM" in last.message


async def test_ctrl_c_in_the_terminal_is_not_for_the_worker(engines):
    engine = engines(tokens=2)
    await collect(engine.start())
    assert os.getsid(engine.pid) == engine.pid != os.getsid(0), "it has no terminal"
    os.kill(engine.pid, signal.SIGINT)
    assert token_ids(await collect(engine.generate(ask()))) == [0, 1]


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


# A signal may interrupt the line that it follows: `print` in its handler would fail then.
DISOBEDIENT = """
say = lambda word: os.write(1, word + b"\\n")
signal.signal(signal.SIGTERM, lambda *_: say(b"told"))
say(b"running")
while b"Shutdown" not in sock.recv(1 << 16): pass
say(b"asked")
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["close", "aclose", "task"])
async def test_a_silent_worker_can_be_ended(engines, how, monkeypatch):
    engine = engines.add(scripted(DISOBEDIENT))
    log = lambda: engine.log_path.read_text().split() if engine.log_path.exists() else []
    task = asyncio.create_task(collect(stream := engine.start()))
    await soon(lambda: log() == ["running"])
    pid = engine.pid
    if how == "close":
        words = iter(["asked", "told"])

        async def ended_within(self, seconds):
            """As long as the worker needs to notice, however slow the machine is."""
            word = next(words)
            await soon(lambda: log()[-1] == word)
            return False

        monkeypatch.setattr(EngineProcess, "_ended_within", ended_within)
        await engine.close()
        assert log() == ["running", "asked", "told"], "it is asked and told before it is made"
        assert isinstance((await task)[-1], Failed)
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
    await vanish(pid)


async def test_children_of_the_worker_end_with_it(engines, monkeypatch):
    monkeypatch.setattr("engine.protocol.process.SHUTDOWN_GRACE_S", 0.1)
    spawn = (
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[sock.fileno()]); print(child.pid, flush=True)\n"
    )
    for end in ("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()", "time.sleep(60)"):
        engine = engines.add(scripted(spawn + end))
        engine.log_path.unlink(missing_ok=True)
        task = asyncio.create_task(collect(engine.start()))
        await soon(lambda log=engine.log_path: log.exists() and log.read_text().endswith("\n"))
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
    for round_ in range(3):
        if round_ % 3 == 0:
            await collect(engine.generate(ask()))  # dies
        elif round_ % 3 == 1:
            await collect(engine.start())
        else:
            async for _ in engine.start():
                break
        await engine.close()
    assert not children() and fds() == before


@forked
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
from tests.protocol.test_client import ask
async def main():
    engine = synthetic.engine(rate=0, load_s=0.0, tokens=10**9, context_length=10**9, **{behaviour})
    async for event in engine.start():
        if {behaviour}.get("until"): print(engine.pid, flush=True)
    print(engine.pid, flush=True)
    async for event in engine.generate(ask()): pass
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "behaviour", [rarely({}), {"hang_at": 10}, rarely({"until": "/nowhere"})], ids=["busy", "hangs", "loads"]
)
async def test_the_worker_dies_with_its_client(behaviour):
    code = PARENT.format(behaviour=behaviour)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        assert running(pid)
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
            worker.wait(60)
            await vanish(child)
        finally:
            worker.kill()


async def test_an_engine_runs_the_same_code_as_who_starts_it():
    """A checkout may have the Python of another one, in which that is installed."""
    found = "import engine; print(f'PROGRAM={engine.__file__}'); sys.exit(3)"
    engine = scripted(found)
    *_, last = await collect(engine.start())
    await engine.close()
    assert isinstance(last, Failed) and f"PROGRAM={ROOT / 'engine'}" in engine.log_path.read_text()


@pytest.mark.parametrize("own, wanted", [(None, "1"), ("3", "3")])
async def test_an_engine_has_no_threads_of_blas(own, wanted, monkeypatch):
    """They wait by spinning. What the user has set counts more."""
    if own is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", own)
    engine = scripted("import os; print('THREADS=' + os.environ['OPENBLAS_NUM_THREADS']); sys.exit(3)")
    await collect(engine.start())
    await engine.close()
    assert f"THREADS={wanted}" in engine.log_path.read_text()
