"""Keys reach what has the focus when the key before them has done its work.

Textual passes a key to the widget that has the focus at that moment. What the key does comes later: it goes up from
widget to widget, an action opens a page, and the page's field has the focus once it is mounted. If several keys arrive
at once (a fast typist, a slow line, a paste), those after the first went to the widget below: letters after Ctrl+O came
into the prompt, and the next Enter sent them.

So after each key that is no text of a field, a message follows it through the widgets, and what arrives meanwhile
waits until the message has come back. It goes again where a page or the focus changed. Keys that come before the first
page is there wait in the same way: they were lost.
"""

import asyncio
from collections import deque

from textual import on
from textual.app import App
from textual.dom import DOMNode
from textual.events import Event, Key, Paste
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input, TextArea

ROUNDS = 3
"""A key of a field becomes a message of it, and that one of the column around it: each may queue behind a follower."""
MOST_WAIT_S, PARTS = 1.0, 10
"""Keys wait no longer, for a widget that is busy. It is measured in parts: a time in which the application itself did
nothing, such as the import of a page, counts as one of them."""


class _Follower(Message):
    """Goes the way of a key, from `target` up to the application, and so many `rounds` more."""

    def __init__(self, target: DOMNode, rounds: int) -> None:
        super().__init__()
        self.target, self.rounds = target, rounds


class KeyOrder(App[None]):
    """A part of an application."""

    _holds_keys = True  # until the last key has done its work; at first, until there is a page
    _follower: _Follower | None = None
    _overdue: asyncio.TimerHandle | None = None

    def __init__(self) -> None:
        super().__init__()
        self._held: deque[Key | Paste] = deque()

    async def on_mount(self) -> None:
        self._start_waiting()
        # A page that closes takes a follower with it.
        self.screen_change_signal.subscribe(self, self._page_changed, immediate=True)

    async def on_event(self, event: Event) -> None:
        if not isinstance(event, Key | Paste) or event.is_forwarded:
            await super().on_event(event)
        elif self._holds_keys:
            self._held.append(event)
        else:
            await self._pass_on(event)

    async def _pass_on(self, event: Key | Paste) -> None:
        is_field = isinstance(self.focused, Input | TextArea)
        await super().on_event(event)
        if not (is_field and _is_text(event)):
            self._start_waiting()

    def _start_waiting(self) -> None:
        self._holds_keys = True
        self._follow(ROUNDS)
        self._wait(PARTS)

    def _wait(self, parts: int) -> None:
        if parts:
            loop = asyncio.get_running_loop()
            self._overdue = loop.call_later(MOST_WAIT_S / PARTS, self._wait, parts - 1)
        else:
            self.call_later(self._release)

    def _follow(self, rounds: int) -> None:
        target = self.focused or self.screen
        self._follower = _Follower(target, rounds - 1)
        target.post_message(self._follower)

    def _page_changed(self, _: Screen[object]) -> None:
        if self._holds_keys:
            self._follow(ROUNDS)

    @on(_Follower)
    async def _followed(self, message: _Follower) -> None:
        await asyncio.sleep(0)  # a worker that the key has started opens its page now
        if message is not self._follower or not self._holds_keys:
            return
        if message.target is not (self.focused or self.screen):
            self._follow(ROUNDS)
        elif message.rounds:
            self._follow(message.rounds)
        else:
            await self._release()

    async def _release(self) -> None:
        """Passes on what has waited, up to the next key that others wait for."""
        if self._overdue is not None:
            self._overdue.cancel()
        self._holds_keys = False
        while self._held and not self._holds_keys:
            await self._pass_on(self._held.popleft())


def _is_text(event: Key | Paste) -> bool:
    return isinstance(event, Paste) or (event.is_printable and "+" not in event.key)
