"""One conversation: the turns in memory, which are the truth, and their copy in the history."""

from __future__ import annotations

import contextlib

from app.chat.history import UNTITLED, History, HistoryError
from app.chat.turn import Turn
from engine.errors import UsageError
from engine.events import Message

INTERRUPTED = "interrupted · Ctrl+G goes on with it"


def require_chat(history: History, chat_id: int) -> None:
    """Raises UsageError if `history` has no such chat, HistoryError if it cannot be read."""
    if not history.messages(chat_id):
        raise UsageError(f"There is no chat {chat_id}.", "--plain lists them: /chats.")


def past_chat(history: History, chat_id: int | None, *, latest: bool) -> int | None:
    """The chat to continue: `chat_id`, or the latest one; None for a new chat. Raises UsageError if there is none."""
    if latest:
        chats = history.chats(limit=1)
        if not chats:
            raise UsageError("There is no chat to go on with.", "Leave --continue away to start one.")
        chat_id = chats[0].id
    if chat_id is not None:
        require_chat(history, chat_id)
    return chat_id


class Conversation:
    """Turns and the system prompt that they are under, which may be changed. A history that fails is no reason to
    stop: `problem` says so, and whatever is missing there is written with the next `save` that works."""

    def __init__(self, history: History, system: str = "", chat_id: int | None = None) -> None:
        """A new conversation or, with `chat_id`, that chat of the history with its own system prompt.

        Raises HistoryError if there is a `chat_id` that cannot be read.
        """
        self.history = history
        self.chat_id = chat_id
        self.system = system
        self.turns: list[Turn] = []
        self.problem: HistoryError | None = None
        self._stored_system = ""
        self._cut_off = False  # the history has messages behind the last one that is ours
        if chat_id is not None:
            self._read(chat_id)

    def _read(self, chat_id: int) -> None:
        self.system = ""
        for stored in self.history.messages(chat_id):
            message = stored.message
            if message.role == "system":
                self.system = self._stored_system = message.content
                continue
            turn = Turn(
                message.role, message.content, message.thinking, stored.finished, message_id=stored.id
            )
            turn.note = "" if stored.finished else INTERRUPTED
            self.turns.append(turn)

    @property
    def last_reply(self) -> Turn | None:
        return next((turn for turn in reversed(self.turns) if turn.role == "assistant"), None)

    def prompt_before(self, index: int | None = None) -> int | None:
        """Index of the last turn of the user, of those before `index` if there is one."""
        return next(
            (i for i in reversed(range(len(self.turns))[:index]) if self.turns[i].role == "user"), None
        )

    @property
    def title(self) -> str:
        """What the past chats call it."""
        with contextlib.suppress(HistoryError):
            if self.chat_id is not None:
                return self.history.title(self.chat_id)
        return UNTITLED

    def all_messages(self) -> list[Message]:
        """Everything that was said, the system prompt first."""
        system = [Message(role="system", content=self.system)] if self.system else []
        return system + [Message(role=t.role, content=t.content, thinking=t.thinking) for t in self.turns]

    def messages(self) -> tuple[Message, ...]:
        """What a model is to see. A prompt that got no reply before the next one was sent is left out: it
        failed, the screen says so, and two prompts in a row are more than most chat templates take."""
        system = (Message(role="system", content=self.system),) if self.system else ()
        answered = (
            turn
            for turn, following in zip(self.turns, [*self.turns[1:], None], strict=True)
            if turn.role == "assistant" or following is None or following.role == "assistant"
        )
        return system + tuple(
            Message(role=turn.role, content=turn.content, thinking=turn.thinking) for turn in answered
        )

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)

    def cut(self, index: int) -> list[Turn]:
        """Takes the turns from `index` on away and returns them. The history still has them until something
        else is said in their place, so that `add` can bring them back."""
        removed = self.turns[index:]
        del self.turns[index:]
        self._cut_off = True
        return removed

    def save(self, model: str) -> None:
        """Brings the history up to date; `problem` is what kept it from that, if something did."""
        try:
            self._save(model)
            self.problem = None
        except HistoryError as error:
            self.problem = error

    def _save(self, model: str) -> None:
        if not self.turns:
            return
        if self.chat_id is None:
            self.chat_id = self.history.new_chat(model)
        if self.system != self._stored_system:
            self.history.set_system(self.chat_id, self.system)
            self._stored_system = self.system
        for index, turn in enumerate(self.turns):
            if turn.message_id is None:
                if self._cut_off:
                    before = self.turns[index - 1].message_id if index else 0
                    self.history.truncate(self.chat_id, before or 0)
                    self._cut_off = False
                message = Message(role=turn.role, content=turn.content, thinking=turn.thinking)
                turn.message_id = self.history.append(self.chat_id, message, turn.finished)
        last = self.turns[-1]
        if last.role == "assistant" and last.message_id is not None:
            self.history.update(last.message_id, last.content, last.thinking, last.finished)
