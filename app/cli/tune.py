"""`orin-chat tune`: finds the fastest way to compute a model's products on this GPU, and keeps it."""

from __future__ import annotations

import asyncio
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from app.chat.settings import Settings
from app.cli import options
from app.cli.model_file import model_path
from app.cli.oneshot import follow
from app.cli.progress import describe
from app.cli.signals import run_until_signal
from engine.client import Engine, LocalEngine
from engine.events import EngineOptions, Event, Failed, Ready, Search, Warming
from widgets.text import one_line

WIDTH = 16  # of a search that leaves no candidate out
SECONDS = 120.0
EPILOG = """\
Every later start on this machine uses what was found, for each model with products of
these shapes. Ctrl+C ends the search and keeps what it has found. What was searched
before is not searched again, unless --again says so; where not all candidates were
tried in time, more --seconds and --again try more of them.
"""


def run(
    arguments: Sequence[str], settings: Settings, *, make: Callable[[EngineOptions], Engine] = LocalEngine
) -> int:
    """Searches as `arguments` say, shows how it goes on standard error, writes what was found to standard output,
    and returns the exit code. Raises OrinError for what cannot be."""
    given = _parse(arguments)
    chosen = EngineOptions(
        model_path=str(model_path(given.model, settings)),
        backend=given.backend or "auto",
        kernels="fused",
        search_width=WIDTH,
        search_s=given.seconds,
        search_again=given.again,
    )
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    board = _Board(messages)
    try:
        return asyncio.run(_search(make(chosen), board))
    finally:
        found = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        for part in board.found():
            found.print(part)


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = options.Parser(
        prog="orin-chat tune", description="Make a model faster on this GPU.", epilog=EPILOG
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="a model, as in orin-chat (the last one)")
    options.add_backend(add, "the device")
    add(
        "--seconds", type=options.positive, default=int(SECONDS), metavar="N", help=f"at most ({SECONDS:.0f})"
    )
    add("--again", action="store_true", help="also what was searched before")
    return parser.parse_args(arguments)


async def _search(engine: Engine, board: _Board) -> int:
    """Starts `engine`, which is the search, and returns the exit code."""
    try:
        with board:
            return await run_until_signal(follow(engine.start(), board.show), signal.SIGINT, signal.SIGTERM)
    finally:
        await engine.close()


class _Board:
    """How the search goes, while it does, and what it has found."""

    def __init__(self, messages: Console) -> None:
        self._messages = messages
        self._searches: dict[str, Search] = {}
        self._backend = ""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=messages,
            transient=True,
            disable=not messages.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, left="")

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        match event:
            case Warming(search=Search() as search):
                self._searches[search.what] = search
                left = f"{search.left_s:.0f} s left" if search.left_s else ""
                self._progress.update(
                    self._task,
                    description=one_line(search.what),
                    completed=search.tried,
                    total=search.total or None,
                    left=left,
                )
            case Ready():
                self._backend = f"{event.backend} ({event.device_name})"
                if not self._searches:
                    self._say(
                        f"There is nothing to search for on {self._backend}: products are cut in one way."
                    )
            case Failed():
                self._say(f"{event.message} {event.hint}")
            case _ if words := describe(event):
                self._progress.update(self._task, description=one_line(words), total=None, left="")

    def found(self) -> Iterable[Table | str]:
        if not self._searches:
            return
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("product", "how it is cut", "tried", "refused", "a step, µs", "faster"):
            table.add_column(heading, justify="left" if heading in ("product", "how it is cut") else "right")
        for s in self._searches.values():
            figures = ("known", "", "", "")
            if not s.found:
                faster = s.before_us / s.after_us - 1 if s.after_us else 0.0
                tried = str(s.tried) if s.tried >= s.total else f"{s.tried} of {s.total}"
                figures = (tried, str(s.refused), f"{s.after_us:.1f}", f"{faster:.1%}")
            table.add_row(one_line(s.what), one_line(s.choice), *figures)
        yield table

    def _say(self, sentence: str) -> None:
        self._messages.print(one_line(f"orin-chat: {sentence}"), markup=False)
