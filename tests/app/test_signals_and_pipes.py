"""The command line in processes of its own: signals, pipes, full disks and terminals."""

import codecs
import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.app.terminal import Terminal
from tests.app.test_main import INSTANT, model
from tests.paths import ROOT
from tests.thorough import rarely
from tests.waiting import LIMIT_S, wait_until

__all__ = ["model"]


def start(model, behaviour, *arguments, **streams):
    """The command line as a process of its own, with a synthetic engine."""
    command = [sys.executable, "-m", "tests.app.synthetic_cli", json.dumps(behaviour), "--model", model]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen([*command, *arguments], cwd=ROOT, text=True, **streams)


def workers_of(process):
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), rarely(signal.SIGTERM, 143)])
def test_a_signal_stops_the_reply(model, number, code):
    process = start(model, {"rate": 50, "tokens": 9999}, "why?")
    said = process.stdout.readline()
    workers = workers_of(process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")
    assert (said + out).endswith("\n")
    assert workers and not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_ctrl_c_between_two_prompts_from_a_pipe_stops_no_reply(model):
    behaviour = {"rate": 100, "tokens": 9, "load_s": 0}
    with start(model, behaviour, "--plain", stdin=subprocess.PIPE) as process:
        call = Path(f"/proc/{process.pid}/syscall")  # "running", or its number and arguments in hex
        for text, until in (
            ("", "/help lists"),
            ("one", "reply 9 tokens"),
            ("", "Ctrl-D or"),
            ("two", "reply 9 tokens"),
        ):
            if text:
                process.stdin.write(f"{text}\n")
                process.stdin.flush()
            elif until == "Ctrl-D or":
                wait_until(lambda: call.read_text().split()[1:2] == ["0x0"])  # it reads standard input again
                process.send_signal(signal.SIGINT)
            while until not in (line := process.stdout.readline()):
                assert line and "stopped" not in line
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_ctrl_c_while_the_program_imports_its_modules_ends_it_silently():
    code = """
import os, signal, sys
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "app.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
import app.__main__
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
    assert (run.returncode, run.stderr) == (-signal.SIGINT, b"")


def test_a_signal_while_the_model_loads(model):
    process = start(model, {"until": "/nowhere"}, "--json", "why?")
    assert json.loads(process.stdout.readline())["event"] == "loading"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_a_reader_that_has_had_enough(model):
    process = start(model, {"rate": 0, "tokens": 100_000}, "why?")
    assert process.stdout.readline() == "# A synthetic answer\n"
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)


def run_into_full_disk(*arguments, stream="stdout", **environment):
    """The command line, run to its end, with `stream` on a disk that is full."""
    with Path("/dev/full").open("w") as full:
        return subprocess.run(
            [sys.executable, "-m", "app", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: full}),
            env=os.environ | environment,
            text=True,
        )


@pytest.mark.parametrize("arguments", [["why?"], rarely(["--json", "why?"])])
def test_a_full_disk_is_one_sentence(model, arguments):
    with Path("/dev/full").open("w") as full:
        process = start(model, {}, *arguments, stdout=full)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "No space left" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        ("--help", "1"),
        rarely("--help", ""),
        rarely("models", ""),
        rarely("--mistaken --json", "1"),
        rarely("bench --help", ""),
    ],
)
def test_a_full_disk_is_one_sentence_for_lists_and_help_too(home, arguments, unbuffered):
    process = run_into_full_disk(*arguments.split(), PYTHONUNBUFFERED=unbuffered)
    assert process.returncode == 1
    assert process.stderr == "orin-chat: Input or output failed: No space left on device.\n"


def test_where_no_sentence_can_be_written_the_exit_code_says_it(home):
    assert run_into_full_disk("--mistaken", stream="stderr").returncode == 2


def test_a_screen_that_nobody_would_see_is_not_drawn(model):
    ours, theirs = os.openpty()
    process = start(model, {}, stdin=theirs, stdout=theirs)
    _, err = process.communicate(timeout=60)
    os.close(ours), os.close(theirs)
    assert process.returncode == 2
    assert "drawn on standard error" in err and "2>" in err


def test_progress_is_shown_on_a_terminal_alone(model):
    ours, theirs = os.openpty()
    process = start(model, {"tokens": 3}, "why?", stderr=theirs)
    os.close(theirs)
    out, _ = process.communicate(timeout=60)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert out == "# A syntheti\n"
    assert "loading" in shown and "preparing kernels" in shown and "\x1b" not in shown
    assert shown.endswith(" \r")  # and taken away before the reply


def test_the_way_back_is_printed_after_the_screen_is_left(model):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
    process = start(model, INSTANT | {"tokens": 3}, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen, terminal, ends = "", Terminal(100, 30), time.monotonic() + LIMIT_S
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read_until(text):
        """Frames hold what has changed, so a text may come in pieces: the screen has it whole."""
        nonlocal seen
        with contextlib.suppress(OSError):  # the terminal is closed
            while all(text not in line for line in terminal.display):
                assert time.monotonic() < ends, terminal.text()
                if select.select([ours], [], [], 1)[0]:
                    new = decoder.decode(os.read(ours, 1 << 16))
                    seen += new
                    terminal.feed(new)
        assert any(text in line for line in terminal.display), terminal.text()

    read_until("Ask anything")
    os.write(ours, b"why?\r")
    read_until("A syntheti")
    os.write(ours, b"\x11")  # Ctrl+Q
    read_until("orin-chat --continue goes on with this chat.")
    assert process.wait(timeout=60) == 0
    os.close(ours)
    assert seen.index("\x1b[?1049l") < seen.index("orin-chat --continue"), "the screen was left before"
