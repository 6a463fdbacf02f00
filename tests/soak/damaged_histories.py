"""Histories that a disk or another program has changed: other values and types in any column, tables that are gone,
changed bytes."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from msgspec import msgpack

from app.chat.conversation import Conversation, past_chat
from app.chat.export import to_markdown
from app.chat.history import History
from app.screens.pages.chats import time_label
from engine.errors import OrinError
from engine.protocol.events import Message
from tests.soak.counts import Counts
from tests.soak.drawn import drawn
from widgets.chat.turn import Attachment, Call, PictureFile
from widgets.chat.turn_lines import TurnLines

HANGS_S = 5.0
COLUMNS = {
    "chats": ("title", "model", "created", "updated", "first_read"),
    "messages": (
        "chat_id",
        "role",
        "content",
        "thinking",
        "finished",
        "writer",
        "files",
        "shown",
        "parent",
        "calls",
    ),
    "drafts": ("writer", "text"),
    "open_chats": ("writer", "chat_id"),
    "message_pictures": ("message_id", "place", "hash"),
    "pictures": ("hash", "data"),
}
_FILES = (
    '[{"name":"a","path":"b","text":3}]',
    '[{"name":"a","path":"b","text":"c","first":-9223372036854775808,"last":9223372036854775807,"tokens":-1}]',
    '[{"name":"\\ud800","path":"\\u0000","text":"c","picture":{"data":"","width":-1,"height":0,"thumbnail":"AAAA",'
    '"thumbnail_width":-3}}]',
    '[{"name":"a","path":"b","text":"","picture":{"data":"AA==","thumbnail":"AAAA","thumbnail_width":1}}]',
    '[{"id":"","name":"\\u001b[2J","arguments":"[","state":"open","result":""}]',
    '[{"id":"1","name":"","arguments":"","state":"running"}]',
)
_VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(-3, 9), st.floats(), st.binary(max_size=9),
    st.text(max_size=9).map(lambda text: text.encode("utf-8", "replace").decode()),
    st.sampled_from((*_FILES, "", "[", "nan", "user", "assistant", "system", "tool", "1e999", "0x10", "\x00")),
)  # fmt: skip
_CHANGES = st.lists(
    st.tuples(
        st.sampled_from([(table, column) for table, columns in COLUMNS.items() for column in columns]),
        st.integers(1, 8),
        _VALUES,
    ),
    min_size=1,
    max_size=6,
)
_BYTES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)), max_size=4)
_TABLES = st.none() | st.sampled_from([*COLUMNS, "messages_text", "messages_text_data"])


def run(tries: int, number: int = 0) -> Counts:
    """Each use of a history must end with what can be read of it, or with a sentence, and none may hang."""
    counts = Counts("histories with other values, without tables, and with changed bytes")
    with tempfile.TemporaryDirectory() as folder:
        good, path = Path(folder, "good.sqlite3"), Path(folder, "history.sqlite3")
        _write(good)

        @drawn(tries, number, _CHANGES, st.sampled_from([None] * 4 + ["bytes", "table"]), _BYTES, _TABLES)
        def use(changes: list[Any], kind: str | None, pieces: list[Any], table: str | None) -> None:
            for each in path.parent.glob("history*"):
                each.unlink()
            shutil.copy(good, path)
            if kind == "bytes":
                _change_bytes(path, pieces)
            else:
                _change(path, changes, table if kind else None)
            started = time.perf_counter()
            try:
                counts.survived[_use(path)] += 1
            except Exception as error:
                counts.lost[f"{type(error).__name__}: {str(error)[:80]}"] += 1
            ms = (time.perf_counter() - started) * 1e3
            if ms > HANGS_S * 1e3:
                counts.lost[f"{ms:.0f} ms"] += 1
            counts.took(ms)

        use()
    return counts


def _write(path: Path) -> None:
    """A history with all that one can have. Its columns take NULL."""
    history = History(path)
    picture = PictureFile(data=b"GIF89a", width=1, height=1, thumbnail=b"abc", thumbnail_width=1)
    files = (
        Attachment(name="a.py", path="/a.py", text="x = 1"),
        Attachment(name="b.gif", path="/b", text="", picture=picture),
    )
    calls = (Call(id="1", name="web.search", arguments="{}", state="returned", result="found"),)
    for title in ("", "One", "Two"):
        chat = history.new_chat("model")
        history.set_system(chat, "Be brief.")
        for text in ("one", "two", "three"):
            prompt = history.append(chat, Message(role="user", content=text), files=files)
            history.append(chat, Message(role="assistant", content=text * 9), text != "three", calls=calls)
        history.truncate(chat, prompt)
        history.append(chat, Message(role="assistant", content="another version"), after=prompt)
        history.rename(chat, title)
    history.set_first_read(chat, prompt)
    history.save_draft("a draft")
    history.set_open(chat)
    db = history._db
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("UPDATE open_chats SET writer = 4194305")  # processes that have ended
    db.execute("UPDATE drafts SET writer = 4194305")
    db.execute("PRAGMA writable_schema = ON")
    db.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
    db.execute("PRAGMA journal_mode = DELETE")
    history.close()


def _change(path: Path, changes: list[Any], table: str | None) -> None:
    db = sqlite3.connect(path)
    for (changed, column), row, value in changes:
        where = f"rowid = (SELECT rowid FROM {changed} LIMIT 1 OFFSET {row - 1})"
        with contextlib.suppress(sqlite3.Error):  # of columns that have each value once
            db.execute(f"UPDATE {changed} SET {column} = ? WHERE {where}", (value,))
    db.commit()
    if table:
        with contextlib.suppress(sqlite3.Error):
            db.execute(f"DROP TABLE {table}")
    db.close()


def _change_bytes(path: Path, pieces: list[Any]) -> None:
    data = bytearray(path.read_bytes())
    for place, piece in pieces:
        start = int(place * len(data))
        data[start : start + len(piece)] = piece
    path.write_bytes(data)


def _use(path: Path) -> str:
    """All that a chat does with a history. Returns how it ended."""
    history, refused = History.open(path), 0
    refused += history.problem is not None

    @contextlib.contextmanager
    def may_refuse() -> Any:
        nonlocal refused
        try:
            yield
        except OrinError:
            refused += 1

    with may_refuse():
        past_chat(history, None, latest=True)
    for work in (
        history.prompts,
        history.take_draft,
        history.take_left_open,
        history.open_elsewhere,
        lambda: history.chats(query="three"),
        lambda: history.chats(query="三"),
        lambda: [time_label(chat.updated, 0.0) for chat in history.chats()],
        lambda: msgpack.encode(history.chats()),
        lambda: history.save_draft("x"),
    ):
        with may_refuse():
            work()
    for chat in (1, 2, 3):
        with may_refuse():
            _talk(history, chat)
    for chat in (1, 3):
        with may_refuse():
            history.delete(chat)
    history.close()
    return "with a sentence" if refused else "read"


def _talk(history: History, chat: int) -> None:
    """Opens a chat, shows it, goes through its versions, and goes on with it."""
    conversation = Conversation(history, chat_id=chat)
    msgpack.encode(conversation.messages())
    to_markdown(conversation.title, "model", conversation.all_messages())
    conversation.way_back()
    history.found_in(chat, "three")
    for index, turn in enumerate(conversation.turns):
        TurnLines(turn, index, unfolded=True).lay_out(40)
    for index in range(len(conversation.turns)):
        for step in (-1, 1):
            conversation.show_version(index, step)
    conversation = Conversation(history, chat_id=chat)
    conversation.cut(max(0, len(conversation.turns) - 1))
    conversation.save("model")
    history.append(chat, Message(role="user", content="more"))
    history.update(history.append(chat, Message(role="assistant", content="an")), "answer")
    history.rename(chat, "a title")
