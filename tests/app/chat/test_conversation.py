"""A conversation and its copy in the history."""

import os

from app.chat.conversation import Conversation
from app.chat.history import History
from widgets.chat.turn import Turn


def test_a_past_chat_that_was_only_read_keeps_its_place_in_the_list():
    history = History(":memory:")
    for name in ("first", "second"):
        conversation = Conversation(history)
        conversation.turns.append(Turn("user", name))
        conversation.turns.append(Turn("assistant", "Yes."))
        conversation.save("model")
    first, second = 1, 2
    assert [chat.id for chat in history.chats()] == [second, first]
    opened = Conversation(history, chat_id=first)
    opened.save("model")
    assert [chat.id for chat in history.chats()] == [second, first]
    opened.turns[-1].content += " And no."
    opened.save("model")
    assert [chat.id for chat in history.chats()] == [first, second]
    assert history.messages(first)[-1].message.content == "Yes. And no."


def test_a_chat_that_is_not_saved_has_the_title_of_its_prompt():
    conversation = Conversation(History(":memory:"))
    untitled = conversation.title
    conversation.turns.append(Turn("user", "\n Why is the sky blue?\nSay it in a line."))
    assert (untitled, conversation.title) == ("Untitled", "Why is the sky blue?")


def test_what_is_left_out_stays_in_the_history_and_is_not_read_when_the_chat_is_opened_again():
    history = History(":memory:")
    conversation = Conversation(history, "Be brief.")
    for text in ("a", "b", "c"):
        conversation.turns.append(Turn("user", text))
        conversation.turns.append(Turn("assistant", text.upper()))
    conversation.save("model")
    assert conversation.leave_out() == 4 and conversation.leave_out() == 0
    conversation.save("model")
    opened = Conversation(history, chat_id=conversation.chat_id)
    for chat in (conversation, opened):
        assert [message.content for message in chat.messages()] == ["Be brief.", "c", "C"]
        assert [turn.content for turn in chat.turns] == ["a", "A", "b", "B", "c", "C"]
        assert [bool(turn.note) for turn in chat.turns] == [False, False, False, True, False, False]
        assert chat.turns[3].note == "the model reads from here on: 4 turns before it are left out"
    assert len(opened.all_messages()) == 7, "an export has all"
    opened.cut(4)
    opened.turns.append(Turn("user", "d"))
    opened.save("model")
    assert [m.content for m in opened.messages()] == ["Be brief.", "d"], "the last prompt was edited"
    opened.cut(2)  # a prompt that is left out is edited: little is left, so the model reads all again
    opened.turns.append(Turn("user", "e"))
    opened.save("model")
    for chat in (opened, Conversation(history, chat_id=conversation.chat_id)):
        assert [m.content for m in chat.messages()] == ["Be brief.", "a", "A", "e"]
        assert not any(turn.note for turn in chat.turns)


def test_the_last_chat_is_the_last_also_after_the_clock_was_ahead(monkeypatch):
    history = History(":memory:")
    for hour in (3, 1, 2):
        monkeypatch.setattr("app.chat.history.time.time", lambda hour=hour: hour * 3600.0)
        conversation = Conversation(history)
        conversation.turns.append(Turn("user", "a"))
        conversation.save("model")
        assert history.chats()[0].id == conversation.chat_id
    Conversation(history, chat_id=1).save("model")
    history.update(1, "b")
    assert [chat.id for chat in history.chats()] == [1, 3, 2]


def test_prompts_of_two_programs_at_once_have_their_own_replies():
    """Each writes its prompt, and its reply when that is there: two chats in one stay in order."""
    history = History(":memory:")
    one = Conversation(history)
    for role, text in (("user", "a"), ("assistant", "A")):
        one.turns.append(Turn(role, text))
    one.save("model")
    other = Conversation(history, chat_id=one.chat_id)
    for chat, role, text in (
        (one, "user", "b"), (other, "user", "c"), (one, "assistant", "B"), (one, "user", "d"),
        (other, "assistant", "C"), (one, "assistant", "D"), (other, "user", "e"), (other, "assistant", "E"),
    ):  # fmt: skip
        chat.turns.append(Turn(role, text))
        chat.save("model")
    opened = Conversation(history, chat_id=one.chat_id)
    assert "".join(turn.content for turn in opened.turns) == "aAbBcCdDeE"
    assert all(turn.version == (1, 1) for turn in opened.turns)
    opened.cut(4)
    opened.turns.append(Turn("user", "f"))
    opened.save("model")
    again = Conversation(history, chat_id=one.chat_id)
    assert "".join(turn.content for turn in again.turns) == "aAbBf" and again.turns[-1].version == (2, 2)
    assert again.show_version(4, -1)
    again = Conversation(history, chat_id=one.chat_id)
    assert "".join(turn.content for turn in again.turns) == "aAbBcCdDeE"


def test_after_a_full_disk_earlier_turns_are_saved_too():
    history = History(":memory:")
    conversation = Conversation(history)
    prompt, answer = Turn("user", "a", finished=False), Turn("assistant", "", finished=False)
    conversation.turns.append(prompt)
    conversation.turns.append(answer)
    conversation.save("model")
    pages = history._db.execute("PRAGMA page_count").fetchone()[0]
    history._db.execute(f"PRAGMA max_page_count = {pages}")
    prompt.finished, answer.content, answer.finished = True, "A" * 100_000, True
    conversation.save("model")
    for turn in (Turn("user", "b"), Turn("assistant", "B")):
        conversation.turns.append(turn)
        conversation.save("model")
        assert conversation.problem
    history._db.execute("PRAGMA max_page_count = 1000000")
    conversation.save("model")
    stored = history.messages(conversation.chat_id)
    assert [each.message.content for each in stored] == ["a", "A" * 100_000, "b", "B"]
    assert all(each.finished for each in stored) and conversation.problem is None


def test_a_chat_that_another_program_deletes_is_saved_again_once_it_goes_on(tmp_path):
    path = tmp_path / "history.sqlite3"
    conversation = Conversation(History(path), "Be brief.")
    conversation.turns += [Turn("user", "a"), Turn("assistant", "A")]
    conversation.save("model")
    for delete in (lambda: History(path).delete(conversation.chat_id), path.unlink):
        delete()
        conversation.save("model")  # nothing is new
        assert History(path).chat_ids() == []
        conversation.turns += [Turn("user", "b"), Turn("assistant", "B")]
        conversation.save("model")
        assert conversation.problem is None
        [chat] = History(path).chat_ids()
        said = [stored.message.content for stored in History(path).messages(chat)]
        assert said == ["Be brief.", *(turn.content for turn in conversation.turns)]


def test_a_chat_that_was_left_is_not_open_any_more(monkeypatch):
    conversation = Conversation(history := History(":memory:"))
    conversation.turns.append(Turn("user", "Why tides?"))
    conversation.save("model")
    for is_open in True, False:
        with monkeypatch.context() as another:
            another.setattr("app.chat.history.os.getpid", os.getppid)
            assert history.open_elsewhere() == ({1} if is_open else set())
        conversation.leave()
