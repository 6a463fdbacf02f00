"""Boxes of text that do what keys say in the order in which they were pressed.

What a key is bound to Textual leaves to the application, and so to after the characters that came with it: where
several keys arrive at once (a fast typist, a slow line, a busy machine), `a b Backspace c` would be `ab`, not `ac`.
"""

from __future__ import annotations

from textual.events import Key
from textual.widget import Widget
from textual.widgets import Input, TextArea


class OrderedInput(Input):
    """A line to type into."""

    async def _on_key(self, event: Key) -> None:
        await _act(self, event)


class OrderedTextArea(TextArea):
    """A text to edit."""

    async def _on_key(self, event: Key) -> None:
        await _act(self, event)


async def _act(box: Widget, event: Key) -> None:
    """Does what `event` is bound to in `box`. Where that is nothing, Textual goes on with it."""
    for binding in box._bindings.key_to_bindings.get(event.key, ()):
        if await box.app.run_action(binding.action, box):
            event.stop()
            event.prevent_default()
            return
