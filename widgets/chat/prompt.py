"""The box for the prompt, of several lines."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from textual import _ansi_sequences, events
from textual.content import Content
from textual.message import Message

from widgets.chat.prompt_history import PromptHistory
from widgets.chat.suggestions import Suggestions
from widgets.chat.vi_keys import ViKeys
from widgets.terminal.ordered_input import OrderedTextArea
from widgets.terminal.pastes import MOST_PASTED
from widgets.text import clean, editable

NEWLINE_KEYS = frozenset({"shift+enter", "alt+enter", "ctrl+j", "ctrl+enter", "shift+\r"})


class _LegacyKey(StrEnum):
    ALT_ENTER = "alt+enter"


# Terminals without the Kitty protocol send Alt+Enter as ESC CR, which Textual reads as Enter.
_ansi_sequences.ANSI_SEQUENCES_KEYS["\x1b\r"] = (_LegacyKey.ALT_ENTER,)  # type: ignore[index]


class Prompt(OrderedTextArea):
    """Enter sends; Shift+Enter, Alt+Enter or Ctrl+J starts a new line. Up in the first line and Down in the last one
    go through the earlier prompts. While `suggestions` are listed, Up and Down choose one, and Tab or Enter takes it.
    `suggest` lists them for what stands before the cursor; `paste` is what a pasted text becomes; `vi` has the keys of
    vi, if the user wants them."""

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
        """The user sends `text`, which is not blank. Whoever gets it calls `Prompt.sent`, or `keep` if it cannot be
        sent. The box is empty meanwhile: what is typed there comes after it."""

        text: str

    class PasteAsked(Message):
        """The user pressed Ctrl+V, which terminals keep for what they paste themselves, or pass on."""

    class PasteTooLong(Message):
        """A pasted text of more than `MOST_PASTED` characters was left out."""

    class Left(Message):
        """The user pressed Ctrl+D in an empty box."""

    class NothingToUndo(Message):
        """The user pressed Ctrl+Z with nothing to undo."""

    def __init__(self, placeholder: str = "") -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
            tab_behavior="focus",
            placeholder=Content(placeholder),
        )
        self._history = PromptHistory()
        self._shown = ""
        self._submitted: deque[str] = deque()  # what is neither sent nor kept yet
        self.suggestions = Suggestions()
        self.suggest: Callable[[], None] = lambda: None
        self.paste: Callable[[str], str] = lambda text: text
        self.vi: ViKeys | None = None

    def remember(self, prompts: Iterable[str]) -> None:
        """Sets the earlier prompts, oldest first."""
        self._history = PromptHistory(map(clean, prompts), self.text)

    def sent(self, text: str) -> None:
        """Makes `text`, which was submitted, the last of the earlier prompts, and puts the draft back into the box."""
        if self._submitted:
            self._submitted.popleft()
        if draft := self._history.sent(text):
            self._show(draft + self.text)

    def keep(self) -> None:
        """Puts what was submitted back into the box, in lines before what was typed since."""
        self.load_text("\n".join(filter(None, [self._submitted.popleft(), self.text])))
        self.move_cursor(self.document.end)

    @property
    def draft(self) -> str:
        """All that was typed and is not sent."""
        return "\n".join(filter(None, [*self._submitted, self.text]))

    def put(self, text: str) -> None:
        """Puts `text` into the box. What it held becomes the last of the earlier prompts."""
        self._history.replace(self.text, text)
        self._show(text)

    @property
    def mode(self) -> str:
        """What letters do now, "" if they are typed."""
        return "vi: letters are commands, i inserts" if self.vi and not self.vi.is_inserting else ""

    @property
    def is_typed(self) -> bool:
        """Whether the user has changed the text since it was put here."""
        return self.text != self._shown

    def _show(self, text: str) -> None:
        self._shown = editable(text)
        self.load_text(text)
        self.move_cursor(self.document.end)

    def action_paste(self) -> None:
        self.post_message(self.PasteAsked())

    def paste_copied(self) -> None:
        """Pastes what was copied in this program."""
        super().action_paste()

    def action_undo(self) -> None:
        before = self.text
        super().action_undo()
        if self.text == before:
            self.post_message(self.NothingToUndo())

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

    @property
    def before_cursor(self) -> str:
        """The line of the cursor, up to it."""
        row, column = self.cursor_location
        return self.document[row][:column]

    async def _on_key(self, event: events.Key) -> None:
        if self._handle(event.key) or (self.vi and self.vi.handle(event.key, event.character)):
            event.stop()
            event.prevent_default()

    def _handle(self, key: str) -> bool:
        """Whether the key is one of this box alone."""
        if self.suggestions.before != self.before_cursor:  # letters came that the list does not know yet
            self.suggestions.close()
        if self.suggestions.is_open and key in ("up", "down", "escape"):
            self.suggestions.close() if key == "escape" else self.suggestions.move(-1 if key == "up" else 1)
        elif key == "tab" and self.text:  # letters typed after it belong to the prompt
            if not self.suggestions.is_open:
                self.suggest()
            self._take_suggestion()
        elif key in NEWLINE_KEYS:
            self.insert("\n")
        elif key == "enter":
            self._enter()
        elif key == "ctrl+d" and not self.text:
            self.post_message(self.Left())
        else:
            return False
        return True

    def _enter(self) -> None:
        """Takes the suggestion that is highlighted if more was suggested than is typed, and else sends the text."""
        chosen = self.suggestions.highlighted
        is_typed = chosen is None or self.before_cursor[self.suggestions.start :] == chosen.text
        if chosen is not None and not is_typed:
            self._take_suggestion()
        if (is_typed or (chosen is not None and chosen.ends)) and self.text.strip():
            self.suggestions.close()
            self._submitted.append(self.text)
            self._show("")
            self.post_message(self.Submitted(self._submitted[-1].strip("\n")))

    def _take_suggestion(self) -> None:
        chosen, (row, column) = self.suggestions.highlighted, self.cursor_location
        if chosen is not None:
            start = self.suggestions.start
            self.suggestions.close()
            goes_on = chosen.ends or chosen.text.endswith("/")
            self.replace(chosen.text + ("" if goes_on else " "), (row, start), (row, column))

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if len(event.text) > MOST_PASTED:
            self.post_message(self.PasteTooLong())
            return
        self.insert(self.paste(event.text))  # whose line ends must not send the prompt
        await asyncio.sleep(0)  # a long one comes in pieces: the screen goes on between them
