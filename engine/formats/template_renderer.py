"""Renders a chat template in processes of its own, and kills one that takes too long."""

import json
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

from engine.child_process import kill
from engine.errors import TemplateError

START_S = 30.0  # for the process to start; on a busy machine that takes seconds
RENDER_S = 1.0  # rendering takes about a millisecond
RENDER_BYTES_PER_S = 2 << 20  # beyond that: conversations of 100,000 messages take a second on a busy machine
_NO_PROCESS = "The process that renders chat templates does not start."


class Refused(Exception):
    """The template called raise_exception with this message."""


class Broken(Exception):
    """The template cannot be compiled, or fails on a conversation."""


class TemplateRenderer:
    """One template. Each thread that renders it at the same time has a process (`template_process`); these end with
    this object."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._idle: list[_Process] = []

    def start(self) -> None:
        """Starts a process and does not wait for it: it compiles the template while the model loads. Raises
        TemplateError."""
        self._idle.append(_Process(self._source))

    def render(self, variables: dict[str, Any]) -> str:
        """The template's text. `variables` are JSON values and must have "now", the time in ISO format. Raises Refused,
        Broken, and TemplateError if it takes too much time or memory."""
        text: str = self._answer(variables)
        return text

    def reads(self) -> frozenset[str]:
        """The variables that the template reads and does not set before. Raises Broken and TemplateError."""
        return frozenset(self._answer(None))

    def _answer(self, request: dict[str, Any] | None) -> Any:
        process: _Process | None = None
        with suppress(IndexError):  # all are at work
            process = self._idle.pop()
        if process is None or not process.is_alive:
            process = _Process(self._source)
        answer = process.answer(request)
        if process.is_alive:
            self._idle.append(process)
        match answer:
            case {"text": answer} | {"reads": answer}:
                return answer
            case {"refused": reason}:
                raise Refused(reason)
            case {"broken": reason}:
                raise Broken(reason)
            case {"limit": reason}:
                raise TemplateError(
                    f"The model's chat template was stopped: {reason}.",
                    "The model file is damaged or malicious: get another copy of the model.",
                )
        raise AssertionError(answer)


class _Process:
    """A process that has been started, and ends with this object."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError."""
        script = Path(__file__).with_name("template_process.py")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                start_new_session=True,  # so that Ctrl-C in the terminal does not end it
            )
        except OSError as error:
            hint = f"The system says: {error.strerror}. Free some memory and try again."
            raise TemplateError(_NO_PROCESS, hint) from None
        self._kill = weakref.finalize(self, kill, self._process)
        self._ready = False
        self._write(json.dumps(source))

    @property
    def is_alive(self) -> bool:
        return self._kill.alive and self._process.poll() is None

    def answer(self, request: dict[str, Any] | None) -> Any:
        """The value of its answer to a line. Raises TemplateError if it does not start."""
        if not self._ready and self._read_line(START_S) != "ready\n":
            raise TemplateError(_NO_PROCESS, "Install orin-chat again.")
        self._ready = True
        line = json.dumps(request)
        seconds = RENDER_S + len(line) / RENDER_BYTES_PER_S
        self._write(line)
        line = self._read_line(seconds)
        if not line.endswith("\n"):  # the process was killed, or died
            self._kill()
            return {"limit": f"it takes longer than {seconds:.0f} s"}
        return json.loads(line)

    def _write(self, line: str) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the process has died; reading finds that out
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _read_line(self, seconds: float) -> str:
        """The next line, or a part of it if the process dies. After `seconds` it is killed."""
        assert self._process.stdout
        timer = Timer(seconds, self._process.kill)
        timer.start()
        try:
            return self._process.stdout.readline()
        finally:
            timer.cancel()
