"""What one run leaves to the next: the draft in the prompt, and a chat that was interrupted."""

import contextlib

from app.chat.history import History
from app.chat.history_database import HistoryError
from app.screens.engine_actions import EngineActions

DRAFT_S = 1.0
"""A crash loses at most this much of what is being typed."""


class Resuming(EngineActions):
    """A part of `ChatApp`."""

    history: History
    _resumable: int | None = None  # the chat that Ctrl+G opens while this one is empty
    _save_draft_at, _saved_draft = 0.0, ""

    def read_history(self, draft: str, offer: bool) -> None:
        """Takes earlier prompts and the draft of a crashed chat from the history, and puts `draft` into the prompt.
        With `offer`, says which chat was interrupted."""
        column, history = self.column, self.history
        try:
            column.prompt.remember(history.prompts())
            kept = history.take_draft()
            column.prompt.put(kept)
            if draft:
                column.prompt.put(draft)  # Up brings the other one back
            elif kept:
                column.notice("This draft is from the last time · Ctrl+C clears it", seconds=30)
            recent = history.chats(limit=1)
            if recent and recent[0].interrupted and offer:
                self._resumable = recent[0].id
                column.notice(
                    f"The reply in “{recent[0].title}” was interrupted · Ctrl+G opens it", seconds=60
                )
            elif (left := history.take_left_open()) is not None and offer:
                self._resumable = left
                title = history.title(left)
                column.notice(f"orin-chat ended in the middle of “{title}” · Ctrl+G opens it", seconds=60)
            column.problem_changed(history.problem)
        except HistoryError as error:
            column.problem_changed(error)

    def save_draft(self) -> None:
        prompt = self.column.prompt
        draft = "\n".join(text for text in (self.session.queued, prompt.draft) if text.strip())
        if draft != self._saved_draft:
            self._saved_draft = draft
            with contextlib.suppress(HistoryError):  # saving the conversation reports the problem
                self.history.save_draft(draft)

    def save_draft_if_due(self, now: float) -> None:
        """`now` in seconds."""
        if now >= self._save_draft_at:
            self._save_draft_at = now + DRAFT_S
            self.save_draft()

    async def resume(self) -> bool:
        """Opens the chat that was offered. Returns whether there was one."""
        chat_id, self._resumable = self._resumable, None
        if chat_id is not None:
            await self.session.open(chat_id)
        return chat_id is not None
