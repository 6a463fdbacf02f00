import contextlib
import multiprocessing
import os
import sqlite3
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.chat import history_database
from app.chat.history import History
from app.chat.history_database import MIGRATIONS, HistoryError
from app.screens.pages.chats import time_label
from engine.protocol.events import Message
from tests.thorough import THOROUGH


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, thinking: str = "") -> Message:
    return Message(role="assistant", content=text, thinking=thinking)


@pytest.fixture
def history(tmp_path: Path):
    history = History(tmp_path / "data" / "history.sqlite3")
    yield history
    history.close()


def contents(history: History, chat_id: int) -> list[str]:
    return [stored.message.content for stored in history.messages(chat_id)]


def test_a_chat_comes_back_as_it_was(history):
    chat_id = history.new_chat("qwen3")
    history.append(chat_id, Message(role="system", content="Be brief."))
    history.append(chat_id, user("Hello,\nworld"))
    reply_id = history.append(chat_id, assistant(""), finished=False)
    history.update(reply_id, "Hi", "hm", finished=False)
    history.update(reply_id, "Hi!", "hm…", finished=True)

    again = History(history.path)
    stored = again.messages(chat_id)
    assert [s.message for s in stored] == [
        Message(role="system", content="Be brief."),
        user("Hello,\nworld"),
        assistant("Hi!", "hm…"),
    ]
    assert all(s.finished for s in stored)
    [chat] = again.chats()
    assert (chat.title, chat.model, chat.message_count, chat.excerpt) == ("Hello,", "qwen3", 3, "Hi!")


def test_truncate_keeps_what_comes_before_and_other_chats(history):
    first, second = history.new_chat("m"), history.new_chat("m")
    ids = [history.append(first, user(str(i))) for i in range(4)]
    history.append(second, user("other"))
    history.truncate(first, ids[1])
    assert contents(history, first) == ["0", "1"]
    history.truncate(first, 0)
    assert contents(history, first) == []
    assert contents(history, second) == ["other"]


def test_a_message_comes_last_whatever_was_written_meanwhile(history):
    chat_id = history.new_chat("m")
    first = history.append(chat_id, user("1"))
    history.append(chat_id, assistant("2"), after=first)
    other = History(history.path)
    other.append(chat_id, user("3"))  # by another program, which the first one does not know of
    history.append(chat_id, user("4"))
    history.append(chat_id, user("1, answered again"), after=first)
    assert contents(other, chat_id) == ["1", "1, answered again", "2", "3", "4"]
    other.close()
    history.truncate(chat_id, first)
    history.append(chat_id, user("5"))
    history.append(history.new_chat("m"), user("elsewhere"))
    history.append(chat_id, user("6"))
    assert contents(history, chat_id) == ["1", "5", "6"]


def test_a_chat_that_takes_the_id_of_a_deleted_one_begins_anew(history):
    deleted = history.new_chat("m")
    history.append(deleted, user("Hi"))
    history.delete(deleted)
    assert history.new_chat("m") == deleted
    first = history.append(deleted, user("1"))
    history.truncate(deleted, 0)
    history.append(deleted, user("1, edited"))
    assert history.versions(deleted).mark(first)[1] == 2


def test_a_system_prompt_comes_first_whenever_it_is_written(history):
    chat_id, other = history.new_chat("m"), history.new_chat("m")
    history.append(chat_id, user("Is it?"))
    history.append(chat_id, assistant("Half an ans"), finished=False)
    history.set_system(chat_id, "Be brief.")
    history.set_system(other, "Be kind.")
    history.set_system(chat_id, "Be exact.")
    assert contents(history, chat_id) == ["Be exact.", "Is it?", "Half an ans"]
    [summary] = history.chats(query="exact")
    assert summary.excerpt == "Be exact."
    assert history.chats(query="brief") == []
    assert next(chat for chat in history.chats() if chat.id == chat_id).excerpt == "Half an ans"
    history.truncate(chat_id, 0)
    assert contents(history, chat_id) == ["Be exact."]
    history.set_system(chat_id, "")
    assert contents(history, chat_id) == []
    assert contents(history, other) == ["Be kind."]


def test_message_ids_are_never_used_again(history):
    chat_id = history.new_chat("m")
    last = history.append(chat_id, user("a"))
    history.truncate(chat_id, 0)
    assert history.append(chat_id, user("b")) > last


def test_search_finds_words_in_messages_and_titles(history):
    sea, bread = history.new_chat("m"), history.new_chat("m")
    history.append(sea, user("Tell me of the Océan and its tides"))
    history.append(bread, user("How long does sourdough rise?"))
    history.append(bread, assistant("Until it has doubled: four hours."))
    found = lambda query: {chat.id for chat in history.chats(query=query)}
    assert found("ocean") == {sea}, "diacritics and case do not matter"
    assert found("doub four") == {bread}, "the beginning of a word is enough"
    assert found("ocean sourdough") == set()
    history.rename(sea, "100% water_")
    assert found("100% water") == {sea}
    assert found("0_ water") == set(), "% and _ are no wildcards"
    assert "doubled" in history.chats(query="doubled")[0].excerpt
    history.update(history.messages(bread)[1].id, "Until tomorrow")
    assert found("doubled") == set()
    history.delete(bread)
    assert found("sourdough") == set()


def test_scripts_without_spaces_are_searched_anywhere(history):
    tides, other = history.new_chat("m"), history.new_chat("m")
    history.append(tides, user("請告訴我關於海洋和潮汐的事情,謝謝 Wikipedia"))
    history.append(other, user("麵包要發酵多久?"))
    found = lambda query: [chat.id for chat in history.chats(query=query)]
    assert found("潮汐") == found("潮汐 海洋") == found("潮汐 wiki") == [tides]
    assert found("潮汐 麵包") == []
    assert "潮汐" in history.chats(query="潮汐")[0].excerpt


def test_the_excerpt_of_a_search_is_around_the_word(history):
    chat_id = history.new_chat("m")
    long = "The beginning of a long answer. " * 20
    history.append(chat_id, assistant(f"{long} In the Océan\x1b\n\nthere are tides. {long}"))
    history.append(chat_id, assistant("The end."))
    [chat] = history.chats(query="ocean")
    assert chat.excerpt.startswith("…") and "In the Océan\x1b there are tides." in chat.excerpt
    assert len(chat.excerpt) <= 201
    assert history.chats()[0].excerpt == "The end."
    history.rename(chat_id, "salt water")
    assert history.chats(query="salt")[0].excerpt == "The end.", "only the title has the word"


def test_summaries_are_of_the_chats_asked_for(history):
    ids = [history.new_chat("m") for _ in range(3)]
    for chat_id in ids:
        history.append(chat_id, user(f"prompt {chat_id}"))
    history.delete(ids[1])
    assert history.chat_ids() == [ids[2], ids[0]]
    assert [chat.title for chat in history.summaries(ids)] == ["prompt 1", "prompt 3"]


def test_a_chat_without_messages_is_not_listed(history):
    history.new_chat("m")
    assert history.chats() == []


@settings(max_examples=60 if THOROUGH else 10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=40)
    | st.sampled_from(['"', "NEAR(a b)", "a AND", "col:", "-x", "'", "*", "a*b", "\ud800"])
)
def test_no_text_breaks_storing_or_searching(text):
    history = History(":memory:")
    chat_id = history.new_chat(text)
    history.append(chat_id, user(text))
    history.rename(chat_id, text)
    history.chats(query=text)
    assert contents(history, chat_id) == [text.encode("utf-8", "replace").decode()]


def test_titles(history):
    chat_id = history.new_chat("m")
    history.append(chat_id, user("\n  " + "word " * 40))
    assert len(history.chats()[0].title) <= 60
    history.rename(chat_id, " Mine ")
    assert history.chats()[0].title == "Mine"
    history.rename(chat_id, "")
    assert history.chats()[0].title.startswith("word word")


def test_only_this_user_can_read_it(history):
    path = Path(history.path)
    history.new_chat("m")
    mode = lambda p: stat.S_IMODE(p.stat().st_mode)
    assert mode(path.parent) == 0o700
    assert {mode(file) for file in path.parent.iterdir()} == {0o600}, "the write-ahead log too"


def test_a_lax_mode_is_mended(tmp_path):
    path = tmp_path / "h.sqlite3"
    path.touch(0o644)
    History(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- crashes ---------------------------------------------------------------------------------------------

CRASH = """
    import os, signal, sys
    from app.chat.history import History
    from engine.protocol.events import Message
    history = History(sys.argv[1])
    chat_id = history.new_chat("m")
    history.append(chat_id, Message(role="user", content="Why?"))
    history.save_draft("half a thou")
    reply = history.append(chat_id, Message(role="assistant", content="Because"), finished=False)
    history.update(reply, "Because of", finished=False)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_its_reply_marked_as_interrupted(history):
    subprocess.run([sys.executable, "-c", textwrap.dedent(CRASH), history.path], check=False)
    [chat] = history.chats()
    assert chat.interrupted
    assert chat.title == "Why?"
    assert contents(history, chat.id) == ["Why?", "Because of"]
    assert history.take_draft() == "half a thou"
    assert history.take_draft() == ""
    history.update(history.messages(chat.id)[-1].id, "Because of you.", finished=True)
    assert not history.chats()[0].interrupted


def test_a_reply_in_progress_is_not_interrupted(history):
    chat_id = history.new_chat("m")
    history.append(chat_id, assistant("so f"), finished=False)
    assert not history.chats()[0].interrupted


def test_a_draft_of_a_living_process_is_its_own(history):
    history.save_draft("mine")
    assert history.take_draft() == ""
    history.save_draft("")


def test_prompts_are_recalled_without_repetition(history):
    chat_id = history.new_chat("m")
    for text in ("a", "b", "a"):
        history.append(chat_id, user(text))
    assert history.prompts() == ["b", "a"]
    assert history.prompts(limit=1) == ["a"]


def _write_many(path: str, count: int) -> None:
    history = History(path)
    chat_id = history.new_chat(str(os.getpid()))
    for i in range(count):
        history.append(chat_id, user(f"message {i}"))


def test_two_processes_write_at_once_from_the_first_moment(tmp_path):
    path = str(tmp_path / "h.sqlite3")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(path, 40)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(chat.message_count for chat in History(path).chats()) == [40, 40, 40]


def test_a_new_file_that_another_process_is_writing_is_waited_for(tmp_path, monkeypatch):
    """SQLite does not wait where it switches to the write-ahead log."""
    path = tmp_path / "h.sqlite3"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE theirs (x)")
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("app.chat.history_database.time.sleep", lambda _: other.execute("COMMIT"))
    history = History(path)
    assert history.new_chat("m")
    history.close()
    other.close()


# --- files that cannot be used ---------------------------------------------------------------------------


def test_a_damaged_file_is_one_sentence_and_the_chat_goes_on_in_memory(tmp_path):
    path = tmp_path / "h.sqlite3"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(HistoryError, match="damaged") as raised:
        History(path)
    assert raised.value.hint
    history = History.open(path)
    assert history.problem is not None
    assert history.problem.hint.endswith("until then chats are not saved.")
    chat_id = history.new_chat("m")
    in_memory = history.append(chat_id, user("still works"))
    assert history.chats(query="works")[0].id == chat_id
    assert not history.open_again() and history.chats(query="works")[0].id == chat_id
    assert path.read_bytes().startswith(b"not a database"), "what was there is left alone"
    path.unlink()
    file = History(path)
    message_id = file.append(of_file := file.new_chat("m"), user("in the file"))
    assert history.open_again()
    history.delete(chat_id)  # in a list from before
    assert [message.id for message in history.messages(of_file)] == [message_id] != [in_memory]
    history.close()
    file.close()


def test_damage_found_later_is_one_sentence(history):
    chat_id = history.new_chat("m")
    for i in range(200):
        history.append(chat_id, user(f"text {i} " * 20))
    history.close()
    raw = bytearray(Path(history.path).read_bytes())
    raw[4096:40960] = b"\xff" * (40960 - 4096)
    Path(history.path).write_bytes(raw)
    with pytest.raises(HistoryError, match="damaged"):
        again = History(history.path)
        again.append(again.new_chat("m"), user("x"))
        again.chats()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HistoryError, match="cannot be created"):
        History(tmp_path / "file" / "history.sqlite3")
    with pytest.raises(HistoryError, match="cannot be"):
        History(tmp_path)


def test_a_history_that_another_program_has_locked_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(history_database, "BUSY_TIMEOUT_MS", 30)
    history = History(tmp_path / "h.sqlite3")
    patience = lambda: history._run("PRAGMA busy_timeout")
    chat_id = history.new_chat("m")
    with contextlib.closing(sqlite3.connect(history.path, isolation_level=None)) as other:
        for _ in range(2):
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(HistoryError, match="locked") as raised:
                history.append(chat_id, user("while it is locked"))
            assert "tries again" in raised.value.hint and patience() == [(20,)]
            other.execute("COMMIT")
            history.append(chat_id, user("then"))
            assert patience() == [(30,)]
        history.close()
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        assert History.open(history.path).problem.hint == "The next message tries again."


@pytest.mark.parametrize("end", ["", "-journal", "-wal"])
def test_a_pipe_in_place_of_a_file_of_the_history_is_not_waited_for(tmp_path, end):
    os.mkfifo(tmp_path / f"h.sqlite3{end}")
    with pytest.raises(HistoryError, match=f"cannot be created: h.sqlite3{end} is no file"):
        History(tmp_path / "h.sqlite3")


def test_a_read_only_history_is_one_sentence(history):
    chat_id = history.new_chat("m")
    history._db.execute("PRAGMA query_only = ON")
    with pytest.raises(HistoryError, match="cannot be written"):
        history.append(chat_id, user("x"))
    assert history.messages(chat_id) == []


def test_a_full_disk_is_one_sentence_and_mends_itself(history):
    chat_id = history.new_chat("m")
    pages = history._db.execute("PRAGMA page_count").fetchone()[0]
    history._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(HistoryError, match="disk is full"):
        history.append(chat_id, user("x" * 100_000))
    history._db.execute("PRAGMA max_page_count = 1000000")
    history.append(chat_id, user("x" * 100_000))
    assert len(history.messages(chat_id)) == 1


def test_a_newer_schema_is_refused(history):
    history._db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(HistoryError, match="newer version") as refused:
        History(history.path)
    assert refused.value.hint.endswith("chats are not saved.")


def test_each_migration_is_applied_once(tmp_path, monkeypatch):
    path = tmp_path / "h.sqlite3"
    history = History(path)
    history.append(history.new_chat("m"), user("old"))
    history.close()
    monkeypatch.setattr(
        "app.chat.history_database.MIGRATIONS", (*MIGRATIONS, ("ALTER TABLE chats ADD COLUMN preset TEXT",))
    )
    for _ in range(2):
        again = History(path)
        assert again.chats()[0].title == "old"
        columns = [row[1] for row in again._db.execute("PRAGMA table_info(chats)")]
        assert columns.count("preset") == 1
        again.close()


def test_a_migration_that_fails_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("app.chat.history_database.MIGRATIONS", (("CREATE TABLE a (x)", "nonsense"),))
    with pytest.raises(HistoryError):
        History(tmp_path / "h.sqlite3")
    assert sqlite3.connect(tmp_path / "h.sqlite3").execute(
        "SELECT count(*) FROM sqlite_master"
    ).fetchone() == (0,)


def test_what_the_disk_has_changed_in_a_chat_costs_no_more_than_that(history):
    chat_id = history.new_chat("m")
    history.append(chat_id, user("Hello"))
    history.append(chat_id, assistant("Hi"))
    changes = "calls = '[{', files = 3, content = x'48ff', writer = 1e30", "files = '{}', role = 'x'"
    for id, change in enumerate(changes, start=1):
        history._db.execute(f"UPDATE messages SET {change} WHERE id = {id}")
    history._db.execute("UPDATE chats SET first_read = 'x', updated = 1e300")
    [stored] = history.messages(chat_id)
    assert stored.message.content == "H\ufffd" and stored.files == stored.calls == ()
    [chat] = history.chats()
    assert chat.message_count == 2 and time_label(chat.updated, 0.0) and history.first_read(chat_id) == 0


def test_messages_that_the_disk_has_changed_into_a_cycle_are_shown(history):
    chat_id = history.new_chat("m")
    for text in ("one", "two"):
        history.append(chat_id, user(text))
        history.append(chat_id, assistant(text))
    history._db.execute("UPDATE messages SET parent = 5 - id")
    assert [stored.message.content for stored in history.messages(chat_id)] == ["one", "one", "two", "two"]
    versions = history.versions(chat_id)
    assert versions.mark(1) == versions.mark(3) == (1, 1)
    assert versions.through(1) == [1, 4] and versions.through(2) == [2, 3]


def test_triggers_of_others_are_not_run(history):
    path = Path(history.path)
    history.close()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TRIGGER x BEFORE INSERT ON messages BEGIN SELECT raise(IGNORE); END")
    assert "triggers that are not orin-chat's" in History.open(path).problem.message


def test_a_damaged_file_whose_name_of_a_table_is_no_text(history):
    history.new_chat("m")
    history._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    history.close()
    path = Path(history.path)
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE chats", b"CREATE \x94\x94\x94 chats"))
    assert History.open(path).problem.message == f"The chat history {path} is damaged."
