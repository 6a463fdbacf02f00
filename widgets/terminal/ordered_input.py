"""Input fields that show no terminal controls, and handle keys in the order in which they were pressed. Pastes come
whole (`pastes`).

Textual shows the text of a field as it is. Here all text is cleaned on its way in, whether it is loaded, typed, pasted
or inserted.

Textual lets the application run the bindings of a widget after the widget has inserted the characters of the same
batch. If several keys arrive at once (a fast typist, a slow line, a busy machine), `a b Backspace c` would give `ab`
in place of `ac`.
"""

from collections.abc import Callable

from rich.text import Text
from textual.binding import Binding
from textual.drivers import linux_driver
from textual.events import Key
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, TextArea
from textual.widgets.text_area import Edit, EditResult

from widgets.late_components import LateComponents
from widgets.terminal.long_lines import line_of
from widgets.terminal.pastes import PasteParser, lenient_decoder
from widgets.text import editable

_JOINERS = {"\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))}
"""Characters without a width that join others, in emoji, flags and Persian words: Textual takes them for no text."""

linux_driver.XTermParser = PasteParser  # type: ignore[attr-defined]
linux_driver.getincrementaldecoder = lenient_decoder  # type: ignore[attr-defined, assignment]


class OrderedInput(LateComponents, Input):
    def validate_value(self, value: str) -> str:
        return editable(value).replace("\n", " ")

    async def _on_key(self, event: Key) -> None:
        await _handle(self, event, self.insert_text_at_cursor)


class OrderedTextArea(LateComponents, TextArea):
    BINDINGS = [
        Binding("ctrl+home", "cursor_document(0)", show=False),
        Binding("ctrl+end", "cursor_document(1)", show=False),
    ]

    _is_styled = False

    def render_lines(self, crop: Region) -> list[Strip]:
        """Textual asks for all styles of a text area with each of its frames."""
        if self._is_styled:
            return super(TextArea, self).render_lines(crop)
        self._is_styled = True
        return super().render_lines(crop)

    def notify_style_update(self) -> None:
        self._is_styled = False
        super().notify_style_update()

    def _set_theme(self, theme: str) -> None:
        self._is_styled = False
        super()._set_theme(theme)

    def get_line(self, line_index: int) -> Text:
        return line_of(self.document.get_line(line_index))

    def action_cursor_document(self, end: int) -> None:
        """Moves the cursor to the start of the text, or to its end."""
        self.move_cursor(self.document.end if end else (0, 0))

    def render_line(self, y: int) -> Strip:
        """Nothing in a field without columns, in a terminal of two: Textual cannot wrap a placeholder there."""
        return super().render_line(y) if self.content_size.width else Strip.blank(0)

    def _set_document(self, text: str, language: str | None) -> None:
        super()._set_document(editable(text), language)

    def edit(self, edit: Edit) -> EditResult:
        edit.text = editable(edit.text)
        return super().edit(edit)

    async def _on_key(self, event: Key) -> None:
        await _handle(self, event, lambda text: self._replace_via_keyboard(text, *self.selection))


async def _handle(widget: Widget, event: Key, insert: Callable[[str], object]) -> None:
    """Runs the action that `widget` binds to the key at once, and inserts a joiner. Textual handles all other keys."""
    if event.character in _JOINERS:
        insert(event.character)
    for binding in widget._bindings.key_to_bindings.get(event.key, ()):
        if await widget.app.run_action(binding.action, widget):
            event.stop()
            event.prevent_default()
            return
    if event.key.startswith("alt+"):  # terminals send its letter too, which is no text
        event.prevent_default()
