"""Past chats in SQLite, saved while they go on, so that a crash loses at most the last moment.

Each message carries the id of the process that wrote it last. A message that is not finished, and whose writer has
ended, was interrupted.
"""

import contextlib
import hashlib
import os
import re
import time
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import platformdirs
from msgspec.structs import replace

from app.chat.history_database import HistoryDatabase, HistoryError
from app.chat.versions import Node, Versions
from engine.protocol.events import Message
from engine.runtime import prefix_folder
from widgets.chat.turn import Attachment, Call

TITLE_CHARS = 60
EXCERPT_CHARS, EXCERPT_BEFORE = 200, 40  # of a message, and before a word that was searched for, at most
UNTITLED = "Untitled"
DELETED_CHARS = 500_000  # at a time: a tenth of a second
_LATEST_S = 4e9  # of a time that is shown: in 2096
_T = TypeVar("_T")
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Thai, Lao, Burmese, Khmer, Chinese and Japanese."""


class StoredMessage(msgspec.Struct, frozen=True):
    """`finished` is False for a reply that is not complete. `files` came with a prompt, `calls` are of a reply."""

    id: int
    message: Message
    finished: bool
    files: tuple[Attachment, ...] = ()
    calls: tuple[Call, ...] = ()


class ChatSummary(msgspec.Struct, frozen=True):
    """A chat in the list. `updated` is in seconds since 1970. `excerpt` is the text around the words searched for, or
    the beginning of the last message. `interrupted`: the process that waited for a reply to the last message, or
    received it, ended before the reply did."""

    id: int
    title: str
    model: str
    updated: float
    message_count: int
    excerpt: str
    interrupted: bool


def default_path() -> Path:
    return platformdirs.user_data_path("orin-chat") / "history.sqlite3"


_FIRST_IN_MEMORY = 1_000_000_000
"""No chat of a file has such an id: who asks for one of a list from before `open_again` gets none, and deletes none."""


class History(HistoryDatabase):
    _end: tuple[Any, ...] = ()
    """What tells a chat as long as nobody else writes, and its last message: to find it, all have to be read."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Opens `path` (None: `default_path()`; ":memory:": keeps nothing). Raises HistoryError."""
        super().__init__(path or default_path())

    @classmethod
    def open(cls, path: Path | str | None = None) -> Self:
        """Like `History(path)`, but if that fails, a history in memory with the reason in `problem`."""
        try:
            return cls(path)
        except HistoryError as error:
            history = cls(":memory:")
            history.problem, history._wanted = error, str(path or default_path())
            history._number_from(_FIRST_IN_MEMORY)
            return history

    def _number_from(self, id: int) -> None:
        """Chats and messages have ids above `id` from now on."""
        self._run("INSERT INTO chats (id, model, created, updated) VALUES (?, '', 0, 0)", id)
        self._run("INSERT INTO sqlite_sequence (name, seq) VALUES ('messages', ?)", id)

    # --- one chat ---------------------------------------------------------------------------------------

    def new_chat(self, model: str) -> int:
        now, self._end = time.time(), ()  # a chat that is deleted leaves its id to this one
        sql = "INSERT INTO chats (model, created, updated) VALUES (?, ?, ?)"
        with self._transaction():
            chat_id = self._insert(sql, _storable(model), now, now)
            self._touch(chat_id)
        return chat_id

    def model(self, chat_id: int) -> str:
        """The model that a chat began with; "" if there is no such chat."""
        rows = self._run("SELECT model FROM chats WHERE id = ?", chat_id)
        return rows[0][0] if rows else ""

    def given_title(self, chat_id: int) -> str:
        """The title that the user gave; "" if there is none."""
        rows = self._run("SELECT title FROM chats WHERE id = ?", chat_id)
        return rows[0][0] or "" if rows else ""

    def has(self, chat_id: int) -> bool:
        return bool(self._run("SELECT 1 FROM chats WHERE id = ?", chat_id))

    def _touch(self, chat_id: int) -> None:
        """The chat is the last updated one, also where the clock was ahead when another one was written."""
        others = "SELECT updated FROM chats WHERE id != ? ORDER BY updated DESC LIMIT 1"
        sql = f"UPDATE chats SET updated = max(?, coalesce(({others}) + 0.001, 0)) WHERE id = ?"
        self._run(sql, time.time(), chat_id, chat_id)

    def append(
        self,
        chat_id: int,
        message: Message,
        finished: bool = True,
        files: Sequence[Attachment] = (),
        calls: Sequence[Call] = (),
        after: int = 0,
    ) -> int:
        """Adds `message` to the chat, with its `files` and `calls`, and returns its id. `after`: the prompt that a
        reply answers; other programs may have written behind that meanwhile. Else it is the last message."""
        sql = """INSERT INTO messages (chat_id, role, content, thinking, finished, writer, files, calls, parent)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
        content, thinking = _storable(message.content), _storable(message.thinking)
        attached = _without_pictures(files), _as_json(calls)
        values = chat_id, message.role, content, thinking, finished, os.getpid(), *attached
        with self._transaction():
            chat = self._db, chat_id, self._run("PRAGMA data_version")  # grows when another program writes
            if self._end[:-1] == chat and after in (0, self._end[-1]):
                parent, is_last = self._end[-1], True
            else:
                shown = self._shown(chat_id)
                parent = after if after in shown else shown[-1] if shown else 0
                is_last = parent not in shown[:-1]
            message_id = self._insert(sql, *values, parent)
            if not is_last:
                behind = (
                    "UPDATE messages SET parent = ? WHERE chat_id = ? AND parent = ? AND shown AND id != ?"
                )
                self._run(behind, message_id, chat_id, parent, message_id)
            self._keep_pictures(message_id, files)
            self._touch(chat_id)
        self._end = (*chat, message_id) if is_last else ()
        return message_id

    def _keep_pictures(self, message_id: int, files: Sequence[Attachment]) -> None:
        for place, file in enumerate(files):
            if file.picture is not None:
                hash = hashlib.blake2b(file.picture.data, digest_size=16).hexdigest()
                self._run("INSERT OR IGNORE INTO pictures VALUES (?, ?)", hash, file.picture.data)
                self._run("INSERT INTO message_pictures VALUES (?, ?, ?)", message_id, place, hash)

    def set_files(self, message_id: int, files: Sequence[Attachment]) -> None:
        """Replaces what is known of the files of a message; the files stay the same."""
        self._run("UPDATE messages SET files = ? WHERE id = ?", _without_pictures(files), message_id)

    def update(
        self,
        message_id: int,
        content: str,
        thinking: str = "",
        finished: bool = True,
        calls: Sequence[Call] = (),
    ) -> None:
        """Replaces the text and the calls of a message. Saves a reply while it streams (`finished` False)."""
        sql = (
            "UPDATE messages SET content = ?, thinking = ?, finished = ?, writer = ?, calls = ? WHERE id = ?"
        )
        values = _storable(content), _storable(thinking), finished, os.getpid(), _as_json(calls), message_id
        with self._transaction():
            self._run(sql, *values)
            for (chat_id,) in self._run("SELECT chat_id FROM messages WHERE id = ?", message_id):
                self._touch(chat_id)

    def set_system(self, chat_id: int, text: str) -> None:
        """Sets the system prompt of a chat ("": none). Its id is the negative id of the chat, so that it sorts before
        all other messages."""
        sql = """INSERT INTO messages (id, chat_id, role, content, thinking, finished, writer)
            VALUES (?, ?, 'system', ?, '', 1, ?)"""
        with self._transaction():
            self._run("DELETE FROM messages WHERE chat_id = ? AND role = 'system'", chat_id)
            if text:
                self._insert(sql, -chat_id, chat_id, _storable(text), os.getpid())

    def set_first_read(self, chat_id: int, message_id: int) -> None:
        """Sets the first message of a chat that the model reads (0: all of them)."""
        self._run("UPDATE chats SET first_read = ? WHERE id = ?", message_id, chat_id)

    def first_read(self, chat_id: int) -> int:
        """The id of the first message that the model reads (0: all of them)."""
        rows = self._run("SELECT first_read FROM chats WHERE id = ?", chat_id)
        return int(rows[0][0]) if rows else 0

    def truncate(self, chat_id: int, after_message_id: int) -> None:
        """Ends the chat after a message (0: before all of them, but for the system prompt). What followed stays as
        another version."""
        with self._transaction():
            shown = self._shown(chat_id)
            if after_message_id in shown:
                kept = shown[: shown.index(after_message_id) + 1]
            else:  # another program has cut it off, or it is before all
                kept = [id for id in shown if id < after_message_id]
            self.show(chat_id, kept)

    def versions(self, chat_id: int) -> Versions:
        """All versions of a chat."""
        sql = "SELECT id, parent, role, shown FROM messages WHERE chat_id = ? AND id > 0"
        return Versions(
            [Node(id, parent, role, bool(shown)) for id, parent, role, shown in self._run(sql, chat_id)]
        )

    def show(self, chat_id: int, message_ids: Sequence[int]) -> None:
        """Makes these messages the version of the chat that is shown."""
        self._end = ()
        listed = "(SELECT value FROM json_each(?))"
        sql = f"UPDATE messages SET shown = (id IN {listed}) WHERE chat_id = ? AND role != 'system'"
        self._run(sql, msgspec.json.encode(list(message_ids)).decode(), chat_id)

    def found_in(self, chat_id: int, query: str) -> int | None:
        """The first message of a chat that a search finds, in any version; None if it finds none."""
        if not (terms := _terms(query)):
            return None
        in_message, parameters = _search(terms)
        sql = f"SELECT min(id) FROM messages WHERE {in_message} AND chat_id = ? AND id > 0"
        [(found,)] = self._run(sql, *parameters, chat_id)
        return None if found is None else int(found)

    def messages(self, chat_id: int) -> list[StoredMessage]:
        """The messages of the version that is shown."""
        sql = """SELECT id, role, content, thinking, finished, files, calls FROM messages
            WHERE chat_id = ? AND shown AND (role = 'system' OR id > 0 AND role IN ('user', 'assistant'))
            ORDER BY id"""
        place = {id: i for i, id in enumerate(self._shown(chat_id))}  # a system prompt comes first
        rows = sorted(self._run(sql, chat_id), key=lambda row: place.get(row[0], -1))
        return [
            StoredMessage(
                id,
                Message(role=role, content=content, thinking=thinking),
                bool(finished),
                self._with_pictures(id, _from_json(files, tuple[Attachment, ...])),
                _from_json(calls, tuple[Call, ...]),
            )
            for id, role, content, thinking, finished, files, calls in rows
        ]

    def _shown(self, chat_id: int) -> list[int]:
        """The ids of the messages of the version that is shown, in its order: each comes after its parent. It is the
        order of the ids, but where several programs have written."""
        sql = "SELECT id, parent FROM messages WHERE chat_id = ? AND shown AND id > 0 ORDER BY id DESC"
        parents = dict(self._run(sql, chat_id))
        after: dict[int, list[int]] = defaultdict(list)
        for id, parent in parents.items():
            after[parent if parent in parents else 0].append(id)
        ordered, waiting = list[int](), after.pop(0, [])
        while waiting:
            ordered.append(waiting.pop())
            waiting += after.pop(ordered[-1], ())
        return ordered if len(ordered) == len(parents) else sorted(parents)  # of a damaged history

    def _with_pictures(self, message_id: int, files: Sequence[Attachment]) -> tuple[Attachment, ...]:
        if not any(file.picture for file in files):
            return tuple(files)
        sql = "SELECT place, data FROM message_pictures JOIN pictures USING (hash) WHERE message_id = ?"
        data = dict(self._run(sql, message_id))
        return tuple(
            replace(file, picture=replace(file.picture, data=data.get(place, b""))) if file.picture else file
            for place, file in enumerate(files)
        )

    def title(self, chat_id: int) -> str:
        """The title that the user gave, or the first line of the first prompt."""
        prompt = "SELECT content FROM messages WHERE chat_id = chats.id AND role = 'user' AND shown ORDER BY id LIMIT 1"
        rows = self._run(f"SELECT title, ({prompt}) AS first_prompt FROM chats WHERE id = ?", chat_id)
        return title_of(*rows[0]) if rows else UNTITLED

    def rename(self, chat_id: int, title: str) -> None:
        """Gives a chat a title; "" brings back the first line of the first prompt."""
        self._run("UPDATE chats SET title = ? WHERE id = ?", _storable(title.strip()) or None, chat_id)

    def delete(self, chat_id: int) -> None:
        """Deletes a chat, and what the disk keeps of KV caches: nobody knows which of it is of this chat."""
        for _ in self.delete_in_parts(chat_id):
            pass

    def delete_in_parts(self, chat_id: int) -> Iterator[None]:
        """Like `delete`, but other work may go on after each part, its end first. Taking the words of a long chat out
        of the index takes seconds."""
        part, size = list[int](), 0
        rows = self._run(
            "SELECT id, length(content) FROM messages WHERE chat_id = ? ORDER BY id DESC", chat_id
        )
        for message_id, chars in rows:
            part.append(message_id)
            size += chars or 0
            if size > DELETED_CHARS:
                self._run(f"DELETE FROM messages WHERE id IN ({','.join('?' * len(part))})", *part)
                part, size = [], 0
                yield
        with self._transaction():
            self._run("DELETE FROM chats WHERE id = ?", chat_id)
            self._run("DELETE FROM pictures WHERE hash NOT IN (SELECT hash FROM message_pictures)")
        with contextlib.suppress(OSError):
            prefix_folder.clear()

    # --- all chats --------------------------------------------------------------------------------------

    def chats(self, limit: int = 100, query: str = "") -> list[ChatSummary]:
        """The first chats that `query` finds."""
        return self.summaries(self.chat_ids(query, limit), query)

    def chat_ids(self, query: str = "", limit: int = -1) -> list[int]:
        """The first `limit` chats (-1: all), the last updated first. With `query`, those with a message that has all
        its words (or words that begin so), or with a title that contains it."""
        condition = "EXISTS (SELECT 1 FROM messages WHERE chat_id = chats.id)"
        parameters: list[object] = []
        if terms := _terms(query):
            in_message, parameters = _search(terms)
            condition = f"id IN (SELECT chat_id FROM messages WHERE {in_message}) OR instr(lower(title), ?)"
            parameters = [*parameters, query.strip().lower()]
        elif query.strip():
            return []
        sql = f"SELECT id FROM chats WHERE {condition} ORDER BY updated DESC, id DESC LIMIT ?"
        return [id for (id,) in self._run(sql, *parameters, limit)]

    def summaries(self, chat_ids: Sequence[int], query: str = "") -> list[ChatSummary]:
        """The summaries of some of the chats that `query` has found, in this order, without those that are deleted."""
        of_chat, listed = "messages WHERE chat_id = chats.id AND shown", ",".join("?" * len(chat_ids))
        [ends] = self._run(f"SELECT min(id), max(id) FROM messages WHERE chat_id IN ({listed})", *chat_ids)
        in_message, parameters = _search(terms, ends) if (terms := _terms(query)) else ("FALSE", [])
        rows = self._run(
            f"""SELECT chats.id, chats.title, model, updated, (SELECT count(*) FROM {of_chat}),
                coalesce((SELECT content FROM messages WHERE id = found.id), last.content) AS content,
                last.finished, last.writer,
                (SELECT content FROM {of_chat} AND role = 'user' ORDER BY id LIMIT 1) AS first_prompt
            FROM chats LEFT JOIN messages AS last ON last.id = (SELECT max(id) FROM {of_chat})
            LEFT JOIN (SELECT chat_id, min(id) AS id FROM messages
                WHERE chat_id IN ({listed}) AND {in_message} GROUP BY chat_id) AS found ON found.chat_id = chats.id
            WHERE chats.id IN ({listed})""",
            *chat_ids,
            *parameters,
            *chat_ids,
        )
        summaries = {
            id: ChatSummary(
                id=id,
                title=title_of(title, first_prompt),
                model=model,
                updated=min(max(0.0, updated), _LATEST_S),
                message_count=count,
                excerpt=_excerpt(content, terms),
                interrupted=not finished and not _is_alive(writer),
            )
            for id, title, model, updated, count, content, finished, writer, first_prompt in rows
        }
        return [summaries[id] for id in chat_ids if id in summaries]

    def prompts(self, limit: int = 200) -> list[str]:
        """The last prompts of all chats, oldest first, each once."""
        found: dict[str, None] = {}
        # No more are read than it takes: all of a large history would take seconds.
        for (text,) in self._rows("SELECT content FROM messages WHERE role = 'user' ORDER BY id DESC"):
            found.setdefault(text)
            if len(found) >= limit:
                break
        return [*reversed(found)]

    def set_open(self, chat_id: int | None) -> None:
        """Says which chat this process has open (None: none), in case that it dies."""
        if chat_id is None:
            self._run("DELETE FROM open_chats WHERE writer = ?", os.getpid())
        else:
            self._run("INSERT OR REPLACE INTO open_chats VALUES (?, ?)", os.getpid(), chat_id)

    def take_left_open(self) -> int | None:
        """The chat that was written to last of those whose processes died; None if there is none. Forgets them all."""
        rows = self._run(
            "SELECT writer, chat_id FROM open_chats JOIN chats ON chats.id = chat_id ORDER BY updated DESC"
        )
        left = [(writer, chat_id) for writer, chat_id in rows if not _is_alive(writer)]
        for writer, _ in left:
            self._run("DELETE FROM open_chats WHERE writer = ?", writer)
        return left[0][1] if left else None

    def open_elsewhere(self) -> set[int]:
        """The chats that other processes have open, and write to."""
        rows = self._run("SELECT writer, chat_id FROM open_chats WHERE writer != ?", os.getpid())
        return {chat_id for writer, chat_id in rows if _is_alive(writer)}

    def save_draft(self, text: str) -> None:
        """Saves the prompt that this process has not sent; "" deletes it."""
        if text:
            sql = "INSERT OR REPLACE INTO drafts (writer, text) VALUES (?, ?)"
            self._run(sql, os.getpid(), _storable(text))
        else:
            self._run("DELETE FROM drafts WHERE writer = ?", os.getpid())

    def take_draft(self) -> str:
        """Removes and returns the draft of a process that has ended; "" if there is none."""
        for writer, text in self._run("SELECT writer, text FROM drafts ORDER BY rowid DESC"):
            if not _is_alive(writer):
                self._run("DELETE FROM drafts WHERE writer = ?", writer)
                return str(text)
        return ""


def _without_pictures(files: Sequence[Attachment]) -> str:
    """The files of a message in JSON; their pictures are kept elsewhere."""
    bare = [
        replace(file, picture=replace(file.picture, data=b"")) if file.picture else file for file in files
    ]
    return _storable(msgspec.json.encode(bare).decode()) if files else ""


def _storable(text: str) -> str:
    """`text` without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _as_json(calls: Sequence[Call]) -> str:
    return _storable(msgspec.json.encode(calls).decode()) if calls else ""


def _from_json(text: str, kind: type[_T]) -> _T:
    """What `_as_json` and `_without_pictures` have written; nothing if the disk has changed it."""
    try:
        return msgspec.json.decode(text or "[]", type=kind)
    except msgspec.MsgspecError:
        return msgspec.json.decode("[]", type=kind)


def _terms(query: str) -> list[str]:
    return re.findall(r"\w+", query)


def _search(terms: list[str], ends: tuple[int | None, int | None] | None = None) -> tuple[str, list[object]]:
    """The condition for a message that has all terms, in SQL, and its parameters. `ends`: the lowest and the highest id
    of those that are looked at, which spares most of the work where a word is in every message.

    FTS5 finds words by their beginnings. It finds no words in scripts without spaces, so terms of such a script are
    looked for anywhere.
    """
    words = [term for term in terms if not _WITHOUT_SPACES.search(term)]
    others = [term for term in terms if term not in words]
    match = [" ".join(f'"{word}"*' for word in words)] if words else []  # quoted, or it could be FTS5 syntax
    between = " AND rowid BETWEEN ? AND ?" if ends else ""
    matching = f"id IN (SELECT rowid FROM messages_text WHERE messages_text MATCH ?{between})"
    conditions = [matching] * len(match)
    conditions += ["instr(content, ?)"] * len(others)
    return " AND ".join(conditions), [*match, *((ends or ()) if match else ()), *others]


def _excerpt(text: str, terms: list[str]) -> str:
    """The text around the first word that begins with a term, or its beginning."""
    folded = tuple(map(_folded, terms))
    words = (word.start() for word in re.finditer(r"[^\W_]+", text) if _folded(word[0]).startswith(folded))
    without_spaces = [text.find(term) for term in terms if _WITHOUT_SPACES.search(term)]
    place = without_spaces[0] if without_spaces else next(words, 0) if terms else 0
    start = max(0, place - EXCERPT_BEFORE)
    start = start and (text.find(" ", start, place) + 1 or start)  # where a word begins, if there are spaces
    return ("…" if start else "") + " ".join(text[start : start + 2 * EXCERPT_CHARS].split())[:EXCERPT_CHARS]


def _folded(word: str) -> str:
    """A text without case and diacritics, as FTS5 compares words."""
    word = word.lower()
    if word.isascii():
        return word
    return "".join(c for c in unicodedata.normalize("NFD", word) if not unicodedata.combining(c))


def title_of(title: str, first_prompt: str) -> str:
    """The title that the user gave, or the first line of the first prompt."""
    lines = map(str.strip, first_prompt.splitlines())
    first = next((line for line in lines if line), UNTITLED)
    return title or (first if len(first) <= TITLE_CHARS else first[: TITLE_CHARS - 1].rstrip() + "…")


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):  # the last: the disk has changed it
        return False
    except OSError:
        return True  # of another user
    return True
