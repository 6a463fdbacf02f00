"""Where the user types: several lines, a history, and nothing typed is ever lost."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from textual import _ansi_sequences, events
from textual.content import Content
from textual.message import Message

from widgets.ordered_input import OrderedTextArea
from widgets.text import clean

NEWLINE_KEYS = frozenset({"shift+enter", "alt+enter", "ctrl+j", "ctrl+enter", "shift+\r"})


class _LegacyKey(StrEnum):
    """Keys of terminals without the Kitty protocol that Textual would take for another."""

    ALT_ENTER = "alt+enter"


# Such terminals send Alt+Enter as ESC CR, which Textual reads as Enter: a half-written prompt would be sent.
_ansi_sequences.ANSI_SEQUENCES_KEYS["\x1b\r"] = (_LegacyKey.ALT_ENTER,)  # type: ignore[index]


class Prompt(OrderedTextArea):
    """Enter sends, Shift+Enter, Alt+Enter or Ctrl+J starts a new line, Up and Down at the first and last line
    walk through earlier prompts. What was edited on that walk, the draft too, is there again on the way back.
    """

    DEFAULT_CSS = """
    Prompt {
        height: auto;
        min-height: 3;
        max-height: 12;
        padding: 0 1;
        border: round $foreground 25%;
        background: $background;
        border-title-color: $text-muted;
        scrollbar-size-vertical: 1;
        &:focus { border: round $primary 60%; background: $background; background-tint: $background 0%; }
        & .text-area--placeholder { color: $foreground 65%; }
        &.-editing, &.-editing:focus { border: round $warning; border-title-color: $text-warning; }
    }
    """

    class Submitted(Message):
        """The user sends `text`, which is not blank. The box is still full: `Prompt.sent()` empties it."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, placeholder: str = "") -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            tab_behavior="focus",
            placeholder=Content(placeholder),
        )
        self._sent: list[str] = []
        self._pages = [""]  # what was sent, as edited on this walk, and the draft at the end
        self._page = 0

    # --- earlier prompts --------------------------------------------------------------------------------

    def remember(self, prompts: Iterable[str]) -> None:
        """Makes `prompts` (oldest first) the earlier ones that Up brings back."""
        self._sent = [clean(prompt) for prompt in prompts]
        self._new_walk(self.text)

    def sent(self, text: str) -> None:
        """Empties the box: `text` is on its way, and the last of the earlier prompts from now on. A draft
        that was left on the way to it is back in the box."""
        draft = "" if self._page == len(self._pages) - 1 else self._pages[-1]
        self._sent = [prompt for prompt in [*self._sent, *self._edited()] if prompt != text] + [text]
        self._load(draft)
        self._new_walk(draft)

    def put(self, text: str) -> None:
        """Puts `text` into the box. What was there is kept as the last of the earlier prompts: Up has it."""
        self._pages[self._page] = self.text
        displaced = [draft for draft in (self._pages[-1], self.text) if draft.strip() and draft != text]
        self._sent += [
            *self._edited(),
            *dict.fromkeys(draft for draft in displaced if draft not in self._sent),
        ]
        self._load(text)
        self._new_walk(text)

    def _edited(self) -> list[str]:
        """What was edited on this walk, but for the draft and what is in the box."""
        pages = (page for number, page in enumerate(self._pages[:-1]) if number != self._page)
        return [page for page in pages if page not in self._sent and page.strip()]

    def _new_walk(self, draft: str) -> None:
        self._pages = [*self._sent, draft]
        self._page = len(self._sent)

    def _turn_page(self, step: int) -> None:
        if not 0 <= self._page + step < len(self._pages):
            return
        self._pages[self._page] = self.text
        self._page += step
        self._load(self._pages[self._page])
        if step < 0:  # stay on the first line, so that the next Up goes on
            self.move_cursor((0, len(self.document[0])))

    def _load(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and self._cursor_row() == 0:
            self._turn_page(-1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self._cursor_row() == self.wrapped_document.height - 1:
            self._turn_page(+1)
        else:
            super().action_cursor_down(select)

    def _cursor_row(self) -> int:
        """The row of the cursor as seen, long lines wrapped."""
        return self.wrapped_document.location_to_offset(self.cursor_location).y

    def on_resize(self) -> None:
        """Its height follows from the width, by which its lines are wrapped; the cursor stays in sight."""
        self.call_after_refresh(self.refresh, layout=True)
        self.call_after_refresh(self.scroll_cursor_visible)

    # --- keys -------------------------------------------------------------------------------------------

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            if self.text.strip():
                self.post_message(self.Submitted(self.text.strip("\n")))
        elif event.key in NEWLINE_KEYS:
            event.stop()
            event.prevent_default()
            self.insert("\n")

    async def _on_paste(self, event: events.Paste) -> None:
        # Terminals paste line ends as CR. A pasted line end never sends.
        event.stop()
        event.prevent_default()
        self.insert(clean(event.text.replace("\r\n", "\n").replace("\r", "\n")))
