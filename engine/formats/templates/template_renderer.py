"""Renders a chat template in processes of its own, and kills one that takes too long."""

import json
from contextlib import suppress
from functools import partial
from typing import Any

from engine.errors import TemplateError
from engine.formats.limited_process import LimitedProcess

RENDER_S = 1.0  # rendering takes about a millisecond
RENDER_BYTES_PER_S = 2 << 20  # beyond that: conversations of 100,000 messages take a second on a busy machine
_DOES_NOT_START = partial(TemplateError, "The process that renders chat templates does not start.")


class Refused(Exception):
    """The template called raise_exception with this message."""


class Broken(Exception):
    """The template cannot be compiled, or fails on a conversation."""


def start_ahead() -> None:
    """Starts a process for a template that is yet to be read: it takes longer to import what it needs than a small
    model to load."""
    with suppress(TemplateError):  # the template's own start says so
        _ahead.append(_process())


def _process() -> LimitedProcess:
    return LimitedProcess("engine.formats.templates.template_process", _DOES_NOT_START)


_ahead: list[LimitedProcess] = []  # at most one, that no template has yet


class TemplateRenderer:
    """One template. Each thread that renders it at the same time has a process (`template_process`); these end with
    this object."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._idle: list[LimitedProcess] = []

    def start(self) -> None:
        """Starts a process and does not wait for it: it compiles the template while the model loads. Raises
        TemplateError."""
        self._idle.append(self._started())

    def render(self, variables: dict[str, Any]) -> str:
        """The template's text. `variables` are JSON values and must have "now", the time in ISO format. Raises Refused,
        Broken, and TemplateError if it takes too much time or memory."""
        text: str = self._answer(variables)
        return text

    def reads(self) -> frozenset[str]:
        """The variables that the template reads and does not set before. Raises Broken and TemplateError."""
        return frozenset(self._answer(None))

    def _answer(self, request: dict[str, Any] | None) -> Any:
        process: LimitedProcess | None = None
        with suppress(IndexError):  # all are at work
            process = self._idle.pop()
        if process is None or not process.is_alive:
            process = self._started()
        line = _line(request)
        seconds = RENDER_S + len(line) / RENDER_BYTES_PER_S
        with process.asked(line, seconds) as answers:
            answer = answers.readline()
        if not answer.endswith(b"\n"):  # the process was killed, or died
            process.end()
            raise _stopped(f"it takes longer than {seconds:.0f} s")
        self._idle.append(process)
        match json.loads(answer):
            case {"text": value} | {"reads": value}:
                return value
            case {"refused": reason}:
                raise Refused(reason)
            case {"broken": reason}:
                raise Broken(reason)
            case {"limit": reason}:
                raise _stopped(reason)
        raise AssertionError(answer)

    def _started(self) -> LimitedProcess:
        process: LimitedProcess | None = None
        with suppress(IndexError):  # another template, or another thread, has it
            process = _ahead.pop()
        process = process or _process()
        process.write(_line(self._source))
        return process


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _stopped(reason: str) -> TemplateError:
    return TemplateError(
        f"The model's chat template was stopped: {reason}.",
        "The model file is damaged or malicious: get another copy of the model.",
    )
