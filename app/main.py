"""The command line: what the arguments ask for is imported when it starts, so that `--help` and mistakes are
answered at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from app.cli import options
from engine.errors import OrinError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from app.chat.configuration import Configuration
    from app.chat.history import History
    from app.chat.session import ChatOptions
    from app.chat.settings import Settings
    from engine.client import Engine, LocalEngine
    from engine.peers.openai_api import OpenAIEngine

INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: the program's own) and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    _open_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # what is left may not find room: said here, and not when the interpreter ends
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has had enough
        _give_up(sys.stdout)
        return 0
    except OSError as error:  # a full disk, a device that is gone
        _give_up(sys.stdout)
        return _complain(OrinError(f"Input or output failed: {error.strerror or error}."))


def _run(arguments: list[str]) -> int:
    """Does what `arguments` ask for. Raises what only input and output, or Ctrl-C, can bring about."""
    try:
        if arguments and arguments[0] in COMMANDS:
            return COMMANDS[arguments[0]][0](arguments[1:])
        return _chat(arguments)
    except OrinError as error:
        return _complain(error, as_json="--json" in arguments)
    except OSError:
        raise
    except Exception as error:
        if "--verbose" in arguments:
            raise
        what = f"Internal error: {type(error).__name__}: {error}."
        return _complain(OrinError(what, "With --verbose it shows where."), as_json="--json" in arguments)


def _open_streams() -> None:
    """Makes input and output always possible: what is closed is empty or leads nowhere, and what cannot be
    shown is "?"."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (open until the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _give_up(stream: TextIO) -> None:
    """What is left in the buffer must not fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(error: OrinError, *, as_json: bool = False) -> int:
    """Prints what is wrong and returns the exit code. As JSON it is output, and writing it may raise OSError."""
    from app.cli.oneshot import JsonOutput, TextOutput
    from engine.events import Failed

    failed = Failed.from_error(error)
    if as_json:
        JsonOutput(sys.stdout).show(failed)
        return failed.exit_code
    try:
        TextOutput(sys.stdout, sys.stderr).show(failed)
    except OSError:
        _give_up(sys.stderr)
    return failed.exit_code


def _chat(arguments: Sequence[str]) -> int:
    """A single answer, the dashboard as text, or the chat."""
    given = options.parse(arguments, {name: meaning for name, (_, meaning) in COMMANDS.items()})
    settings = _settings()
    configuration = options.configuration(given, settings)
    if given.system is None and not given.raw:
        given.system = settings.system
    if given.once:
        from app.screens.dashboard_text import main as print_dashboard

        return print_dashboard(_engine(given, configuration), sys.stdout, sys.stderr)
    greeting = options.greeting(given, configuration)
    if greeting and (given.one_shot or given.plain):
        print(f"orin-chat: {greeting}", file=sys.stderr, flush=True)
    return (_answer if given.one_shot else _converse)(given, settings, configuration)


def _engine(given: Namespace, configuration: Configuration) -> LocalEngine | OpenAIEngine:
    """The engine that answers, not started: ours, or a server that is set up elsewhere. Raises UsageError."""
    if given.engine is not None:
        from engine.peers.openai_api import OpenAIEngine

        return OpenAIEngine(given.engine, api_key=options.key(given), model=given.model or "")
    from app.chat.speed_history import recording_engine

    return recording_engine(configuration.engine)


def _settings() -> Settings:
    """The user's settings. If they cannot be used, prints a warning and returns the defaults."""
    from app.chat.settings import Settings, load_settings

    try:
        return load_settings()
    except UsageError as error:
        _complain(UsageError(error.message, "The defaults are used instead."))
        return Settings()


def _answer(given: Namespace, settings: Settings, configuration: Configuration) -> int:
    import asyncio

    from app.cli.oneshot import JsonOutput, TextOutput, run
    from engine.events import Generate

    request = Generate(
        request_id=1,
        prompt=options.prompt(given),
        sampling=configuration.sampling,
        max_tokens=given.max_tokens,
        logprobs=given.logprobs or 0,
        ignore_eos=given.ignore_eos,
    )
    output = (
        JsonOutput(sys.stdout) if given.json else TextOutput(sys.stdout, sys.stderr, verbose=given.verbose)
    )
    engine = _engine(given, configuration)
    if not given.compare:
        return asyncio.run(run(engine, request, output))
    from app.comparison.comparison_engine import compare_with_llama_server
    from app.comparison.report import report
    from engine.client import LocalEngine

    assert isinstance(engine, LocalEngine)
    llama_server = given.llama_server or settings.llama_server
    comparison = compare_with_llama_server(engine, llama_server, api_key=options.key(given))
    code = asyncio.run(run(comparison, request, output))
    sys.stdout.write(report(comparison.view(), as_json=given.json))
    return code


def _converse(given: Namespace, settings: Settings, configuration: Configuration) -> int:
    from app.chat.history import History
    from app.chat.session import ChatOptions

    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not terminal and not given.plain:
        raise UsageError("The chat needs a terminal.", "Give a PROMPT for a single answer, or use --plain.")
    in_lines = given.plain or os.environ.get("TERM") == "dumb"
    if not in_lines and not sys.stderr.isatty():  # where Textual draws
        raise UsageError(
            "The screen is drawn on standard error, which goes elsewhere.",
            "Leave its redirection (2>) away, or use --plain.",
        )
    history = History.open()
    try:
        chat_id = _past_chat(given, history)
        chat = ChatOptions(
            sampling=configuration.sampling,
            system=given.system,
            max_tokens=given.max_tokens,
            think=not given.no_think,
        )
        engine = _engine(given, configuration)
        if in_lines:
            return _converse_in_lines(engine, history, terminal, chat_id, chat)
        return _converse_on_screen(given, settings, configuration, engine, history, chat_id, chat)
    finally:
        history.close()


def _past_chat(given: Namespace, history: History) -> int | None:
    """The id of the chat to continue, None for a new one. Raises UsageError if there is no such chat."""
    from app.chat.conversation import require_chat

    chat_id: int | None = given.chat
    if given.resume:
        recent = history.chats(limit=1)
        if not recent:
            raise UsageError("There is no chat to go on with.", "Leave --continue away to start one.")
        chat_id = recent[0].id
    if chat_id is not None:
        require_chat(history, chat_id)
    return chat_id


def _converse_in_lines(
    engine: Engine, history: History, terminal: bool, chat_id: int | None, chat: ChatOptions
) -> int:
    import asyncio

    from app.lines.line_chat import LineChat, words
    from app.lines.line_input import FileLines, TerminalLines

    lines = TerminalLines(history.prompts(), words()) if terminal else FileLines(sys.stdin, sys.stdout)
    return asyncio.run(
        LineChat(engine, history, lines, sys.stdout, sys.stderr, chat_id=chat_id, **chat).run()
    )


def _converse_on_screen(
    given: Namespace,
    settings: Settings,
    configuration: Configuration,
    engine: Engine,
    history: History,
    chat_id: int | None,
    chat: ChatOptions,
) -> int:
    from app.chat.settings import remember, remembered
    from app.screens.chat_app import ChatApp
    from app.screens.engine_setup import EngineSetup

    setup = None
    if given.engine is None:
        setup = EngineSetup(
            configuration.engine,
            options.preset_name(given, settings),
            settings=settings,
            command_line=options.command_line(given),
            llama_server=given.llama_server or settings.llama_server,
            api_key=options.key(given),
        )
        if given.compare:
            engine = setup.compare(engine)
    app = ChatApp(engine, history, setup=setup, theme=remembered("theme"), chat_id=chat_id, **chat)
    app.run()
    remember("theme", app.theme)
    return app.return_code or 0


def _command(name: str, arguments: Sequence[str]) -> int:
    """Runs a command. Its module is imported only now."""
    settings = _settings()
    match name:
        case "bench":
            from app.bench.bench_command import run as bench

            return bench(arguments, settings)
        case "board":
            from app.bench.board_command import run as board

            return board(arguments, settings)
        case "doctor":
            from app.cli.doctor import run as doctor

            return doctor(arguments, settings)
        case "tokenize":
            from app.cli.tokenize import run as tokenize

            return tokenize(arguments, settings)
        case "tune":
            from app.cli.tune import run as tune

            return tune(arguments, settings)
    from app.cli.models import run as models

    return models(name, COMMANDS[name][1], arguments, settings)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    name: (partial(_command, name), meaning)
    for name, meaning in {
        "bench": "how fast models are on this machine, also beside llama.cpp",
        "board": "measure a Jetson beside the figures of before, with a report",
        "doctor": "what this machine has and lacks, and what to do about it",
        "models": "the models on this machine, and those known by name",
        "pull": "download a model, or verify and update it",
        "rm": "delete a downloaded model",
        "show": "what a model's file says, and how fast it could be here",
        "tokenize": "what a model's tokenizer makes of a text",
        "tune": "find the fastest way to run a model on this GPU, and keep it",
    }.items()
}
