"""The page of past chats: search, open, rename, delete."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence, Set
from datetime import datetime
from typing import Any

from textual.binding import Binding
from textual.content import Content

from app.chat.history import ChatSummary, History
from app.chat.history_database import HistoryError
from app.screens.pages.list_page import ListPage
from widgets.text import counted, one_line

PAGE = 50
"""How many chats are read from the history at once."""


class FoundChats(Sequence[ChatSummary]):
    """The chats that a search finds, but for those that are `deleted`. A chat is read when it is asked for, so that the
    number of chats costs nothing."""

    def __init__(self, history: History, query: str, deleted: Set[int]) -> None:
        self.ids = [id for id in history.chat_ids(query) if id not in deleted]
        self.open_elsewhere = history.open_elsewhere()
        self._history, self._query = history, query
        self._pages: dict[int, dict[int, ChatSummary]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: Any) -> Any:
        page, chat_id = row // PAGE, self.ids[row]
        if page not in self._pages:
            ids = self.ids[page * PAGE : (page + 1) * PAGE]
            try:
                self._pages[page] = {chat.id: chat for chat in self._history.summaries(ids, self._query)}
            except HistoryError:
                self._pages[page] = {}
        # Another process may have deleted it.
        gone = ChatSummary(chat_id, "this chat cannot be read", "", 0.0, 0, "", False)
        return self._pages[page].get(chat_id, gone)


class ChatsScreen(ListPage[ChatSummary, int | None]):
    """Dismissed with the id of the chat to open, or None. `deleted` are the ids of the chats deleted here."""

    FRAME_TITLE = "Past chats"
    KEYS = (
        "Enter opens · Esc closes · F2 renames · Delete deletes",
        "Enter opens · F2 renames · Delete deletes",
        "F2 renames · Delete deletes",
        "F2 renames Del",
    )
    PLACEHOLDER = "Search in all messages"
    EMPTY = "No chats yet."
    NOTHING_FOUND = "No message has these words."
    BINDINGS = [Binding("f2", "rename", "Rename", priority=True)]

    def __init__(
        self, history: History, current: int | None, *, search: str = "", delete: int | None = None
    ) -> None:
        """`current` is the id of the open chat (None: a new one). The page begins with a `search`, or asks whether to
        `delete` a chat."""
        super().__init__(search)
        self.history = history
        self._to_delete = delete
        self.current = current
        self.deleted: set[int] = set()

    def on_mount(self) -> None:
        if self._to_delete is not None:
            self.call_after_refresh(self._ask_to_delete, self._to_delete)

    def _ask_to_delete(self, chat_id: int) -> None:
        self.show_entries(chat_id)
        self.action_delete()

    def find(self, text: str) -> Sequence[ChatSummary]:
        try:
            self.found = FoundChats(self.history, text, self.deleted)
        except HistoryError as error:
            self.say(str(error))
            return ()
        return self.found

    def row_of(self, key: object) -> int | None:
        return self.found.ids.index(key) if isinstance(key, int) and key in self.found.ids else None

    def row_in_use(self) -> int:
        return 0

    def line(self, chat: ChatSummary) -> Content:
        """The title, the number of messages and the model; below, when it was, its state, and an excerpt."""
        facts = " · ".join(filter(None, (counted(chat.message_count, "message"), one_line(chat.model))))
        is_shared = chat.id in self.found.open_elsewhere
        here = "open now" if chat.id == self.current else "open elsewhere" if is_shared else ""
        states = ("interrupted" if chat.interrupted else "", here)
        time_and_state = " · ".join(filter(None, (time_label(chat.updated, time.time()), *states)))
        return Content.assemble(
            (one_line(chat.title), "bold"),
            (f"  {facts}", "$foreground 60%"),
            "\n",
            (f"{time_and_state}  {one_line(chat.excerpt)}", "$foreground 65%"),
        )

    def key(self, chat: ChatSummary) -> int:
        return chat.id

    def choose(self, chat: ChatSummary) -> None:
        if chat.message_count:
            self.dismiss(chat.id)
        else:
            self.say("This chat is not there any more")

    def action_rename(self) -> None:
        if (chat := self.highlighted) is not None:
            rename = lambda title: self.attempt(lambda: self.history.rename(chat.id, one_line(title)))
            question = "Enter renames, Esc leaves it; an empty title brings back the first prompt"
            self.ask_text("new title", question, one_line(chat.title), rename)

    def delete(self, chat: ChatSummary) -> None:
        question = f"Delete it for good? y deletes, any other key keeps it: “{one_line(chat.title)}”"
        self.ask(question, lambda: self._delete(chat))

    def _delete(self, chat: ChatSummary) -> None:
        parts = self.history.delete_in_parts(chat.id)

        def begin() -> None:
            next(parts, None)
            self.deleted.add(chat.id)

        if self.attempt(begin):
            self.app.run_worker(self._delete_rest(chat.id, parts))  # goes on when this page is closed

    async def _delete_rest(self, chat_id: int, parts: Iterator[None]) -> None:
        try:
            for _ in parts:
                await asyncio.sleep(0.01)  # for keys and the screen
        except asyncio.CancelledError:  # the program ends
            with contextlib.suppress(HistoryError):
                list(parts)
            raise
        except HistoryError as error:
            self.deleted.discard(chat_id)
            if self.is_attached:
                self.show_entries()
                self.say(str(error))


def time_label(seconds: float, now: float) -> str:
    """A time in the past, by how long ago it was: 14:05, Tue 14:05, 3 May, 3 May 2024. Seconds are since 1970."""
    then, today = datetime.fromtimestamp(seconds), datetime.fromtimestamp(now)
    days = (today.date() - then.date()).days
    if days <= 0:
        return f"{then:%H:%M}"
    if days < 7:
        return f"{then:%a %H:%M}"
    return f"{then.day} {then:%b}" if then.year == today.year else f"{then.day} {then:%b %Y}"
