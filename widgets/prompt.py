"""The box for the prompt, of several lines."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from textual import _ansi_sequences, events
from textual.content import Content
from textual.message import Message

from widgets.ordered_input import OrderedTextArea
from widgets.prompt_history import PromptHistory
from widgets.text import clean

NEWLINE_KEYS = frozenset({"shift+enter", "alt+enter", "ctrl+j", "ctrl+enter", "shift+\r"})


class _LegacyKey(StrEnum):
    ALT_ENTER = "alt+enter"


# Terminals without the Kitty protocol send Alt+Enter as ESC CR, which Textual reads as Enter.
_ansi_sequences.ANSI_SEQUENCES_KEYS["\x1b\r"] = (_LegacyKey.ALT_ENTER,)  # type: ignore[index]


class Prompt(OrderedTextArea):
    """Enter sends; Shift+Enter, Alt+Enter or Ctrl+J starts a new line. Up in the first line and Down in the last one
    go through the earlier prompts."""

    DEFAULT_CSS = """
    Prompt {
        height: auto;
        min-height: 3;
        max-height: 12;
        padding: 0 1;
        border: round $foreground 25%;
        background: $background;
        border-title-color: $text-muted; border-subtitle-color: $text-muted;
        scrollbar-size-vertical: 1;
        &:focus { border: round $primary 60%; background: $background; background-tint: $background 0%; }
        & .text-area--placeholder { color: $foreground 65%; }
        &.-editing, &.-editing:focus { border: round $warning; border-title-color: $text-warning; }
    }
    """

    @dataclass
    class Submitted(Message):
        """The user sends `text`, which is not blank. It stays in the box until `Prompt.sent`."""

        text: str

    def __init__(self, placeholder: str = "") -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            tab_behavior="focus",
            placeholder=Content(placeholder),
        )
        self._history = PromptHistory()

    def remember(self, prompts: Iterable[str]) -> None:
        """Sets the earlier prompts, oldest first."""
        self._history = PromptHistory(map(clean, prompts), self.text)

    def sent(self, text: str) -> None:
        """Makes `text` the last of the earlier prompts, and empties the box or puts the draft back into it."""
        self._show(self._history.sent(text))

    def put(self, text: str) -> None:
        """Puts `text` into the box. What it held becomes the last of the earlier prompts."""
        self._history.replace(self.text, text)
        self._show(text)

    def _show(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)

    def action_cursor_up(self, select: bool = False) -> None:
        if select or self._cursor_row() > 0:
            super().action_cursor_up(select)
        elif (text := self._history.step(self.text, -1)) is not None:
            self._show(text)
            self.move_cursor((0, len(self.document[0])))  # so that the next Up goes on

    def action_cursor_down(self, select: bool = False) -> None:
        if select or self._cursor_row() < self.wrapped_document.height - 1:
            super().action_cursor_down(select)
        elif (text := self._history.step(self.text, 1)) is not None:
            self._show(text)

    def _cursor_row(self) -> int:
        """The row of the cursor on the screen, where long lines are wrapped."""
        return self.wrapped_document.location_to_offset(self.cursor_location).y

    def on_resize(self) -> None:
        """Another width wraps the lines anew, which changes the height and the row of the cursor."""
        self.call_after_refresh(self.refresh, layout=True)
        self.call_after_refresh(self.scroll_cursor_visible)

    async def _on_key(self, event: events.Key) -> None:
        if event.key != "enter" and event.key not in NEWLINE_KEYS:
            return
        event.stop()
        event.prevent_default()
        if event.key in NEWLINE_KEYS:
            self.insert("\n")
        elif self.text.strip():
            self.post_message(self.Submitted(self.text.strip("\n")))

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self.insert(event.text)  # whose line ends must not send the prompt
