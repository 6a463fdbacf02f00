"""Past conversations in SQLite, written while they happen, so that a crash loses at most the last second.

Several processes may use one file at once: write-ahead log, short transactions, a busy timeout. Each row of a
reply in progress carries the id of the process that writes it, which is how an interrupted reply (its writer
is gone) is told from one that another process is still writing.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from engine.errors import OrinError
from engine.events import Message

TITLE_CHARS = 60
UNTITLED = "Untitled"
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Thai, Lao, Burmese, Khmer, Chinese and Japanese."""
BUSY_TIMEOUT_MS = 2000

# One tuple of statements for each version of the schema; `PRAGMA user_version` counts those applied.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE chats (
            id INTEGER PRIMARY KEY,
            title TEXT,                             -- NULL: the first prompt's first line
            model TEXT NOT NULL,
            created REAL NOT NULL,                  -- seconds since 1970
            updated REAL NOT NULL)""",
        "CREATE INDEX chats_updated ON chats (updated)",
        """CREATE TABLE messages (
            id INTEGER PRIMARY KEY AUTOINCREMENT,   -- also the order within a chat
            chat_id INTEGER NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
            role TEXT NOT NULL,
            content TEXT NOT NULL,
            thinking TEXT NOT NULL,
            finished INTEGER NOT NULL,
            writer INTEGER NOT NULL)                -- process id of who wrote it last""",
        "CREATE INDEX messages_chat ON messages (chat_id)",
        """CREATE VIRTUAL TABLE messages_text USING fts5
            (content, content='messages', content_rowid='id', tokenize='unicode61 remove_diacritics 2')""",
        """CREATE TRIGGER messages_insert AFTER INSERT ON messages BEGIN
            INSERT INTO messages_text (rowid, content) VALUES (new.id, new.content); END""",
        """CREATE TRIGGER messages_delete AFTER DELETE ON messages BEGIN
            INSERT INTO messages_text (messages_text, rowid, content)
                VALUES ('delete', old.id, old.content); END""",
        """CREATE TRIGGER messages_update AFTER UPDATE OF content ON messages BEGIN
            INSERT INTO messages_text (messages_text, rowid, content)
                VALUES ('delete', old.id, old.content);
            INSERT INTO messages_text (rowid, content) VALUES (new.id, new.content); END""",
        "CREATE TABLE drafts (writer INTEGER PRIMARY KEY, text TEXT NOT NULL)",
    ),
)


class HistoryError(OrinError):
    """The chat history cannot be read or written. A chat can go on without it."""


class StoredMessage(msgspec.Struct, frozen=True):
    """A message as stored; `finished` is False for a reply that did not come to its end."""

    id: int
    message: Message
    finished: bool


class ChatSummary(msgspec.Struct, frozen=True):
    """One line of the list of chats. `updated` in seconds since 1970. `excerpt` is text around what was
    searched for, or how the last message begins. `interrupted`: the process that waited for a reply to
    the last message, or received it, ended before the reply did."""

    id: int
    title: str
    model: str
    updated: float
    message_count: int
    excerpt: str
    interrupted: bool


def default_path() -> Path:
    return platformdirs.user_data_path("orin-chat") / "history.sqlite3"


class History:
    """The chats in one SQLite file. Every method raises HistoryError when the file cannot be used."""

    problem: HistoryError | None = None
    """Why this history is kept in memory instead of its file, where `open` had to."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Opens `path` (None: `default_path()`; ":memory:": nothing is kept), created for this user only."""
        self.path = str(path or default_path())
        if self.path != ":memory:":
            _create_private(Path(self.path))
        with self._guard():
            # Autocommit: each method below is one statement or one explicit transaction.
            self._db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_MS / 1e3, isolation_level=None)
            self._write_ahead()
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._migrate()

    @classmethod
    def open(cls, path: Path | str | None = None) -> History:
        """Like `History(path)`, but where that fails, a history in memory that says so in `problem`."""
        try:
            return cls(path)
        except HistoryError as error:
            history = cls(":memory:")
            history.problem = error
            return history

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    # --- one chat ---------------------------------------------------------------------------------------

    def new_chat(self, model: str) -> int:
        now = time.time()
        sql = "INSERT INTO chats (model, created, updated) VALUES (?, ?, ?)"
        return self._insert(sql, _storable(model), now, now)

    def append(self, chat_id: int, message: Message, finished: bool = True) -> int:
        """Adds `message` at the end of the chat and returns its id."""
        with self._transaction():
            message_id = self._insert(
                "INSERT INTO messages (chat_id, role, content, thinking, finished, writer)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                chat_id,
                message.role,
                _storable(message.content),
                _storable(message.thinking),
                finished,
                os.getpid(),
            )
            self._run("UPDATE chats SET updated = ? WHERE id = ?", time.time(), chat_id)
        return message_id

    def update(self, message_id: int, content: str, thinking: str = "", finished: bool = True) -> None:
        """Replaces the text of a message; how a reply is saved while it streams (`finished` False)."""
        with self._transaction():
            self._run(
                "UPDATE messages SET content = ?, thinking = ?, finished = ?, writer = ? WHERE id = ?",
                _storable(content),
                _storable(thinking),
                finished,
                os.getpid(),
                message_id,
            )
            self._run(
                "UPDATE chats SET updated = ? WHERE id = (SELECT chat_id FROM messages WHERE id = ?)",
                time.time(),
                message_id,
            )

    def set_system(self, chat_id: int, text: str) -> None:
        """Gives a chat another system prompt ("": none). Its id is the chat's, negative: it comes before all that
        was said, whenever it was written."""
        with self._transaction():
            self._run("DELETE FROM messages WHERE chat_id = ? AND role = 'system'", chat_id)
            if text:
                self._insert(
                    "INSERT INTO messages (id, chat_id, role, content, thinking, finished, writer)"
                    " VALUES (?, ?, 'system', ?, '', 1, ?)",
                    -chat_id,
                    chat_id,
                    _storable(text),
                    os.getpid(),
                )

    def truncate(self, chat_id: int, after_message_id: int) -> None:
        """Deletes what was said in a chat after a message (0: all of it); its system prompt stays."""
        self._run(
            "DELETE FROM messages WHERE chat_id = ? AND id > ? AND role != 'system'",
            chat_id,
            after_message_id,
        )

    def messages(self, chat_id: int) -> list[StoredMessage]:
        rows = self._run(
            "SELECT id, role, content, thinking, finished FROM messages WHERE chat_id = ? ORDER BY id",
            chat_id,
        )
        return [
            StoredMessage(id, Message(role=role, content=content, thinking=thinking), bool(finished))
            for id, role, content, thinking, finished in rows
        ]

    def title(self, chat_id: int) -> str:
        """The title that a chat was given, else its first prompt's first line."""
        prompt = "SELECT content FROM messages WHERE chat_id = chats.id AND role = 'user' ORDER BY id LIMIT 1"
        rows = self._run(f"SELECT title, ({prompt}) FROM chats WHERE id = ?", chat_id)
        return _title(*rows[0]) if rows else UNTITLED

    def rename(self, chat_id: int, title: str) -> None:
        """Gives a chat a title; an empty one brings back the first prompt's first line."""
        self._run("UPDATE chats SET title = ? WHERE id = ?", _storable(title.strip()) or None, chat_id)

    def delete(self, chat_id: int) -> None:
        self._run("DELETE FROM chats WHERE id = ?", chat_id)

    # --- all chats --------------------------------------------------------------------------------------

    def chats(self, limit: int = 100, query: str = "") -> list[ChatSummary]:
        """The most recently used chats first. With `query`, those where one message holds every word of it
        (the beginning of a word is enough) or whose title contains it."""
        of_chat = "messages WHERE chat_id = chats.id"
        where, excerpt = f"EXISTS (SELECT 1 FROM {of_chat})", "last.content"
        parameters: list[str] = []
        if terms := re.findall(r"\w+", query):
            where, excerpt, parameters = _search(query, terms)
        elif query.strip():
            return []
        rows = self._run(
            f"""SELECT chats.id, chats.title, model, updated, (SELECT count(*) FROM {of_chat}), {excerpt},
                last.role, last.finished, last.writer,
                (SELECT content FROM {of_chat} AND role = 'user' ORDER BY id LIMIT 1)
            FROM chats LEFT JOIN messages AS last ON last.id = (SELECT max(id) FROM {of_chat})
            WHERE {where} ORDER BY updated DESC, chats.id DESC LIMIT ?""",
            *parameters,
            limit,
        )
        return [
            ChatSummary(
                id=id,
                title=_title(title, first_prompt),
                model=model,
                updated=updated,
                message_count=count,
                excerpt=" ".join((excerpt or "").split())[:200],
                interrupted=not finished and not _is_alive(writer),
            )
            for id, title, model, updated, count, excerpt, role, finished, writer, first_prompt in rows
        ]

    def unfinished(self) -> list[ChatSummary]:
        """The chats whose last reply was interrupted by the death of the process that received it."""
        return [chat for chat in self.chats() if chat.interrupted]

    def prompts(self, limit: int = 200) -> list[str]:
        """The last prompts of all chats, oldest first, without repetitions."""
        sql = (
            "SELECT content FROM messages WHERE role = 'user' GROUP BY content ORDER BY max(id) DESC LIMIT ?"
        )
        rows = self._run(sql, limit)
        return [content for (content,) in reversed(rows)]

    def save_draft(self, text: str) -> None:
        """Keeps what the user has typed and not sent; empty text forgets it."""
        if text:
            self._run(
                "INSERT OR REPLACE INTO drafts (writer, text) VALUES (?, ?)", os.getpid(), _storable(text)
            )
        else:
            self._run("DELETE FROM drafts WHERE writer = ?", os.getpid())

    def take_draft(self) -> str:
        """A draft that a process now gone left behind, which is then forgotten here; "" without one."""
        for writer, text in self._run("SELECT writer, text FROM drafts ORDER BY rowid DESC"):
            if not _is_alive(writer):
                self._run("DELETE FROM drafts WHERE writer = ?", writer)
                return str(text)
        return ""

    # --- SQLite -----------------------------------------------------------------------------------------

    def _run(self, sql: str, *parameters: Any) -> list[Any]:
        with self._guard():
            return self._db.execute(sql, parameters).fetchall()

    def _insert(self, sql: str, *parameters: Any) -> int:
        with self._guard():
            row_id = self._db.execute(sql, parameters).lastrowid
        assert row_id is not None
        return row_id

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guard():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back already
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turns what SQLite raises into a sentence."""
        try:
            yield
        except sqlite3.Error as error:
            raise _explain(error, self.path) from error

    def _write_ahead(self) -> None:
        """Switches to the write-ahead log; some network file systems refuse, which is fine. Here alone SQLite does
        not wait for other processes, which may be opening a new file too."""
        give_up = time.monotonic() + BUSY_TIMEOUT_MS / 1e3
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > give_up:
                    raise
                time.sleep(0.01)

    def _migrate(self) -> None:
        def version() -> int:
            return int(self._db.execute("PRAGMA user_version").fetchone()[0])

        if version() == len(MIGRATIONS):
            return
        with self._transaction():  # asks again inside: another process may have been faster
            if version() > len(MIGRATIONS):
                raise HistoryError(
                    f"The chat history {self.path} was written by a newer version of orin-chat.",
                    "Update orin-chat, or move the file away to start an empty history.",
                )
            for number, statements in enumerate(MIGRATIONS[version() :], start=version() + 1):
                for statement in statements:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {number}")


def _explain(error: sqlite3.Error, path: str) -> HistoryError:
    text = str(error)
    for sign, what, hint in (
        (
            "not a database",
            "is damaged",
            "Move it away to start an empty one; until then chats are not saved.",
        ),
        ("malformed", "is damaged", "Move it away to start an empty one; until then chats are not saved."),
        ("readonly", "cannot be written", "Check its permissions; until then chats are not saved."),
        ("unable to open", "cannot be opened", "Check its permissions; until then chats are not saved."),
        (
            "full",
            "cannot grow because the disk is full",
            "Free some space; the chat is saved again after that.",
        ),
        ("locked", "is locked by another process", "It is tried again with the next message."),
    ):
        if sign in text:
            return HistoryError(f"The chat history {path} {what}.", hint)
    return HistoryError(
        f"The chat history {path} cannot be used: {text}.", "Until that is mended chats are not saved."
    )


def _create_private(path: Path) -> None:
    """Creates a file that only this user can read. SQLite gives its write-ahead log the same mode."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise HistoryError(
            f"The chat history {path} cannot be created: {error.strerror or error}.",
            "Check the permissions of its folder; chats are not saved until then.",
        ) from error


def _storable(text: str) -> str:
    """Without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _search(query: str, terms: list[str]) -> tuple[str, str, list[str]]:
    """Conditions and excerpts for chats where one message holds all `terms`, or whose title contains `query`.

    FTS5 finds words by their beginnings, but does not know where those are in scripts without spaces: what is
    written in one of them is looked for anywhere.
    """
    words = [term for term in terms if not _WITHOUT_SPACES.search(term)]
    others = [term for term in terms if term not in words]
    match = [" ".join(f'"{word}"*' for word in words)] if words else []  # quoted: none is FTS5 syntax
    holds = ["id IN (SELECT rowid FROM messages_text WHERE messages_text MATCH ?)"] * len(match)
    holds += ["instr(content, ?)"] * len(others)
    in_messages = " AND ".join(holds)
    where = f"""(instr(lower(title), ?)
        OR chats.id IN (SELECT chat_id FROM messages WHERE {in_messages}))"""
    if match:
        found = """SELECT snippet(messages_text, 0, '', '', '…', 16)
            FROM messages_text JOIN messages ON messages.id = messages_text.rowid
            WHERE messages_text MATCH ? AND chat_id = chats.id LIMIT 1"""
        of_excerpt = match
    else:
        found = f"""SELECT substr(content, max(1, instr(content, ?) - 20)) FROM messages
            WHERE chat_id = chats.id AND {in_messages} LIMIT 1"""
        of_excerpt = [others[0], *others]
    parameters = [*of_excerpt, query.strip().lower(), *match, *others]
    return where, f"coalesce(({found}), last.content)", parameters


def _title(given: str | None, first_prompt: str | None) -> str:
    return given or _first_line(first_prompt or "") or UNTITLED


def _first_line(text: str) -> str:
    line = next((line for line in map(str.strip, text.splitlines()) if line), "")
    return line if len(line) <= TITLE_CHARS else line[: TITLE_CHARS - 1].rstrip() + "…"


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True
