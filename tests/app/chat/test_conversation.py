"""A conversation and its copy in the history."""

from app.chat.conversation import Conversation
from app.chat.history import History
from app.chat.turn import Turn


def test_a_past_chat_that_was_only_read_keeps_its_place_in_the_list():
    history = History(":memory:")
    for name in ("first", "second"):
        conversation = Conversation(history)
        conversation.add(Turn("user", name))
        conversation.add(Turn("assistant", "Yes."))
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
