"""Pictures of a chat: read from files, kept with the chat, sent to models that see."""

import sqlite3

import pytest

from app.chat.conversation import Conversation
from app.chat.export import to_markdown
from app.chat.file_reader import FileReader, ModelFiles, Takes, TokenCounter
from app.chat.history import History
from engine.errors import OrinError
from tests import generated_encoder, generated_model
from tests.pictures import plain_picture
from widgets.chat.turn import Turn


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sea.png").write_bytes(plain_picture("navy"))
    (tmp_path / "cut off.jpg").write_bytes(plain_picture("lime", kind="JPEG")[:300])
    (tmp_path / "notes.txt").write_text("Waves.\n")
    return tmp_path


@pytest.fixture
def reader():
    class Seven(TokenCounter):
        def __call__(self, file):
            return None if file.picture else 7

    return FileReader(Seven(lambda: None))


def test_a_picture_is_read_with_a_small_one_or_refused(reader):
    sea, notes = reader.read_all("@sea.png and @notes.txt")
    assert sea.label == "sea.png 60×40" and notes.label == "notes.txt 7 tokens"
    assert sea.picture.data == plain_picture("navy") and sea.picture.thumbnail_width == 48
    assert sea.picture.thumbnail == bytes((0, 0, 128)) * 48 * 32
    with pytest.raises(OrinError, match=r"cut off\.jpg: The picture is damaged"):
        reader.read_all('@"cut off.jpg"')


def test_tokens_of_pictures_are_counted_for_the_model_in_use(folder):
    model = str(generated_model.write(folder / "model.gguf", architecture="qwen3"))
    files = ModelFiles(model, str(generated_encoder.write(folder / "mmproj.gguf", "qwen3vl_merger")))
    reader = FileReader(TokenCounter(lambda: files))
    assert reader.chips("@sea.png", Takes(room=3)) == [
        ("sea.png 60×40 70 tokens: the context has room for 3", False)
    ]
    files = ModelFiles(model)
    assert reader.read_all("@sea.png")[0].tokens is None


def test_what_was_sent_can_be_sent_again_when_its_file_is_gone(reader, folder):
    sent = reader.read_all("@sea.png")
    (folder / "sea.png").unlink()
    assert reader.read_all("@./sea.png") == ()
    reader.remember(sent)
    assert reader.read_all("@./sea.png") == sent


def test_pictures_are_kept_with_the_chat_each_once_and_go_with_it(reader, folder):
    history = History(folder / "history.sqlite3")
    notes, sea = reader.read_all("@notes.txt @sea.png")
    for text in ("one", "two"):
        conversation = Conversation(history)
        conversation.turns += [Turn("user", text, files=(notes, sea)), Turn("assistant", "Yes.")]
        conversation.save("model")
    assert conversation.seen(0, 256) is conversation.turns[0] and conversation.seen(0, 256) is None
    conversation.save("model")
    opened = Conversation(history, chat_id=2)
    assert opened.turns[0].files[1].label == "sea.png 60×40 256 tokens"
    [message, _] = opened.messages()
    assert message.pictures[0].data == plain_picture("navy") and "Waves." in message.content

    opened.cut(0)  # the prompt is edited: another version
    opened.turns.append(Turn("user", "three", files=(sea,)))
    opened.save("model")
    assert opened.show_version(0, -1)
    assert Conversation(history, chat_id=2).messages()[0].pictures == message.pictures

    count = "SELECT count(*) FROM pictures"
    with sqlite3.connect(folder / "history.sqlite3") as database:
        assert database.execute(count).fetchone() == (1,)
        history.delete(1)
        assert database.execute(count).fetchone() == (1,)
        history.delete(2)
        assert database.execute(count).fetchone() == (0,)
    history.close()


def test_a_model_that_does_not_see_gets_the_names_of_earlier_pictures(reader):
    conversation = Conversation(History(":memory:"))
    conversation.turns += [
        Turn("user", "Look.", files=reader.read_all("@sea.png")),
        Turn("assistant", "Blue."),
        Turn("user", "Sure?"),
    ]
    messages = conversation.messages(sees=False)
    assert messages[0].content == "[picture: sea.png]\n\nLook." and not messages[0].pictures
    assert conversation.messages()[0].pictures


def test_an_export_links_pictures(reader, folder):
    [file] = reader.read_all("@sea.png")
    text = to_markdown("Sea", "model", [Turn("user", "Look.", files=(file,)).messages[0]])
    assert f"![sea.png](<{folder}/sea.png>)\n\nLook." in text
    (folder / "sea.png").unlink()
    text = to_markdown("Sea", "model", [Turn("user", "Look.", files=(file,)).messages[0]])
    assert "![sea.png](data:image/png;base64,iVBOR" in text
