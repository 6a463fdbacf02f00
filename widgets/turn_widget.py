"""How one turn looks. A view follows its turn: `sync` shows what has been added since."""

from __future__ import annotations

import asyncio
import re

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static

from widgets.reply_markdown import ReplyMarkdown
from widgets.text import as_duration, clean, one_line
from widgets.turn import WARNING, Turn

_UNDECIDED = re.compile(r"(?:^|\n)[ \t]*(?:\d{1,9}[.)]?|[-+*_=#>|`~]+)[ \t]*\Z")


def decided(text: str) -> int:
    """How much of a stream's text so far can be drawn: not a last line of which it is open what it begins.

    Textual does not return to blocks that have ended: a `3` drawn before its `. third point` arrives would be
    a paragraph, and the list torn in two.
    """
    match = _UNDECIDED.search(text, max(0, text.rfind("\n", 0, -1) if text else 0))
    return match.start() if match else len(text)


class ThinkingHeader(Static):
    """The one line that thinking folds to. A click unfolds it."""

    DEFAULT_CSS = """
    ThinkingHeader { width: auto; color: $text-muted; pointer: pointer; }
    ThinkingHeader:hover { color: $text; }
    """
    ALLOW_SELECT = False


class ThinkingWidget(Vertical):
    """What the model thought: one line with its duration, and the text under it where unfolded."""

    DEFAULT_CSS = """
    ThinkingWidget { height: auto; padding: 0 1 0 2; margin-bottom: 1; }
    ThinkingWidget > #thought {
        display: none; color: $text-muted; border-left: inner $foreground 20%; padding-left: 1;
    }
    ThinkingWidget.-unfolded > #thought { display: block; }
    """

    unfolded = reactive(False)

    def __init__(self, turn: Turn, unfolded: bool) -> None:
        super().__init__()
        self.turn = turn
        self._shown = 0
        self.set_reactive(ThinkingWidget.unfolded, unfolded)

    def compose(self) -> ComposeResult:
        yield ThinkingHeader(markup=False)
        yield Static(id="thought", markup=False)

    def on_mount(self) -> None:
        self.watch_unfolded()

    def on_click(self) -> None:
        if self.screen.get_selected_text() is None:
            self.unfolded = not self.unfolded

    def watch_unfolded(self) -> None:
        self.set_class(self.unfolded, "-unfolded")
        self.sync()

    def sync(self) -> None:
        turn = self.turn
        if turn.streaming and not turn.content:
            label = "Thinking…"
        else:
            label = "Thought" if turn.thinking_s is None else "Thought for"
        duration = "" if turn.thinking_s is None else f" {as_duration(turn.thinking_s)}"
        words = len(turn.thinking.split())
        header = f"{'▾' if self.unfolded else '▸'} {label}{duration} · {words:,} words"
        self.query_one(ThinkingHeader).update(Content(header))
        if self.unfolded and self._shown != len(turn.thinking):
            self._shown = len(turn.thinking)
            self.query_one("#thought", Static).update(Content(clean(turn.thinking).strip()))


class TurnWidget(Vertical):
    """A turn, with the line about it that `Turn.note` may hold."""

    DEFAULT_CSS = """
    TurnWidget { height: auto; }  /* each part ends with a blank line: :last-child would restyle all siblings */
    TurnWidget > .note { color: $text-muted; padding: 0 1 0 2; margin-bottom: 1; }
    TurnWidget > .note.-warning { color: $text-warning; }
    TurnWidget > .note.-empty { display: none; }
    TurnWidget.-user > .prompt {
        padding: 0 1; margin-bottom: 1; background: $boost; border-left: outer $primary;
    }
    """

    class LinkClicked(Message):
        """The user clicked a link in a reply; `address` is cleaned, and nothing has been done about it."""

        def __init__(self, address: str) -> None:
            super().__init__()
            self.address = address

    def __init__(self, turn: Turn, unfolded: bool = False) -> None:
        super().__init__(classes=f"-{turn.role}")
        self.turn = turn
        self._unfolded = unfolded
        self._shown = 0
        self._lock = asyncio.Lock()  # Markdown.append must have ended before it is called again

    def compose(self) -> ComposeResult:
        if self.turn.role == "user":
            yield Static(Content(clean(self.turn.content)), classes="prompt")
        else:
            if self.turn.thinking.strip():
                yield ThinkingWidget(self.turn, self._unfolded)
            yield ReplyMarkdown()
        yield Static(markup=False, classes="note")

    async def on_mount(self) -> None:
        await self._sync()

    async def sync(self) -> None:
        """Shows what the turn has gained: text can only have been added to it."""
        if self.is_mounted:  # else it will show everything when it is
            async with self._lock:
                await self._sync()

    async def _sync(self) -> None:
        turn = self.turn
        if turn.role == "assistant":
            if thinking := self.query(ThinkingWidget):
                thinking.first().sync()
            elif turn.thinking.strip():
                await self.mount(ThinkingWidget(turn, self._unfolded), before=0)
            end = decided(turn.content) if turn.streaming else len(turn.content)
            if added := turn.content[self._shown : end]:
                self._shown = end
                await self.query_one(ReplyMarkdown).append(clean(added))
        self._show_note()

    def set_unfolded(self, unfolded: bool) -> None:
        self._unfolded = unfolded
        for thinking in self.query(ThinkingWidget):
            thinking.unfolded = unfolded

    def _show_note(self) -> None:
        note = self.query_one(".note", Static)
        note.set_class(not self.turn.note, "-empty")
        note.set_class(self.turn.note.startswith(WARNING), "-warning")
        note.update(Content(one_line(self.turn.note)))

    def on_markdown_link_clicked(self, event: ReplyMarkdown.LinkClicked) -> None:
        event.stop()
        self.post_message(self.LinkClicked(one_line(event.href)))
