"""`orin-chat tune`: searches for the fastest way to compute a model's products on this GPU, and stores it."""

import asyncio
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from app.chat.settings import Settings
from app.cli import options, values
from app.cli.model_file import model_path
from app.cli.oneshot import follow
from app.cli.progress import describe
from app.cli.signals import run_until_signal
from engine.protocol.client import Engine, LocalEngine
from engine.protocol.events import EngineOptions, Event, Failed, Ready, Search, Warming
from widgets.text import counted, one_line

WIDTH = 16  # of a search that leaves no candidate out
SECONDS = 120
_LEAST_PERCENT = 0.1  # the least gain that is told
EPILOG = """\
Every later start on this machine uses what was found, for each model with products of
these shapes. Ctrl+C ends the search and keeps what it has found. --again also repeats
earlier searches; with more --seconds, it tries candidates that they had no time for.
"""


def run(
    arguments: Sequence[str], settings: Settings, *, make: Callable[[EngineOptions], Engine] = LocalEngine
) -> int:
    """Searches, shows the progress on standard error and the results on standard output, and returns the exit code.
    Raises OrinError."""
    args = _parse(arguments)
    engine_options = EngineOptions(
        model_path=str(model_path(args.model, settings)),
        backend=args.backend or "auto",
        kernels="fused",
        search_width=WIDTH,
        search_s=args.seconds,
        search_again=args.again,
    )
    display = _Display(Console(stderr=True, highlight=False, soft_wrap=True))
    try:
        if code := asyncio.run(_start(make(engine_options), display)):
            return code
        if display.has_found:  # what was found is proved by a start of its own
            proof = replace(engine_options, search_width=None, search_s=None, search_again=False)
            return asyncio.run(_start(make(proof), display))
        return 0
    finally:
        if table := display.results():
            console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
            console.print(table, *display.gained(), sep="\n")


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = options.Parser("tune", "Make a model faster on this GPU.", EPILOG)
    add = parser.add_argument
    add("--model", metavar="NAME", help="a model, as in orin-chat (the last one)")
    options.add_backend(add, "the device")
    add("--seconds", type=values.positive, default=SECONDS, metavar="N", help=f"at most ({SECONDS})")
    add("--again", action="store_true", help="also what was searched before")
    return parser.parse_args(arguments)


class _Display:
    """The progress of the search, and its results."""

    def __init__(self, messages: Console) -> None:
        self._messages = messages
        self._searches: dict[str, Search] = {}  # by product
        self._said: set[str] = set()  # the warnings
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=messages,
            transient=True,
            disable=not messages.is_terminal,
        )
        self._task = self.progress.add_task("", total=None, left="")

    def show(self, event: Event) -> None:
        """Shows an event of the engine: the search on a line that changes, all else on lines that stay."""
        match event:
            case Warming(search=Search() as search):
                self._searches[search.what] = search
                self.progress.update(
                    self._task,
                    description=one_line(search.what),
                    completed=search.tried,
                    total=search.total or None,
                    left=f"{search.left_s:.0f} s left" if search.left_s else "",
                )
            case Ready(backend=backend, device_name=device, warnings=warnings):
                if not self._searches:
                    self._say(f"There is nothing to search for on {backend} ({device}).")
                for warning in [w for w in warnings if w not in self._said]:
                    self._say(warning)
                self._said.update(warnings)
            case Failed():
                self._say(f"{event.message} {event.hint}")
            case _ if words := describe(event):
                self.progress.update(self._task, description=one_line(words), total=None, left="")

    @property
    def has_found(self) -> bool:
        """Whether products were searched that no earlier search knew."""
        return any(not search.found for search in self._searches.values())

    def results(self) -> Table | None:
        """A row for each product; None if nothing was searched."""
        if not self._searches:
            return None
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("product", "schedule", "tried", "refused", "a step, µs", "faster"):
            table.add_column(heading, justify="left" if heading in ("product", "schedule") else "right")
        for s in self._searches.values():
            figures = ("known", "", "", "")
            if not s.found:
                gain = s.before_us / s.after_us - 1 if s.after_us else 0.0
                tried = str(s.tried) if s.tried >= s.total else f"{s.tried} of {s.total}"
                figures = (tried, str(s.refused), f"{s.after_us:.1f}", f"{gain:.1%}")
            table.add_row(one_line(s.what), one_line(s.choice), *figures)
        return table

    def gained(self) -> list[str]:
        """What all together has gained, and why some were searched once more; in sentences."""
        new = [s for s in self._searches.values() if not s.found and s.after_us]
        if not new:
            return []
        before_us, after_us = new[0].before_us, new[-1].after_us
        percent = (1 - after_us / before_us) * 100
        less = f", {percent:.1f} % less than before" if percent >= _LEAST_PERCENT else ", as before"
        said = [f"A token takes {after_us:,.0f} µs{less}."]
        if outdated := sum(s.outdated for s in new):
            of = f"{outdated} of {counted(len(new), 'product')}"
            said.append(f"{of} had schedules that were measured with earlier kernels.")
        return said

    def _say(self, sentence: str) -> None:
        self._messages.print(one_line(f"orin-chat: {sentence}"), markup=False)


async def _start(engine: Engine, display: _Display) -> int:
    """Starts `engine`, which searches if its options say so, and returns the exit code."""
    try:
        with display.progress:
            return await run_until_signal(follow(engine.start(), display.show), signal.SIGINT, signal.SIGTERM)
    finally:
        await engine.close()
