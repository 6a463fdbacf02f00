"""Prints the dashboard once as text: starts an engine, lets it answer, measures it, and prints what the panes show."""

import shutil
import textwrap
from typing import TextIO

from app.cli.progress import ProgressLine, describe, figures, say
from app.screens.performance import PerformanceObserver
from engine.measure.counters import Counters
from engine.protocol.client import Engine, Measurable
from engine.protocol.events import Event, Failed, Finished, Generate, RawText, Ready, Sampling
from widgets.dashboard import expert_strip, kernel_lines, machine_panel, throughput_lines
from widgets.dashboard.machine_panel import MachineState
from widgets.dashboard.pane import Line
from widgets.text import one_line

MIN_WIDTH, MAX_WIDTH = 34, 100
"""In cells. The panes need the first; a narrower terminal wraps their lines."""
GRAPH_ROWS = 14
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
TOKENS = 64


async def run(engine: Engine, out: TextIO, messages: TextIO) -> int:
    """Prints the dashboard to `out`, progress and errors to `messages`. Closes the engine; returns the exit code."""
    performance, status, counters = PerformanceObserver(), ProgressLine(messages), Counters()
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
            counters.read()  # loads are measured between two reads
            async for event in stream:
                performance.observe(event)
                status.show(describe(event))
                if isinstance(event, Failed):
                    status.clear()
                    say(messages, event.message, event.hint)
                    return event.exit_code
        machine = MachineState(counters.read())
        status.show("measuring")
        problems = await _measure(engine, performance)
        status.clear()
        _print(performance, machine, problems, out)
        return 0
    finally:
        status.clear()
        await engine.close()


async def _measure(engine: Engine, performance: PerformanceObserver) -> list[str]:
    """Gives the measurements of the engine to `performance`. Returns why some are missing."""
    if not isinstance(engine, Measurable):
        return [f"{engine.name} cannot measure its kernels."]
    events: list[Event] = [await engine.measure(), await engine.profile(), await engine.profile("prefill")]
    for event in events:
        performance.observe(event)
    return [event.message for event in events if isinstance(event, Failed)]


def _print(performance: PerformanceObserver, machine: MachineState, problems: list[str], out: TextIO) -> None:
    assert isinstance(performance.ready, Ready) and isinstance(performance.last_end, Finished)
    columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns if out.isatty() else MAX_WIDTH
    width, profiles = max(MIN_WIDTH, min(columns, MAX_WIDTH)), performance.kernels
    for sentence in (describe(performance.ready), figures(performance.last_end)):
        print(_wrapped(sentence, width, out), file=out)
    _section("throughput", throughput_lines.whole_lines(performance.throughput(), width, GRAPH_ROWS), out)
    for profile in (profiles.decode, profiles.prefill):
        if profile is not None:
            kernels = kernel_lines.ordered(profile.kernels, "total")
            rows = [kernel_lines.row(profile, kernel, profiles.copy_gbps, width) for kernel in kernels]
            _section(f"kernels, {profile.step}", kernel_lines.header(profile, profiles, width) + rows, out)
    if experts := performance.experts():
        _section("experts", expert_strip.strip(experts, width), out)
    for sentence in problems:
        print("", _wrapped(one_line(sentence), width, out), sep="\n", file=out)
    _section("machine", machine_panel.lines(machine, width), out)


def _wrapped(sentence: str, width: int, out: TextIO) -> str:
    """`sentence` wrapped between words for a terminal; a file gets one line."""
    return textwrap.fill(sentence, width) if out.isatty() else sentence


def _section(title: str, lines: list[Line], out: TextIO) -> None:
    print(f"\n{title}\n{'─' * len(title)}", file=out)
    for line in lines:
        print("".join(text for text, _ in line).rstrip(), file=out)
