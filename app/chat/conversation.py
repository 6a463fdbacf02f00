"""One conversation: its turns in memory, and their copy in the history."""

import contextlib
import dataclasses
from itertools import zip_longest
from pathlib import Path

from msgspec.structs import replace

from app.chat.history import History, title_of
from app.chat.history_database import HistoryError
from app.chat.summary import SOURCE_SHARE, Summarized, newest
from engine.errors import UsageError
from engine.protocol.events import Message, plain
from engine.system.invocation import call
from widgets.chat.turn import Attachment, Call, Turn
from widgets.text import counted

_State = tuple[Message, bool, tuple[Call, ...]]
INTERRUPTED = "interrupted · Ctrl+G goes on with it"
UNANSWERED = "interrupted before there was a reply · Ctrl+G answers it"


def require_chat(history: History, chat_id: int) -> None:
    """Raises UsageError if `history` has no such chat, HistoryError if it cannot be read."""
    if not history.messages(chat_id):
        raise UsageError(f"There is no chat {chat_id}.", "/chats lists them in the line mode (--plain).")


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


def _named(message: Message) -> Message:
    """A message with the names of its pictures in place of them."""
    names = "".join(f"[picture: {Path(picture.name).name}]\n\n" for picture in message.pictures)
    return replace(message, content=names + message.content, pictures=()) if names else message


OPEN_ELSEWHERE = (
    "This chat is open in another orin-chat, too: it keeps what both write, and each shows only its own. "
    "Alt+M goes on in a new chat, /fork in the line mode."
)


class Conversation:
    """The system prompt and the turns. If the history fails, the conversation goes on: `problem` says why, and the next
    `save` that succeeds writes what is missing."""

    def __init__(self, history: History, system: str = "", chat_id: int | None = None) -> None:
        """A new conversation with the system prompt `system`, or the chat `chat_id` of the history with its own.

        Raises HistoryError if the chat cannot be read.
        """
        self.history = history
        self.chat_id = chat_id
        self.system = system
        self.turns: list[Turn] = []
        self.start = 0  # the index of the first turn that the model reads
        self.summarized: Summarized | None = None  # of another chat, by the first reply
        self.problem: HistoryError | None = None
        self._stored_system = ""
        self._stored_first = 0  # the message id of the first turn that the model reads; 0: it reads all
        self._stored: dict[int, _State] = {}  # by message id: what the history has
        self._stored_files: dict[int, tuple[Attachment, ...]] = {}
        self._is_open = False  # whether the history knows that this chat is open
        self._cut_off = False  # the history still has messages after the last turn
        if chat_id is not None:
            self._read(chat_id)

    def _read(self, chat_id: int) -> None:
        self.system = ""
        for stored in self.history.messages(chat_id):
            message = stored.message
            if message.role == "system":
                self.system = self._stored_system = message.content
                continue
            assert message.role != "tool"  # results are with the calls
            role, finished = message.role, stored.finished
            turn = Turn(role, message.content, message.thinking, finished, message_id=stored.id)
            turn.files, turn.calls = stored.files, stored.calls
            if not stored.finished:
                turn.note = INTERRUPTED if turn.role == "assistant" else UNANSWERED
            self.turns.append(turn)
            self._stored[stored.id], self._stored_files[stored.id] = _state(turn), turn.files
        self._mark_versions()
        self._stored_first = self.history.first_read(chat_id)
        if self._stored_first:
            first = self._stored_first
            read = (
                i
                for i, turn in enumerate(self.turns)
                if turn.role == "user" and (turn.message_id or 0) >= first
            )
            self._begin_at(min(read, default=len(self.turns)))

    @property
    def last_reply(self) -> Turn | None:
        return next((turn for turn in reversed(self.turns) if turn.role == "assistant"), None)

    def prompt_before(self, index: int | None = None) -> int | None:
        """The index of the last turn of the user, or of the last one before `index`; None if there is none."""
        indices = reversed(range(len(self.turns))[:index])
        return next((i for i in indices if self.turns[i].role == "user"), None)

    @property
    def title(self) -> str:
        """The title in the list of past chats."""
        with contextlib.suppress(HistoryError):
            if self.chat_id is not None:
                return self.history.title(self.chat_id)
        return title_of("", next((turn.content for turn in self.turns if turn.role == "user"), ""))

    def way_back(self, options: str = "") -> str:
        """A sentence with the command that goes on with this chat; "" if it is not stored. `options` of that command:
        "--plain "."""
        if (problem := self.problem or (self.history.problem if self.turns else None)) is not None:
            return f"Not all of this chat is saved: {problem}"
        with contextlib.suppress(HistoryError):
            if self.chat_id is not None:
                is_latest = self.chat_id in (chat.id for chat in self.history.chats(limit=1))
                chat = "--continue" if is_latest else f"--chat {self.chat_id}"
                return f"{call(options + chat)} goes on with this chat."
        return ""

    def all_messages(self) -> list[Message]:
        """The system prompt and all turns."""
        system = [Message(role="system", content=self.system)] if self.system else []
        return system + [message for turn in self.turns for message in turn.messages]

    def messages(self, *, sees: bool = True) -> tuple[Message, ...]:
        """What a model is sent. One that does not see gets the names of earlier pictures."""
        system = (Message(role="system", content=plain(self.system)),) if self.system else ()
        messages = self._summarized + tuple(message for turn in self._sent() for message in turn.messages)
        if not sees:
            messages = (*map(_named, messages[:-1]), *messages[-1:])
        return system + messages

    @property
    def _summarized(self) -> tuple[Message, ...]:
        return self.summarized.messages if self.summarized and self.awaits_summary else ()

    def _sent(self) -> list[Turn]:
        """The turns that a model reads. A prompt without a reply is left out if another prompt follows: most chat
        templates refuse two prompts in a row."""
        turns = self.turns[self.start :]
        return [
            turn
            for turn, following in zip_longest(turns, turns[1:])
            if turn.role == "assistant" or following is None or following.role == "assistant"
        ]

    def seen(self, index: int, tokens: int) -> Turn | None:
        """The picture at `index` of those that a model is sent has so many tokens. Returns its turn if that is news."""
        index -= sum(len(message.pictures) for message in self._summarized)
        places = [(turn, i) for turn in self._sent() for i, file in enumerate(turn.files) if file.picture]
        if not 0 <= index < len(places):
            return None
        turn, i = places[index]
        if turn.files[i].tokens == tokens:
            return None
        turn.files = (*turn.files[:i], replace(turn.files[i], tokens=tokens), *turn.files[i + 1 :])
        return turn

    @property
    def awaits_summary(self) -> bool:
        """Whether the summary of another chat is the last reply, or is asked for."""
        return self.summarized is not None and len(self.turns) <= 2

    def to_summarize(self, context_length: int, context_used: int | None) -> Summarized | None:
        """What a model can summarize of this chat, without a prompt that waits for its reply; None if there is nothing.
        Of a context of so many tokens (0: not known), so many are used."""
        messages = [message for message in self.messages() if message.role != "system"]
        if messages and messages[-1].role == "user":
            messages.pop()
        if not messages or self.awaits_summary:
            return None
        share = SOURCE_SHARE * context_length / context_used if context_used else 1.0
        summarized = Summarized(self.title, tuple(messages), self.start)
        return summarized.part(share) or summarized if 0 < share < 1 else summarized

    def summarize_less(self, context_length: int) -> bool:
        """Asks for a summary of less than it was asked for, anew. Whether so little is worth one."""
        if not (self.awaits_summary and self.summarized):
            return False
        if (less := self.summarized.part(SOURCE_SHARE)) is None:
            return False
        self.cut(1)
        self.summarized, self.turns[0].content = less, less.request(context_length)
        return True

    @property
    def has_one_prompt(self) -> bool:
        """Whether the model reads nothing but the last turn, and the system prompt."""
        return len(self.turns) - self.start <= 1

    def leave_out(self) -> int:
        """Leaves the oldest turns out of what the model reads, so that about half of the text stays, at least the last
        prompt and its reply. Returns how many turns these are; 0: there are no older ones."""
        before = self.start
        if count := newest(self.turns[before:], 0.5):
            self._begin_at(before + count)
        return count

    def _begin_at(self, start: int) -> None:
        """The model reads the turns from `start` on. A note marks the place."""
        mark = f"the model reads from here on: {counted(start, 'turn')} before it are left out"
        for index, note in ((self.start, ""), (start, mark)):
            if index:
                self.turns[index - 1].note = note
        self.start = start

    def begin_as(self, other: "Conversation", end: int) -> None:
        """Takes the turns of another chat before the one at index `end`."""
        self.system = other.system
        self.turns = [
            dataclasses.replace(turn, message_id=None, version=(1, 1)) for turn in other.turns[:end]
        ]

    def _mark_versions(self) -> None:
        if self.chat_id is not None:
            versions = self.history.versions(self.chat_id)
            for turn in self.turns:
                if turn.role == "user" and turn.message_id is not None:
                    turn.version = versions.mark(turn.message_id)

    def show_version(self, index: int, step: int) -> bool:
        """Makes the history show the version before (-1) or after (1) the one at a prompt. Whether there is one; then
        the chat is to be read again. Raises HistoryError."""
        prompt = self.turns[index].message_id
        if self.chat_id is None or prompt is None:
            return False
        ids = self.history.versions(self.chat_id).beside(prompt, step)
        if ids is not None:
            self.history.show(self.chat_id, ids)
        return ids is not None

    def cut(self, index: int) -> list[Turn]:
        """Removes the turns from `index` on and returns them. The history has them until another turn is saved in their
        place, so `add` can restore them."""
        if index < self.start:  # little is left then
            self._begin_at(0)
        removed = self.turns[index:]
        del self.turns[index:]
        self._cut_off = True
        return removed

    def save(self, model: str) -> None:
        """Writes to the history what it lacks. Sets `problem` if that fails. `model` is the name of the model."""
        try:
            self._save(model)
            self.problem = None
        except HistoryError as error:
            self.problem = error

    def leave(self) -> None:
        """The history no longer knows this conversation as open, if it has all of it: another program may go on."""
        if self._is_open and self.problem is None:
            self._is_open = False
            with contextlib.suppress(HistoryError):
                self.history.set_open(None)

    def _is_ahead(self) -> bool:
        """Whether the last turns have what the history lacks."""
        return any(
            turn.message_id is None or self._stored[turn.message_id] != _state(turn)
            for turn in self.turns[-2:]
        )

    def begin_anew(self) -> None:
        """The history has nothing of this conversation."""
        self.chat_id = None
        self._is_open = self._cut_off = False
        self._stored_system, self._stored_first = "", 0
        self._stored.clear()
        self._stored_files.clear()
        for turn in self.turns:
            turn.message_id, turn.version = None, (1, 1)

    def _save(self, model: str) -> None:
        if not self.turns:
            return
        if self._is_ahead():
            self.history.follow()
            if self.chat_id is not None and not self.history.has(self.chat_id):
                self.begin_anew()  # another program has deleted it, and it goes on here
        if self.chat_id is None:
            self.chat_id = self.history.new_chat(model)
        if not self._is_open:
            self.history.set_open(self.chat_id)
            self._is_open = True
        if self.system != self._stored_system:
            self.history.set_system(self.chat_id, self.system)
            self._stored_system = self.system
        has_versions = False
        for index, turn in enumerate(self.turns):
            if turn.message_id is None:
                if self._cut_off:
                    has_versions = True
                    before = self.turns[index - 1].message_id if index else 0
                    self.history.truncate(self.chat_id, before or 0)
                    self._cut_off = False
                attached = turn.files, turn.calls
                answered = self.turns[index - 1] if index and turn.role == "assistant" else None
                after = (answered.message_id or 0) if answered and answered.role == "user" else 0
                turn.message_id = self.history.append(
                    self.chat_id, turn.written, turn.finished, *attached, after
                )
                self._stored[turn.message_id], self._stored_files[turn.message_id] = _state(turn), turn.files
        if has_versions:  # only what takes the place of other turns, and all of them are read for it
            self._mark_versions()
        first = (self.turns[self.start].message_id or 0) if 0 < self.start < len(self.turns) else 0
        if first != self._stored_first:
            self.history.set_first_read(self.chat_id, first)
            self._stored_first = first
        # The reply in progress, and the prompt that it answers. After a failure, older ones may have changed too.
        for turn in self.turns[-2:] if self.problem is None else self.turns:
            state = _state(turn)
            if turn.message_id is not None and self._stored[turn.message_id] != state:
                text = turn.content, turn.thinking
                self.history.update(turn.message_id, *text, turn.finished, turn.calls)
                self._stored[turn.message_id] = state
            if turn.message_id is not None and self._stored_files[turn.message_id] is not turn.files:
                self.history.set_files(turn.message_id, turn.files)
                self._stored_files[turn.message_id] = turn.files


def _state(turn: Turn) -> _State:
    """A turn as the history stores it."""
    return turn.written, turn.finished, turn.calls
