"""Where the time of a start goes, in lines of text."""

from collections.abc import Callable, Sequence

from engine.measure.timeline import timeline
from engine.protocol.client import Engine
from engine.protocol.events import Failed, Ready, Span
from widgets.text import one_line

_BAR_CHARS = 30


def start_lines(spans: Sequence[Span], with_program: bool = True) -> list[str]:
    """A line for each part of the engine's start, which ended just now, with a bar on a common scale, and one for what
    this program did before, if asked for. No lines if the engine tells nothing."""
    if not spans:
        return []
    before_ms = max(0.0, timeline.age_ms - max(span.start_ms + span.took_ms for span in spans)) * with_program
    shifted = [Span(name="this program", start_ms=0, took_ms=before_ms)] * with_program
    shifted += [Span(name=s.name, start_ms=s.start_ms + before_ms, took_ms=s.took_ms) for s in spans]
    total_ms = max(span.start_ms + span.took_ms for span in shifted) or 1.0
    scale, width = _BAR_CHARS / total_ms, max(len(span.name) for span in shifted)
    lines = []
    for span in shifted:
        first, last = round(span.start_ms * scale), round((span.start_ms + span.took_ms) * scale)
        bar = " " * first + "=" * max(1, last - first)
        figures = f"{span.start_ms / 1e3:6.2f} s {span.took_ms / 1e3:+6.2f}"
        lines.append(f"{span.name:{width}} {figures}  {bar}".rstrip())
    return [*lines, f"{'ready':{width}} {total_ms / 1e3:6.2f} s"]


async def show_start(engine: Engine, write: Callable[[str], object]) -> None:
    """Starts an engine, writes where the time went, and ends it."""
    try:
        async for event in engine.start():
            if isinstance(event, Ready):
                for line in start_lines(event.start, with_program=False):
                    write(line)
            elif isinstance(event, Failed):
                write(one_line(f"{event.message} {event.hint}"))
    finally:
        await engine.close()
