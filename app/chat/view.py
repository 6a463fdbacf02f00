"""What a session tells those who show it."""

from typing import Literal

from app.chat.history_database import HistoryError
from widgets.chat.turn import Call, Turn

Permission = Literal["once", "chat", "always", "no"]
"""Whether a call may run: this one; all of its tool in this chat; in every chat; or not."""


class View:
    """Shows a session. It is not told when `Session.reply` grows or `Session.status` changes: it reads them when it
    draws. What a view does not override, it does not show."""

    async def added(self, turn: Turn) -> None:
        """`turn` has become the last turn of the conversation."""

    async def changed(self, turn: Turn) -> None:
        """The note of `turn` has changed, or its text is complete."""

    async def cut(self, index: int) -> None:
        """The turns from `index` on were removed."""

    async def opened(self) -> None:
        """Another conversation was opened."""

    def queue_changed(self) -> None:
        """`Session.queued` has changed."""

    def give_back(self, text: str) -> None:
        """A prompt was not sent. The user may edit it again."""

    def notice(self, text: str, *, warning: bool = False) -> None:
        """Shows one line; "" removes it."""

    def problem_changed(self, problem: HistoryError | None) -> None:
        """Says why the conversation is not saved (None: it is). May be called again with the same problem."""

    async def may_run(self, call: Call) -> Permission:
        """Asks the user. Without anyone to ask, nothing may run."""
        return "no"
