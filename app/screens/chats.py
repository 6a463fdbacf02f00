"""The past chats: search, open, rename, delete. One screen, no pop-ups: questions appear in its last line."""

from __future__ import annotations

import time
from datetime import datetime

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from app.chat.history import ChatSummary, History, HistoryError
from app.screens.page import Frame, Page
from widgets.ordered_input import OrderedInput
from widgets.text import one_line

KEYS = "Enter opens · Esc closes · F2 renames · Delete deletes"


def when(seconds: float, now: float) -> str:
    """A moment as one remembers it: 14:05, Tue 14:05, 3 May, 3 May 2024."""
    then, today = datetime.fromtimestamp(seconds), datetime.fromtimestamp(now)
    days = (today.date() - then.date()).days
    if days <= 0:
        return f"{then:%H:%M}"
    if days < 7:
        return f"{then:%a %H:%M}"
    return f"{then.day} {then:%b}" if then.year == today.year else f"{then.day} {then:%b %Y}"


def chat_line(chat: ChatSummary, now: float, is_current: bool) -> Content:
    """Two lines of the list, of which narrow screens cut the ends: the title with how long the chat is and who
    answered, then when it was, what is to be known of it, and an excerpt."""
    count = f"{chat.message_count} message{'' if chat.message_count == 1 else 's'}"
    facts = " · ".join(fact for fact in (count, one_line(chat.model)) if fact)
    marks = ("interrupted" if chat.interrupted else "", "open now" if is_current else "")
    known = " · ".join(mark for mark in (when(chat.updated, now), *marks) if mark)
    return Content.assemble(
        (one_line(chat.title), "bold"),
        (f"  {facts}", "$foreground 60%"),
        "\n",
        (f"{known}  {one_line(chat.excerpt)}", "$foreground 65%"),
    )


class ChatsScreen(Page[int | None]):
    """Dismissed with the id of the chat to open, or None."""

    DEFAULT_CSS = """
    ChatsScreen #question { height: auto; max-height: 3; display: none; color: $text-warning; padding: 0 1; }
    ChatsScreen #question.-asked { display: block; }
    """
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("escape", "back", "Close", priority=True),
        Binding("up", "move(-1)", priority=True),
        Binding("down", "move(1)", priority=True),
        Binding("pageup", "move(-8)", priority=True),
        Binding("pagedown", "move(8)", priority=True),
        Binding("f2", "rename", "Rename", priority=True),
        Binding("delete,ctrl+d", "ask_delete", "Delete", priority=True),
    ]

    def __init__(self, history: History, current: int | None) -> None:
        super().__init__()
        self.history = history
        self.current = current
        self.deleted: set[int] = set()
        self._chats: list[ChatSummary] = []
        self._query = ""
        self._renaming: ChatSummary | None = None
        self._deleting: ChatSummary | None = None

    def compose(self) -> ComposeResult:
        with Frame("Past chats", KEYS):
            yield OrderedInput(placeholder="Search in all messages", select_on_focus=False)
            yield OptionList(markup=False)
            yield Static(id="question", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
        self.query_one(Input).focus()
        self._list()

    # --- the list ---------------------------------------------------------------------------------------

    def _list(self, keep: int = 0) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        try:
            self._chats = self.history.chats(limit=200, query=self._query)
        except HistoryError as error:
            self._chats = []
            self._say(str(error))
        now = time.time()
        options.add_options([Option(chat_line(chat, now, chat.id == self.current)) for chat in self._chats])
        if self._chats:
            options.highlighted = min(keep, len(self._chats) - 1)
        else:
            nothing = "No message has these words." if self._query.strip() else "No chats yet."
            options.add_option(Option(nothing, disabled=True))

    @property
    def _chosen(self) -> ChatSummary | None:
        index = self.query_one(OptionList).highlighted
        return self._chats[index] if index is not None and index < len(self._chats) else None

    @on(Input.Changed)
    def search(self, event: Input.Changed) -> None:
        if self._renaming is None:
            self._query = event.value
            self._list()

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        if self._chats and self._renaming is None:
            options.highlighted = max(0, min(len(self._chats) - 1, (options.highlighted or 0) + step))

    @on(OptionList.OptionSelected)
    def open_clicked(self, event: OptionList.OptionSelected) -> None:
        if event.option_index < len(self._chats):
            self.dismiss(self._chats[event.option_index].id)

    @on(Input.Submitted)
    def enter(self, event: Input.Submitted) -> None:
        if self._renaming is not None:
            self._rename(self._renaming, event.value)
        elif chosen := self._chosen:
            self.dismiss(chosen.id)

    def action_back(self) -> None:
        if self._renaming is not None:
            self._end_rename()
        else:
            self.dismiss(None)

    # --- rename and delete ------------------------------------------------------------------------------

    def action_rename(self) -> None:
        if (chosen := self._chosen) and self._renaming is None:
            self._renaming = chosen
            field = self.query_one(Input)
            field.value = one_line(chosen.title)
            field.cursor_position = len(field.value)
            self._say("New title: Enter renames, Esc leaves it; an empty one brings back the first prompt")

    def _rename(self, chat: ChatSummary, title: str) -> None:
        problem = ""
        try:
            self.history.rename(chat.id, one_line(title))
        except HistoryError as error:
            problem = str(error)
        self._end_rename()
        self._say(problem)

    def _end_rename(self) -> None:
        self._say("")
        field = self.query_one(Input)
        keep = self.query_one(OptionList).highlighted or 0
        with self.prevent(Input.Changed):
            field.value = self._query
        self._renaming = None
        self._list(keep)

    def action_ask_delete(self) -> None:
        if (chosen := self._chosen) and self._renaming is None:
            self._deleting = chosen
            self.query_one(Input).disabled = True  # the answer is not a search
            self._say(f"Delete it for good? y deletes, any other key keeps it: “{one_line(chosen.title)}”")

    def on_key(self, event: events.Key) -> None:
        if self._deleting is not None:
            event.stop()
            self._answer_delete(self._deleting, event.key == "y")

    def _answer_delete(self, chat: ChatSummary, yes: bool) -> None:
        self._deleting = None
        problem = ""
        if yes:
            try:
                self.history.delete(chat.id)
                self.deleted.add(chat.id)
            except HistoryError as error:
                problem = str(error)
        self._list(self.query_one(OptionList).highlighted or 0)
        self._say(problem)
        field = self.query_one(Input)
        field.disabled = False
        field.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self._deleting is None  # while it is asked, every key is an answer

    def _say(self, text: str) -> None:
        line = self.query_one("#question", Static)
        line.update(Content(text))
        line.set_class(bool(text), "-asked")
