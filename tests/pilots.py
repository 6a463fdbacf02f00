"""Makes Textual's pilot wait until an application has nothing to do, instead of until the processor looks idle, and
end it in the order in which it ends for a user."""

from __future__ import annotations

import asyncio
import weakref
from asyncio import AbstractEventLoop, BaseEventLoop, Future
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import RenderableType
from textual._context import active_app
from textual.app import App
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widget import Widget

from widgets.terminal.paced_output import PacedOutput

MOST_S = 1.0
"""A thread that takes longer is not waited for any more: it may wait for what the test does next."""

_in_threads: weakref.WeakKeyDictionary[AbstractEventLoop, set[Future[Any]]] = weakref.WeakKeyDictionary()


async def until_idle(min_sleep: float = 0.0, max_sleep: float = MOST_S) -> None:
    """Returns when nothing is left to do but to wait: for a timer, a file or the next key.

    Takes the place of `textual._wait.wait_for_idle`."""
    app, loop, quiet_turns = active_app.get(), asyncio.get_running_loop(), 0
    while quiet_turns < 3:  # each turn of the event loop also asks the operating system what has arrived
        await asyncio.sleep(0)
        quiet_turns = 0 if loop._ready else quiet_turns + 1  # type: ignore[attr-defined]
        if quiet_turns == 3 and (_draws(app) or await _ends_in_thread(loop)):
            quiet_turns = 0


def _draws(app: App[Any]) -> bool:
    """Does at once what Textual would do with the next frame, if there is anything."""
    if app._resize_timer is not None:
        app._check_resize()
        return True
    if not (app._screen_stack and app.screen._update_timer._active.is_set()):
        return False
    app.screen._on_timer_update()
    return True


async def _ends_in_thread(loop: AbstractEventLoop) -> bool:
    """Waits until one of the calls ends that the loop has given to threads, if there are any."""
    calls = _in_threads.get(loop)
    if not calls:
        return False
    ended, _ = await asyncio.wait(calls, timeout=MOST_S, return_when=asyncio.FIRST_COMPLETED)
    return bool(ended)


_stock_parse = Stylesheet._parse_rules
_parsed: dict[Any, list[RuleSet]] = {}


def parsed_once(sheet: Stylesheet, css: str, read_from: Any, *options: Any, **named: Any) -> list[RuleSet]:
    """Rules that one application has parsed are those of all, as long as its variables are theirs."""
    key = css, read_from, options, *named.items(), *sheet._variables.items()
    if key not in _parsed:
        _parsed[key] = _stock_parse(sheet, css, read_from, *options, **named)
    return _parsed[key]


_stock_apply = Stylesheet.apply
_found: dict[Any, Any] = {}  # the rules of nodes, by those of their application and their place in it
_numbers: dict[tuple[int, ...], int] = {}
_numbered: weakref.WeakKeyDictionary[Stylesheet, tuple[list[RuleSet], int]] = weakref.WeakKeyDictionary()


class FoundRules:
    """In the place of the dictionary by which `Stylesheet.apply` knows the rules of nodes that are alike: it finds what
    was found in any application. Textual's key is that of siblings. It begins with the parent, for which here stands
    all that a selector may ask of the parents; Textual does not look for rules that ask more."""

    def __init__(self, sheet: Stylesheet, node: DOMNode) -> None:
        self._of_sheet = _number(sheet)
        *parents, _ = node.css_path_nodes
        self._parents = tuple(
            (type(parent), parent.id, parent.classes, *parent._pseudo_classes_cache_key)
            if isinstance(parent, Widget)
            else (type(parent), parent.classes, *sorted(parent.get_pseudo_classes()))
            for parent in parents
        )

    def get(self, key: tuple[Any, ...]) -> Any:
        return _found.get((self._of_sheet, self._parents, *key[1:]))

    def __setitem__(self, key: tuple[Any, ...], rules: Any) -> None:
        _found[self._of_sheet, self._parents, *key[1:]] = rules


def _number(sheet: Stylesheet) -> int:
    """The same for applications of the same rules, which `_parsed` keeps."""
    of, number = _numbered.get(sheet, (None, 0))
    if of is not sheet.rules:
        number = _numbers.setdefault(tuple(map(id, sheet.rules)), len(_numbers))
        _numbered[sheet] = sheet.rules, number
    return number


def apply_found(sheet: Stylesheet, node: DOMNode, *, animate: bool = False, cache: Any = None) -> None:
    """Finding the rules of its hundred widgets takes a fifth of the time in which an application starts."""
    _stock_apply(sheet, node, animate=animate, cache=FoundRules(sheet, node))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pilot's keys and pauses end as soon as all that they caused is done. Screens are drawn when a test looks at
    them."""
    give_to_thread = BaseEventLoop.run_in_executor

    def run_in_executor(
        loop: BaseEventLoop, executor: Any, call: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        future = give_to_thread(loop, executor, call, *args)
        calls = _in_threads.setdefault(loop, set())
        calls.add(future)
        future.add_done_callback(calls.discard)
        return future

    shut_down = App._shutdown

    async def end_as_when_quitting(app: App[Any]) -> None:
        """First of all the application stops to take messages: timers, too, which would draw half of a screen."""
        if app._running and app._task is not None:
            app.exit()
            await app._task
        await shut_down(app)

    monkeypatch.setattr(App, "_shutdown", end_as_when_quitting)
    monkeypatch.setattr(PacedOutput, "writes_rows", True)
    display = PacedOutput._display

    def display_rows(app: PacedOutput, screen: Screen[object], rows: RenderableType | None) -> None:
        if app._has_writer():
            display(app, screen, rows)
        else:
            app.post_display_hook()

    monkeypatch.setattr(PacedOutput, "_display", display_rows)
    monkeypatch.setattr(Stylesheet, "_parse_rules", parsed_once)
    monkeypatch.setattr(Stylesheet, "apply", apply_found)
    monkeypatch.setattr(RuleSet, "__hash__", object.__hash__)  # by identity too, but not in Python
    monkeypatch.setattr(BaseEventLoop, "run_in_executor", run_in_executor)
    for module in ("textual.app", "textual.pilot"):
        monkeypatch.setattr(f"{module}.wait_for_idle", until_idle)
