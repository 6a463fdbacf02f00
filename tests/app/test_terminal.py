"""Every way in which text from elsewhere is printed: a terminal shows the text, and nothing else happens to it."""

from __future__ import annotations

import asyncio
import io
import json
import sys

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.console import Console

import engine.protocol.client
from app.bench.results import Result
from app.bench.tables import to_markdown, to_tables
from app.chat.commands import completions
from app.chat.history import History
from app.cli import doctor
from app.cli.oneshot import TextOutput
from app.cli.start_lines import show_start
from app.comparison.report import report
from app.lines.line_chat import LineChat
from app.lines.line_input import FileLines, TerminalLines
from app.main import main
from app.serve.lines import Lines
from engine.doctor import Section, bad
from engine.doctor.checks import CheckResult
from engine.protocol.events import Failed, Loading, Message
from tests import synthetic
from tests.app.fake_engine import FakeEngine, reply
from tests.app.hostile_text import ATTACK, HOSTILE_READY, NAME, SEQUENCES, TYPED
from tests.app.terminal import Terminal, shown
from tests.generated_model import write
from widgets.dashboard.comparison_data import ComparisonData, Difference, EngineAnswer
from widgets.dashboard.request_list import Handled

FAILED = Failed(kind="model", message=ATTACK, hint=ATTACK)


@pytest.mark.parametrize("sequence", SEQUENCES, ids=ascii)
def test_the_terminal_notices(sequence):
    """The checks below are able to fail."""
    text = f"before{sequence}after"
    terminal = Terminal.showing(text)
    assert terminal.effects() or terminal.text() != [shown(text)] or len(terminal.looks()) > 1


def letters(lines):
    """Without white space, for a terminal breaks long lines."""
    return "".join("".join(lines).split())


# --- surfaces: each returns all that is printed ------------------------------------------------------------


def of_command(capfd, *arguments):
    main([str(argument) for argument in arguments])
    return "".join(capfd.readouterr())


def one_answer(home, capfd):
    (home / "model.gguf").write_bytes(b"GGUF")
    ask = ("--model", home / "model.gguf", "--system", TYPED, TYPED)
    return of_command(capfd, "--verbose", *ask) + of_command(capfd, "--json", *ask)


def failures(home, capfd):
    (home / ".config/orin-chat").mkdir(parents=True)
    (home / ".config/orin-chat/settings.toml").write_text(f"{json.dumps(TYPED)} = {json.dumps(TYPED)}\n")
    messages = io.StringIO()
    for event in (Loading(done_bytes=1, total_bytes=2), HOSTILE_READY, FAILED):
        TextOutput(messages, messages, verbose=True).show(event)
    commands = (
        ("--model", TYPED, "Hi"),
        ("--preset", TYPED),
        (f"--{TYPED}",),
        ("show", TYPED),
        ("pull", TYPED),
    )
    return messages.getvalue() + "".join(of_command(capfd, *command) for command in commands)


def model_lists(home, capfd):
    path = write(home / f"{NAME}.gguf", keys={TYPED: TYPED, "x": TYPED}, template=TYPED)
    (home / ".config/orin-chat").mkdir(parents=True)
    (home / ".config/orin-chat/settings.toml").write_text(
        f"[names]\n{json.dumps(NAME)} = {json.dumps(str(path))}\n"
    )
    commands = (
        ("models",),
        ("models", "--json"),
        ("show", path),
        ("show", "--json", path),
        ("tokenize", "--model", path, TYPED),
    )
    return "".join(of_command(capfd, *command) for command in commands)


def a_chat_in_lines(home, capfd):
    history, out = History(home / "history.sqlite3"), io.StringIO()
    chat_id = history.new_chat(ATTACK)
    history.set_system(chat_id, ATTACK)
    for role in ("user", "assistant"):
        history.append(chat_id, Message(role=role, content=ATTACK, thinking=ATTACK))
    said = ATTACK.replace("\r", "").replace("\n", "")
    lines = [
        "/chats",
        f"/open {chat_id}",
        f"/chats {said}",
        said,
        "/system",
        f"/system {said}",
        "/stats",
        "/set",
    ]
    lines += [
        f"/set top_k {said}",
        f"/{said}",
        f"/open {said}",
        "/model",
        f"/save {home}/{NAME}",
        "/edit",
        "Hi",
        "/regenerate",
    ]
    lines += [f"/save {said}", "/summary", f"/delete {chat_id}", "y"]
    engine = FakeEngine(reply(ATTACK, ATTACK), start=(HOSTILE_READY,))
    source = FileLines(io.StringIO("\n".join(lines)), out)
    asyncio.run(LineChat(engine, history, source, out, out).run())
    history.close()
    return out.getvalue() + (home / NAME).read_text()


def the_doctor(home, capfd):
    section = Section(title="Machine", findings=[bad(ATTACK, ATTACK, ATTACK)])
    out = Console(file=io.StringIO(), width=900, highlight=False)
    doctor.show(section, out)
    trial = CheckResult(backend=ATTACK, ok=False, text=ATTACK)
    found = doctor.Report(orin_chat="", at="", sections=[section], trials=[trial], variables={"CC": ATTACK})
    doctor.write(found, home / "report.json")
    asyncio.run(show_start(FakeEngine(start=[FAILED]), lambda line: out.print(line, markup=False)))
    return out.file.getvalue() + doctor.as_plain_text(found) + (home / "report.json").read_text()


def the_server(home, capfd):
    lines = Lines(ATTACK)
    for event in (Loading(done_bytes=1, total_bytes=2), HOSTILE_READY, FAILED):
        lines.show(event)
    lines.handled(Handled("", ATTACK, ATTACK, 200, reply("")[-1]))
    lines.handled(Handled("", ATTACK, ATTACK, 500, problem=ATTACK))
    return "".join(capfd.readouterr())


def tables(home, capfd):
    result = Result(
        engine=ATTACK,
        model_filename=ATTACK,
        model_type=ATTACK,
        cpu_info=ATTACK,
        gpu_info=ATTACK,
        preset=ATTACK,
    )
    out = Console(file=io.StringIO(), width=900, highlight=False)
    for part in to_tables([result]):
        out.print(part)
    side = EngineAnswer(ATTACK, about=ATTACK, state=ATTACK, text=ATTACK, problem=ATTACK)
    view = ComparisonData(
        side, side, asked=ATTACK, complete=True, remark=ATTACK, difference=Difference(1, ATTACK, ATTACK)
    )
    return out.file.getvalue() + to_markdown([result]) + report(view) + report(view, as_json=True)


@pytest.mark.parametrize(
    "surface",
    [one_answer, failures, model_lists, a_chat_in_lines, the_doctor, the_server, tables],
    ids=lambda surface: surface.__name__,
)
def test_a_terminal_shows_what_is_printed_and_does_nothing_else(surface, home, capfd, monkeypatch):
    behaviour = {"rate": 0, "load_s": 0, "prefill_s": 0, "text": TYPED, "name": TYPED}
    monkeypatch.setattr(
        engine.protocol.client, "LocalEngine", lambda options, **_: synthetic.engine(**behaviour)
    )
    monkeypatch.setattr("app.cli.show._bandwidth", lambda backend: ("", None, ATTACK))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    text = surface(home, capfd)
    assert text.count("attack") > 5
    terminal = Terminal.showing(text, lines=text.count("\n") + len(text) // 100)
    assert terminal.effects() == {}
    assert len(terminal.looks()) == 1
    assert letters(terminal.text()) == letters([shown(text)])


async def test_a_prompt_to_edit(monkeypatch):
    """What the library that edits lines writes to the terminal, with what comes from elsewhere."""
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    output = Vt100_Output(out, lambda: Size(200, 300), default_color_depth=ColorDepth.DEPTH_1_BIT)
    with create_pipe_input() as keys, create_app_session(input=keys, output=output):
        lines = TerminalLines([ATTACK], completions())
        keys.send_text("\x1b[A\r")
        first = await lines.read("")
        keys.send_text("\r")
        assert await lines.read(ATTACK) == first
    terminal = Terminal(300, 200)
    terminal.feed(out.getvalue())
    assert letters([shown(first)]) in letters(terminal.text())
    assert terminal.effects() == {}
