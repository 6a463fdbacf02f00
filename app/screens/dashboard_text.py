"""The dashboard once, as text: an engine is started, answers a little, is measured, and what the panes would
show is printed."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
from typing import TextIO

from app.cli.progress import StatusLine, describe, figures
from app.screens.performance import PerformanceObserver
from engine.client import Engine, Measurable
from engine.events import Event, Failed, Finished, Generate, RawText, Ready, Sampling
from engine.measure.counters import Counters
from widgets import kernel_lines, machine_panel, throughput_graph
from widgets.kernel_lines import KernelProfiles
from widgets.machine_panel import MachineState
from widgets.pane import Line
from widgets.text import one_line

MIN_WIDTH, MAX_WIDTH = 34, 100
"""Columns. Panes can be drawn down to the first; narrower terminals break their lines."""
GRAPH_ROWS = 14
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
TOKENS = 64


async def run(engine: Engine, out: TextIO, messages: TextIO) -> int:
    """Prints the dashboard of `engine` on `out`, progress and what went wrong on `messages`; closes it and
    returns the exit code."""
    performance, status = PerformanceObserver(), StatusLine(messages)
    counters = Counters()
    request = Generate(
        request_id=1,
        prompt=RawText(text=PROMPT),
        sampling=Sampling(temperature=0),
        max_tokens=TOKENS,
        ignore_eos=True,
        fresh=True,
    )
    try:
        for stream in (engine.start(), engine.generate(request), engine.generate(request)):
            counters.read()  # loads are of the time since
            async for event in stream:
                performance.observe(event)
                status.show(describe(event))
                if isinstance(event, Failed):
                    return _complain(event, status, messages)
        read = counters.read()  # of the time of the last answer
        if isinstance(engine, Measurable):
            status.show("measuring")
            asked: list[Event] = [
                await engine.measure(),
                await engine.profile(),
                await engine.profile("prefill"),
            ]
            for event in asked:
                performance.observe(event)
            failed = [event.message for event in asked if isinstance(event, Failed)]
        else:
            failed = [f"{engine.name} does not tell of its kernels."]
        status.clear()
        _print(performance, MachineState(read), failed, out)
        return 0
    finally:
        status.clear()
        await engine.close()


def _complain(failure: Failed, status: StatusLine, messages: TextIO) -> int:
    status.clear()
    print("orin-chat:", one_line(f"{failure.message} {failure.hint}"), file=messages)
    return failure.exit_code


def _print(performance: PerformanceObserver, machine: MachineState, failed: list[str], out: TextIO) -> None:
    assert isinstance(performance.ready, Ready) and isinstance(performance.last_end, Finished)
    width = _width(out)
    for sentence in (describe(performance.ready), figures(performance.last_end)):
        print(_wrapped(sentence, width, out), file=out)
    _section("throughput", throughput_graph.lines(performance.throughput(), width, GRAPH_ROWS), out)
    for profile in (performance.kernels.decode, performance.kernels.prefill):
        if profile is not None:
            view = KernelProfiles(copy_gbps=performance.copy_gbps)
            rows = [
                kernel_lines.row(profile, kernel, view.copy_gbps, width)
                for kernel in kernel_lines.ordered(profile.kernels, "total")
            ]
            _section(f"kernels, {profile.step}", kernel_lines.header(profile, view, width) + rows, out)
    for sentence in failed:
        print("", _wrapped(one_line(sentence), width, out), sep="\n", file=out)
    _section("machine", machine_panel.lines(machine, width), out)


def _width(out: TextIO) -> int:
    """As wide as the terminal, within limits; elsewhere as wide as ever."""
    columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns if out.isatty() else MAX_WIDTH
    return max(MIN_WIDTH, min(columns, MAX_WIDTH))


def _wrapped(sentence: str, width: int, out: TextIO) -> str:
    """Broken between words for a terminal; files get one line."""
    return textwrap.fill(sentence, width) if out.isatty() else sentence


def _section(title: str, lines: list[Line], out: TextIO) -> None:
    print(f"\n{title}\n{'─' * len(title)}", file=out)
    for line in lines:
        print("".join(text for text, _ in line).rstrip(), file=out)


def main(engine: Engine, out: TextIO, messages: TextIO) -> int:
    return asyncio.run(run(engine, out, messages))
