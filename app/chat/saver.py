"""Writes conversations to the history: soon after they have grown, and again after a failure."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from app.chat.conversation import Conversation
from app.chat.history import History
from app.chat.history_database import HistoryError
from app.chat.status import StatusObserver
from app.chat.view import View

SAVE_S = 0.1
"""A reply is in the history so soon after it has grown."""
RETRY_S = 3.0
"""A full disk may have room so soon after a failure. Another program's lock stops everything for 2 s each time."""


class Shown(Protocol):
    """A session, of which the conversation that is open is saved under the name of the model that answers."""

    conversation: Conversation
    status: StatusObserver


class Saver:
    """Saves the conversation that is open, and those that were left before the disk had room for them."""

    def __init__(self, history: History, view: View, session: Shown) -> None:
        """`view` hears of a failure, and when it is over."""
        self._history, self._view, self._session = history, view, session
        self._left: list[Conversation] = []
        self._timer: asyncio.TimerHandle | None = None

    def unsaved(self, chat_id: int | None) -> Conversation | None:
        """The conversation of a past chat that was left with text that the history lacks."""
        return next((chat for chat in self._left if chat_id is not None and chat.chat_id == chat_id), None)

    def leave(self, conversation: Conversation, opened: Conversation) -> None:
        """Keeps a conversation that is left if the history lacks some of it. `opened` takes its place."""
        conversation.leave()
        left = [*self._left, conversation] if conversation.problem else self._left
        self._left = [chat for chat in left if chat is not opened]

    def now(self) -> None:
        model, problem = self._session.status.snapshot().ready.model.title, None
        if self._history.problem is not None:
            self._leave_memory()
        for chat in (*self._left, self._session.conversation):
            chat.save(model)
            problem = chat.problem or problem
        self._left = [chat for chat in self._left if chat.problem]
        problem = self._history.problem or problem
        self._view.problem_changed(problem)
        if problem is not None:
            self._later(RETRY_S)

    def _leave_memory(self) -> None:
        """Where the history's file could not be opened and can be now, what was said meanwhile goes there."""
        unsaved = [*self._left, self._session.conversation]
        known = {chat.chat_id for chat in unsaved}
        in_memory = [id for id in reversed(self._history.chat_ids()) if id not in known]
        chats = [*(Conversation(self._history, "", chat_id) for chat_id in in_memory), *unsaved]
        ids = [chat.chat_id or 0 for chat in chats]
        given = [(self._history.model(id), self._history.given_title(id)) for id in ids]
        if self._history.open_again():
            for chat, (model, title) in zip(chats, given, strict=True):
                chat.begin_anew()
                if model:  # of those that were in memory: the one that each began with
                    chat.save(model)
                if title and chat.chat_id:
                    with suppress(HistoryError):  # then it is only called by its first prompt
                        self._history.rename(chat.chat_id, title)
            self._left = chats[:-1]

    def soon(self) -> None:
        """After a failure this is with the next try. Where the program is late, what is due comes before more text is
        shown."""
        if self._timer and asyncio.get_running_loop().time() >= self._timer.when():
            self._timer.cancel()
            self._due()
        self._later(SAVE_S)

    def _later(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = None
        self.now()
