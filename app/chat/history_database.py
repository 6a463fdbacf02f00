"""The SQLite file of the chat history: its schema, how it is opened, and its errors in words.

Several processes may use the file at once, with a write-ahead log, short transactions and a busy timeout.
"""

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from engine.errors import OrinError
from engine.system.whole_file import set_mode

BUSY_TIMEOUT_MS = 2000
LOCKED_TIMEOUT_MS = 20
"""While another program holds the file locked: nothing else goes on meanwhile."""

# The statements of each version of the schema. `PRAGMA user_version` counts the versions applied.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE chats (
            id INTEGER PRIMARY KEY,
            title TEXT,                             -- NULL: the first line of the first prompt
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
            writer INTEGER NOT NULL)                -- id of the process that wrote it last""",
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
    # The first message that the model reads; 0: all of them.
    ("ALTER TABLE chats ADD COLUMN first_read INTEGER NOT NULL DEFAULT 0",),
    (
        "ALTER TABLE messages ADD COLUMN files TEXT NOT NULL DEFAULT ''",  # JSON, see `Attachment`
        # What is replaced stays as another version: `shown` is 0. `parent` is the message before; 0: none.
        "ALTER TABLE messages ADD COLUMN shown INTEGER NOT NULL DEFAULT 1",
        "ALTER TABLE messages ADD COLUMN parent INTEGER NOT NULL DEFAULT 0",
        """UPDATE messages SET parent = coalesce((SELECT max(before.id) FROM messages AS before
            WHERE before.chat_id = messages.chat_id AND before.id > 0 AND before.id < messages.id), 0)""",
    ),
    # The chat that each running process has open.
    ("CREATE TABLE open_chats (writer INTEGER PRIMARY KEY, chat_id INTEGER NOT NULL)",),
    # The files of pictures, each once, and the messages that they came with.
    (
        "CREATE TABLE pictures (hash TEXT PRIMARY KEY, data BLOB NOT NULL)",
        """CREATE TABLE message_pictures (
            message_id INTEGER NOT NULL REFERENCES messages (id) ON DELETE CASCADE,
            place INTEGER NOT NULL,                 -- among the files of the message
            hash TEXT NOT NULL REFERENCES pictures (hash),
            PRIMARY KEY (message_id, place))""",
        "CREATE INDEX message_pictures_hash ON message_pictures (hash)",
    ),
    ("ALTER TABLE messages ADD COLUMN calls TEXT NOT NULL DEFAULT ''",),  # of tools: JSON, see `Call`
)
_TRIGGERS = frozenset(
    " ".join(sql.split()) for sql in chain.from_iterable(MIGRATIONS) if sql.startswith("CREATE TRIGGER")
)
_READ_AS: dict[str, type] = {
    **dict.fromkeys(("id", "chat_id", "parent", "writer", "first_read", "place", "finished", "shown"), int),
    **dict.fromkeys(("title", "model", "role", "content", "thinking", "first_prompt", "text"), str),
    **dict.fromkeys(("files", "calls", "hash"), str),
    "updated": float,
    "data": bytes,
}
_NOT_SAVED = "until then chats are not saved."
_DAMAGED = "is damaged", f"Move it away to start an empty one; {_NOT_SAVED}"
_FULL = "cannot grow because the disk is full", f"Free some space; {_NOT_SAVED}"
_PROBLEMS = (  # a part of SQLite's message or of its error's name, what it means, and a hint
    ("not a database", *_DAMAGED),
    ("malformed", *_DAMAGED),
    ("readonly", "cannot be written", f"Check its permissions; {_NOT_SAVED}"),
    ("unable to open", "cannot be opened", f"Check its permissions; {_NOT_SAVED}"),
    ("full", *_FULL),
    ("IOERR_SHMSIZE", *_FULL),  # the index of the write-ahead log has no room
    ("locked", "is locked by another process", "The next message tries again."),
)


class HistoryError(OrinError):
    """The chat history cannot be read or written. A chat can go on without it."""


class HistoryDatabase:
    """Every method raises HistoryError if the file cannot be used."""

    problem: HistoryError | None = None
    """Why the history is in memory in place of its file, until `open_again` succeeds."""

    def __init__(self, path: Path | str) -> None:
        """Opens `path`, or creates it for this user only. ":memory:" keeps nothing."""
        self.path = self._wanted = str(path)
        self._open()

    def _open(self, patience_ms: int = BUSY_TIMEOUT_MS) -> None:
        """Waits for other programs' locks for so long."""
        self._is_locked = patience_ms < BUSY_TIMEOUT_MS
        self._file: tuple[int, int] | None = None
        if self.path != ":memory:":
            _create_private(Path(self.path))
        with self._guard():
            # Autocommit: each method is one statement or one explicit transaction.
            self._db = sqlite3.connect(self.path, timeout=patience_ms / 1e3, isolation_level=None)
            self._db.text_factory = lambda text: text.decode("utf-8", "replace")
            self._write_ahead(patience_ms)
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._migrate()
            self._check_triggers()
        self._file = self._in_place()

    def open_again(self) -> bool:
        """Tries once more to open the file that `open` could not. Whether it did: then the file's chats have taken the
        place of those in memory, which are gone."""
        memory, file = self._db, self._file
        try:
            self.path = self._wanted
            self._open(LOCKED_TIMEOUT_MS)
        except HistoryError as error:
            if self._db is not memory:
                self.close()
            self.path, self._db, self._file, self.problem = ":memory:", memory, file, error
            return False
        memory.close()
        self.problem = None
        return True

    def follow(self) -> None:
        """Opens the file that is in its place, a new one if there is none: what is written to one that was deleted is
        lost."""
        if self._in_place() != self._file or self._file is None:
            self.close()
            self._open()

    def _in_place(self) -> tuple[int, int] | None:
        """What tells files apart; None if there is none."""
        try:
            found = Path(self.path).stat()
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError) and self.path != ":memory:"
            return None if is_gone else self._file or (0, 0)
        return found.st_dev, found.st_ino

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _run(self, sql: str, *parameters: Any) -> list[Any]:
        return list(self._rows(sql, *parameters))

    def _rows(self, sql: str, *parameters: Any) -> Iterator[Any]:
        """Reads no more rows than are asked for. A value is what `_READ_AS` says for the name of its column."""
        with self._guard():
            cursor = self._db.execute(sql, parameters)
            kinds = [_READ_AS.get(name) for name, *_ in cursor.description or ()]
            for row in cursor:
                yield tuple(map(_read_as, kinds, row))

    def _insert(self, sql: str, *parameters: Any) -> int:
        """Returns the id of the new row."""
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
                self._wait_for_locks(True)
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back already
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turns SQLite's errors into a HistoryError. Those of a damaged file may quote bytes that are no text."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise HistoryError(f"The chat history {self.path} {_DAMAGED[0]}.", _DAMAGED[1]) from error
        except sqlite3.Error as error:
            said = f"{error} {getattr(error, 'sqlite_errorname', '')}"  # errors of the module have no name
            problem = next((p for p in _PROBLEMS if p[0] in said), None)
            if problem is not None:
                self._wait_for_locks(problem[0] != "locked")
                raise HistoryError(f"The chat history {self.path} {problem[1]}.", problem[2]) from error
            message = f"The chat history {self.path} cannot be used: {error}."
            raise HistoryError(message, "Chats are not saved while that lasts.") from error

    def _wait_for_locks(self, is_patient: bool) -> None:
        """How long other programs' locks are waited for from now on."""
        if self._is_locked == is_patient:
            self._is_locked = not is_patient
            milliseconds = BUSY_TIMEOUT_MS if is_patient else LOCKED_TIMEOUT_MS
            with contextlib.suppress(sqlite3.Error):
                self._db.execute(f"PRAGMA busy_timeout = {milliseconds}")

    def _write_ahead(self, patience_ms: int) -> None:
        """Turns on the write-ahead log. Some network file systems refuse, and the history works without it. The busy
        timeout does not hold for this statement, and another process may be opening a new file too."""
        deadline = time.monotonic() + patience_ms / 1e3
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _check_triggers(self) -> None:
        """Raises HistoryError for triggers that are not ours: they could do anything whenever a message is written."""
        found = self._db.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'")
        if not _TRIGGERS.issuperset(" ".join(sql.split()) for (sql,) in found):
            raise HistoryError(
                f"The chat history {self.path} has triggers that are not orin-chat's.",
                f"Remove them, or move the file away to start an empty history; {_NOT_SAVED}",
            )

    def _migrate(self) -> None:
        def version() -> int:
            return int(self._db.execute("PRAGMA user_version").fetchone()[0])

        if version() == len(MIGRATIONS):
            return
        with self._transaction():  # asks again inside: another process may have been faster
            if version() > len(MIGRATIONS):
                raise HistoryError(
                    f"The chat history {self.path} was written by a newer version of orin-chat.",
                    f"Update orin-chat, or move the file away to start an empty history; {_NOT_SAVED}",
                )
            for number, statements in enumerate(MIGRATIONS[version() :], start=version() + 1):
                for statement in statements:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {number}")


def _read_as(kind: type | None, value: Any) -> Any:
    """The value of a column; one of another type, if the disk has changed it: what it may mean, or nothing."""
    if kind is None or isinstance(value, kind):
        return value
    if kind is str and isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if kind is not bytes and value is not None:
        with contextlib.suppress(ValueError, OverflowError):
            return kind(value)
    return kind()


def _create_private(path: Path) -> None:
    """Creates a file that only this user can read. SQLite gives its write-ahead log the same mode."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_NONBLOCK, 0o600))
        if path.stat().st_mode & 0o077:
            set_mode(path, 0o600)
        for beside in (path, *(path.with_name(path.name + end) for end in ("-journal", "-wal", "-shm"))):
            if beside.exists() and not beside.is_file():  # SQLite would wait for a pipe
                raise OSError(errno.EINVAL, f"{beside.name} is no file")
    except OSError as error:
        message = f"The chat history {path} cannot be created: {error.strerror or error}."
        raise HistoryError(message, f"Check the permissions of its folder; {_NOT_SAVED}") from error
