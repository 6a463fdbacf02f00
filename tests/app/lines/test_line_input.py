"""Where lines of the line mode come from: files, keys and what completes them."""

import asyncio
import io
import os
import signal
import sys
import threading

import pytest
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output

from app.chat import files
from app.chat.commands import completions
from app.lines.line_input import CommandCompleter, FileLines, TerminalLines
from tests.app.hostile_text import ATTACK, acting
from tests.app.lines.test_line_chat import chat, contents, history

__all__ = ["chat", "history"]


async def test_lines_of_a_file():
    echo = io.StringIO()
    lines = FileLines(io.StringIO("one\n\ntwo"), echo)
    assert [await lines.read("") for _ in range(3)] == ["one", "", "two"]
    with pytest.raises(EOFError):
        await lines.read("")
    assert echo.getvalue() == "> one\n> \n> two\n"


async def test_no_line_of_a_file_acts_on_the_terminal_that_it_is_echoed_to():
    echo = io.StringIO()
    assert await FileLines(io.StringIO(ATTACK), echo).read("") == ATTACK
    assert echo.getvalue().startswith("> attack") and acting(echo.getvalue()) == []


@pytest.fixture
def keys(monkeypatch):
    """A terminal on which text can be typed."""
    monkeypatch.setenv("TERM", "xterm-256color")
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


async def test_keys_of_the_prompt(keys):
    lines = TerminalLines(["an earlier one"], completions())
    keys.send_text("one\x1b\rtwo\r")  # Alt+Enter
    assert await lines.read("") == "one\ntwo"
    keys.send_text("\x1b[A\x1b[A\x1b[A\r")  # Up to the first line, then to earlier prompts
    assert await lines.read("") == "an earlier one"
    keys.send_text(" now\r")
    assert await lines.read("a draft") == "a draft now"
    keys.send_text("given up\x03")  # Ctrl-C
    with pytest.raises(KeyboardInterrupt):
        await lines.read("")
    keys.send_text("\x1b[A\r")
    assert await lines.read("") == "given up"
    keys.send_text("\x04")  # Ctrl-D
    with pytest.raises(EOFError):
        await lines.read("")


async def test_ctrl_z_suspends_the_program_and_is_no_text(keys, monkeypatch):
    suspended = []
    monkeypatch.setattr(
        Application, "suspend_to_background", lambda app: suspended.append(app.current_buffer.text)
    )
    keys.send_text("be\x1afore\r")
    assert await TerminalLines([], completions()).read("") == "before"
    assert suspended == ["be"]


async def test_no_text_that_is_to_be_edited_acts_on_the_terminal(keys):
    lines = TerminalLines([ATTACK], completions())
    keys.send_text("\x1b[A\r")
    assert acting(await lines.read("")) == []
    keys.send_text("\r")
    assert acting(await lines.read(ATTACK)) == []
    keys.send_text("\x1b[200~one\rtwo\x1b]0;x\x07\x9b\u202e\x1b[201~\r")
    assert await lines.read("") == "one\ntwo]0;x"
    keys.send_text("\x1b[31mred\x1b[0m\r")  # without the marks of a paste
    assert await asyncio.wait_for(lines.read(""), 60) == "red"


async def test_a_dumb_terminal_is_shown_the_draft_and_sent_no_escape_sequences(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Vt100_Output(sys.stdout, lambda: Size(24, 80))
    with create_pipe_input() as keys, create_app_session(input=keys, output=terminal):
        keys.send_text("new\r")
        assert await TerminalLines([], completions()).read("a draft") == "new"
    assert capsys.readouterr().out.splitlines() == ["a draft", "> new"]


def test_completion_of_commands():
    def complete(text):
        completer = CommandCompleter(completions())
        return [c.text for c in completer.get_completions(Document(text), CompleteEvent())]

    assert complete("/s") == ["summary", "shorten", "save", "stats", "system", "set"]
    assert complete("/set top") == ["top_k", "top_p"]
    assert complete("/think ") == ["on", "off"]
    assert complete("hello /s") == complete("/nope x") == complete("") == []


async def test_files_go_along_on_a_terminal_and_not_from_a_file_of_lines(
    chat, history, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("The tide is high.\n")
    (tmp_path / "b.bin").write_bytes(b"\0")
    c = await chat("See @notes.txt", "See @b.bin", is_terminal=True)
    assert "[notes.txt 18 characters]" in c.out and "b.bin is no text" in c.err
    [file] = history.messages(1)[0].files
    assert (file.name, file.text) == ("notes.txt", "The tide is high.\n")
    assert c.drafts[2] == "See @b.bin", "it is not lost"
    await chat("See @notes.txt")
    assert history.messages(2)[0].files == ()


async def test_ctrl_c_gives_up_a_file_whose_disk_does_not_answer(chat, history, monkeypatch):
    answers = threading.Event()

    def read(mention):
        os.kill(os.getpid(), signal.SIGINT)
        answers.wait()

    monkeypatch.setattr(files, "read", read)
    c = await chat("See @/", answers.set, "Yes?", is_terminal=True)
    assert c.drafts[:2] == ["", "See @/"]
    assert contents(history) == [("user", "Yes?"), ("assistant", "Yes.\n")]


def test_enter_waits_for_no_folder_whose_disk_does_not_answer(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(files, "completions", lambda line: answers.wait())
    assert not [*CommandCompleter({}).get_completions(Document("@/a"), CompleteEvent())]
    answers.set()


def test_completion_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    completer = CommandCompleter(completions())
    [found] = completer.get_completions(Document("see @no"), CompleteEvent())
    assert (found.text, found.start_position) == ("@notes.txt", -3)
