"""Files in a prompt: which are meant, what is read of them, and what is refused."""

import io
import os
import shlex

import pytest

from app.chat import files
from app.chat.file_reader import FileReader, Takes, TokenCounter
from app.chat.history import History
from engine.errors import UsageError
from engine.formats.gguf import GGUF
from engine.formats.templates.template import ChatTemplate
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Message
from presets import guide_path
from widgets.chat.turn import Attachment, Turn


def read_all(prompt):
    return tuple(map(files.read, files.mentions(prompt)))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "notes.txt").write_text("".join(f"line {n}\n" for n in range(1, 51)))
    (tmp_path / "src/main.py").write_text("print('hi')\n")
    (tmp_path / "src/other.py").write_text("pass\n")
    (tmp_path / "two words.md").write_text("# Two\n")
    return tmp_path


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("What is in @notes.txt?", ["notes.txt"]),
        ("(@notes.txt), and @src/main.py.", ["notes.txt", "src/main.py"]),
        ("@src/*.py", ["src/main.py", "src/other.py"]),
        ("@**/*.py", ["src/main.py", "src/other.py"]),
        ("@notes.txt:10-40 and @notes.txt:3", ["notes.txt:10-40", "notes.txt:3"]),
        ('see @"two words.md"', ["two words.md"]),
        ("@notes.txt @notes.txt", ["notes.txt"]),
        ("mail me@notes.txt or @nobody, @app.route('/')", []),
        ("@\0 @~no-such-user/x @" + "x" * 5000, []),
    ],
)
def test_what_is_meant(prompt, names):
    assert [mention.name for mention in files.mentions(prompt)] == names


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("What is in @nosuchfile?", "@nosuchfile names no file, and went as text"),
        ("@a.txt @b.txt @c.txt @d.txt", "@a.txt, @b.txt, @c.txt and 1 more name no file, and went as text"),
        ('@notes.txt and @"no such.md"', "@no such.md names no file, and went as text"),
        ("(@notes.txt), me@example.org @", ""),
    ],
)
def test_what_names_no_file_is_said(prompt, said):
    assert FileReader(TokenCounter(lambda: None)).missing(prompt) == said


def test_lines_of_a_file():
    [part] = read_all("@notes.txt:10-12")
    assert part.text == "line 10\nline 11\nline 12\n"
    assert read_all("@notes.txt:50-99")[0].text == "line 50\n"
    with pytest.raises(UsageError, match="no such lines"):
        read_all("@notes.txt:60")


def test_a_line_that_is_longer_than_a_context_is_one_line(folder):
    (folder / "bundle.js").write_bytes(b"x" * (2 * files.LIMIT_BYTES) + b"\nlast\n")
    assert read_all("@bundle.js:2-3")[0].text == "last\n"


def test_what_is_no_text_is_refused_in_words(folder):
    (folder / "a.zip").write_bytes(b"PK\3\4\x1a\n\0\0\0\0")
    (folder / "latin").write_bytes(b"caf\xe9")
    (folder / "long").write_bytes(b"a" * (files.LIMIT_BYTES + 1))
    os.mkfifo(folder / "pipe")
    for name, reason in {
        "a.zip": r"a\.zip is no text and no picture \(10 B\)",
        "latin": "is no text",
        "long": "no context holds that much",
        "pipe": "a pipe or a device",
        "src": "src is a folder",
    }.items():
        with pytest.raises(UsageError, match=reason):
            read_all(f"@{name}")
    (folder / "wide.txt").write_bytes("naïve".encode("utf-16"))
    assert read_all("@wide.txt")[0].text == "naïve"


def test_files_without_an_end_are_left(folder, monkeypatch):
    monkeypatch.setattr(files, "_MOST_SKIPPED", 1000)
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"no such lines in its first 1\.00 kB"):
        read_all("@sparse:999999")

    class OfTheSystem(io.FileIO):
        """As /proc/self/pagemap, whose size is zero, or with None /proc/kmsg, where nothing is for now."""

        def readinto(self, room):
            return len(room) if is_endless else None

    (folder / "of-the-system").touch()
    monkeypatch.setattr(os, "fdopen", lambda number, *_: io.BufferedReader(OfTheSystem(number)))
    is_endless = False
    assert read_all("@of-the-system")[0].text == ""
    is_endless = True
    with pytest.raises(UsageError, match=r"has more than 4\.19 MB: no context holds that much"):
        read_all("@of-the-system")


def test_a_prompt_of_mentions_looks_for_some_thousand_files(monkeypatch):
    looked = []
    monkeypatch.setattr(files, "meanings", lambda text: looked.append(text) or [])
    prompt = "@a.py... @a.py... " + " ".join(f"@nosuch{n}" for n in range(3000))
    assert len(files.missing(prompt)) == 3001
    assert looked[:5] == ["a.py...", "a.py..", "a.py.", "a.py", "nosuch0"]
    assert len(looked) == files.MOST_LOOKUPS


def test_files_that_do_not_fit_are_refused_with_their_tokens():
    class Words(TokenCounter):
        def __call__(self, file):
            return len(file.quoted.split())

    reader = FileReader(Words(lambda: None))
    [file] = reader.read_all("@notes.txt", room=200)
    assert file.tokens == 103 and file.label == "notes.txt 103 tokens"
    with pytest.raises(
        UsageError, match=r"notes\.txt has 103 tokens, and the context has room for 90\."
    ) as said:
        reader.read_all("@notes.txt", room=90)
    assert said.value.hint == "@notes.txt:1-39 takes as many lines as fit."
    assert reader.read_all("@notes.txt:1-39", room=90)
    assert reader.chips("@notes.txt @src") == [("notes.txt 103 tokens", True), ("src is a folder.", False)]
    assert reader.chips("@notes.txt", Takes(room=90)) == [
        ("notes.txt 103 tokens: the context has room for 90", False)
    ]


def test_a_file_that_changes_is_noticed(folder):
    read = read_all("@notes.txt @src/main.py")
    assert files.changed(read) == []
    (folder / "src/main.py").write_text("print('hello')\n")
    (folder / "notes.txt").unlink()
    assert [file.name for file in files.changed(read)] == ["src/main.py"]


def test_pasted_paths_become_mentions(folder):
    assert files.pasted(f"{folder}/notes.txt\n") == "@notes.txt "
    assert files.pasted(f"'{folder}/two words.md'") == '@"two words.md" '
    assert files.pasted(f"file://{folder}/two%20words.md") == '@"two words.md" '
    assert files.pasted(f"{folder}/notes.txt {folder}/src/main.py") == "@notes.txt @src/main.py "
    urls = f"file://{folder}/two%20words.md\r\nfile://localhost{folder}/notes.txt\r\n"
    assert files.pasted(urls) == '@"two words.md" @notes.txt '
    many = f"{folder}/notes.txt\n" * 11
    for text in (
        "",
        "\n",
        many,
        "/nothing/here",
        "cat /etc/passwd",
        f"{folder}/notes.txt\nis it",
        "/",
        "'/",
        "file://other/a",
    ):
        assert files.pasted(text) == text


@pytest.mark.parametrize("name", ["it's.txt", 'a "b".md', "me@home.txt", 'it\'s "so".txt', "x's.txt:3"])
def test_names_with_quotation_marks(folder, name):
    path = folder / name.removesuffix(":3")
    path.write_text("x\n" * 9)
    text = files.mention_of(name)
    assert [mention.name for mention in files.mentions(f"See {text}, please.")] == [name]
    assert not files.missing(text)
    [named] = files.mentions(files.pasted(shlex.quote(str(path))))
    assert named.path == path
    assert files.completions(text[: -2 - 2 * name.endswith(":3")])[1] == [files.mention_of(path.name)]


def test_names_are_completed():
    assert files.completions("see @no") == (4, ["@notes.txt"])
    assert files.completions("@src/") == (0, ["@src/main.py", "@src/other.py"])
    assert files.completions("@wor") == (0, ['@"two words.md"'])
    assert files.completions("@main") == (0, []) and files.completions("a@no") == (-1, [])
    assert files.completions("@")[1][0] == "@src/"


def test_the_model_reads_files_before_the_prompt_and_they_cannot_leave_their_fence():
    file = Attachment(name="a.md", path="/a.md", text="```\ncode\n```\n")
    assert Turn("user", "What is it?", files=(file,)).messages[0].content == (
        "a.md:\n````\n```\ncode\n```\n````\n\nWhat is it?"
    )


def test_text_of_a_file_becomes_no_control_token():
    with GGUF(guide_path()) as model:
        tokenizer = Tokenizer(model)
        template = ChatTemplate.from_gguf(model, tokenizer)
    special = set(tokenizer.special_tokens.values())
    plain = template.encode([Message(role="user", content="Hello")]).ids
    attack = "".join(tokenizer.special_tokens)
    file = Attachment(name="a.txt", path="/a.txt", text=attack)
    ids = template.encode([Turn("user", "Hello", files=(file,)).messages[0]]).ids
    assert len(special) > 2 and [id for id in ids if id in special] == [id for id in plain if id in special]


def test_files_are_kept_with_the_chat(tmp_path):
    history = History(tmp_path / "history.sqlite3")
    [file] = read_all("@notes.txt:1-2")
    chat_id = history.new_chat("m")
    history.append(chat_id, Message(role="user", content="@notes.txt:1-2 what?"), files=[file])
    [stored] = History(tmp_path / "history.sqlite3").messages(chat_id)
    assert stored.files == (file,) and stored.message.content == "@notes.txt:1-2 what?"
    assert history.chats(query="line") == [], "a search finds what was written"


def test_a_folder_that_is_gone_has_no_files(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PWD", str(gone))
    gone.rmdir()
    assert files.missing("See @notes.txt") == ["@notes.txt"] and files.completions("@no") == (-1, [])
    assert files.shown(tmp_path / "a.txt") == str(tmp_path / "a.txt")
