"""Input fields that handle keys in the order in which they were pressed.

Textual lets the application run the bindings of a widget after the widget has inserted the characters of the same
batch. If several keys arrive at once (a fast typist, a slow line, a busy machine), `a b Backspace c` would give `ab`
in place of `ac`.
"""

from __future__ import annotations

from textual.events import Key
from textual.widget import Widget
from textual.widgets import Input, TextArea


class OrderedInput(Input):
    async def _on_key(self, event: Key) -> None:
        await _run_binding(self, event)


class OrderedTextArea(TextArea):
    async def _on_key(self, event: Key) -> None:
        await _run_binding(self, event)


async def _run_binding(widget: Widget, event: Key) -> None:
    """Runs the action that `widget` binds to the key at once. Textual handles a key without a binding."""
    for binding in widget._bindings.key_to_bindings.get(event.key, ()):
        if await widget.app.run_action(binding.action, widget):
            event.stop()
            event.prevent_default()
            return
