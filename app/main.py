"""The command line. A command's modules are imported when it runs, so that `--help` and mistakes are answered at
once."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from app.cli import options
from app.cli.left_threads import end_without_left_threads
from app.cli.meant import check_command
from app.cli.replaced import CUT, REPLACED, is_replaced
from engine.errors import BackendError, OrinError, UsageError
from engine.system.bytecode import forget_damaged, keep_bytecode
from engine.system.light_imports import import_msgspec
from engine.system.logs import screen_log
from widgets.terminal.stray_output import stray_errors_to, stray_output_to

if TYPE_CHECKING:
    from argparse import Namespace

    from app.chat.chat_options import OpenedChat
    from app.chat.configuration import Configuration
    from app.chat.history import History
    from app.chat.settings import Settings
    from engine.protocol.client import Engine, LocalEngine


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: the program's own) and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    _trace_no_memory()
    _let_nobody_else_write()
    keep_bytecode()
    gc.disable()  # what is imported stays: to look for garbage in it takes a sixth of the imports
    _open_streams()
    return end_without_left_threads(_exit_code(arguments))


def _exit_code(arguments: list[str]) -> int:
    try:
        try:
            return _run(arguments)
        finally:
            gc.enable()
            sys.stdout.flush()  # a full disk fails here, and not when the interpreter ends
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed stdout
        _discard(sys.stdout)
        return 0
    except OSError as error:  # a full disk, a device that is gone
        _discard(sys.stdout)
        return _print_error(OrinError(f"Input or output failed: {error.strerror or error}."))


def _run(arguments: list[str]) -> int:
    """Runs a command, or the chat. Raises OSError and KeyboardInterrupt; prints every other error."""
    as_json = "--json" in arguments
    try:
        if arguments and arguments[0] in COMMANDS:
            return COMMANDS[arguments[0]][0](arguments[1:])
        if arguments in (["preset"], ["presets"]):
            print(options.presets_listed())
            return 0
        if arguments:
            check_command(arguments, COMMANDS)
        return _chat(arguments)
    except OrinError as error:
        return _print_error(error, as_json=as_json)
    except OSError:
        raise
    except Exception as error:
        if "--verbose" in arguments:
            raise
        if is_replaced(error):
            return _print_error(REPLACED, as_json=as_json)
        if forget_damaged(error):
            return _print_error(CUT, as_json=as_json)
        internal = OrinError(
            f"Internal error: {type(error).__name__}: {error}.", "With --verbose it shows where."
        )
        return _print_error(internal, as_json=as_json)


def _trace_no_memory() -> None:
    """Neither here nor in processes that are started: a shell that has this variable for other programs would make a
    start take twenty times as long. `python -X tracemalloc` traces."""
    if os.environ.pop("PYTHONTRACEMALLOC", ""):
        import tracemalloc

        tracemalloc.stop()


def _let_nobody_else_write() -> None:
    """What is kept, of which some is run: with a umask of 0, as some containers have it, everyone could change it."""
    os.umask(os.umask(0o022) | 0o002)


def _collect_garbage() -> None:
    """Collects garbage from now on, but not in what has been imported."""
    gc.freeze()
    gc.enable()


def _open_streams() -> None:
    """Opens closed standard streams on /dev/null. Characters that a stream cannot encode become "?"."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (open until the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _discard(stream: TextIO) -> None:
    """Sends the rest of the buffer to /dev/null, so that the interpreter does not fail on it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_error(error: OrinError, *, as_json: bool = False) -> int:
    """Prints the error, as JSON on stdout or as text on stderr, and returns the exit code. Raises OSError for JSON."""
    from app.cli.oneshot import TextOutput, show_as_json
    from engine.protocol.events import Failed

    failed = Failed.from_error(error)
    if as_json:
        show_as_json(sys.stdout, failed)
        return failed.exit_code
    try:
        TextOutput(sys.stdout, sys.stderr).show(failed)
    except OSError:
        _discard(sys.stderr)
    return failed.exit_code


def _settings() -> Settings:
    """The user's settings. Prints a sentence on each key that cannot be used, which is left out. Before any other file
    is touched: says if folders that cannot be written are replaced."""
    settings, flaws = _settings_and_flaws()
    if flaws:
        from app.cli.progress import say

        say(sys.stderr, *flaws)
    return settings


def _settings_and_flaws() -> tuple[Settings, tuple[str, ...]]:
    from app.chat.settings import usable_settings
    from app.cli.progress import say
    from app.cli.stand_in import stand_in_where_needed

    if sentence := stand_in_where_needed():
        say(sys.stderr, sentence)
    settings = usable_settings()
    _raise_interrupts()
    return settings


def _raise_interrupts() -> None:
    """Ctrl+C is a KeyboardInterrupt from now on, not the end of the process (see `app/__main__`): something may have
    to be cleared up. msgspec crashes if one comes while it reads the types of what crosses to the engine."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# --- the chat, a single answer, the dashboard as text ------------------------------------------------------


def _chat(arguments: Sequence[str]) -> int:
    args = options.parse(arguments, {name: meaning for name, (_, meaning) in COMMANDS.items()})
    if args.engine is None:
        from engine.protocol.launch import launch

        import_msgspec()  # the engine's process, forked of this one, needs it too
        launch()
    settings, flaws = _settings_and_flaws()
    if flaws and (args.one_shot or args.once or args.plain):
        from app.cli.progress import say

        say(sys.stderr, *flaws)
    configuration = options.configuration(args, settings)
    if args.system is None and not args.raw:
        args.system = settings.system
    problem = ""  # why the built-in model answers instead of the user's
    if args.engine is None:
        from app.cli.model_file import adapters, draft_model, find_model

        is_chat = not args.one_shot and not args.once
        path, problem = find_model(args.model, settings, or_built_in=is_chat)
        beside = args.mmproj, draft_model(args, settings), adapters(args.lora)
        configuration = configuration.with_model(path, *beside)
    if args.once:
        import asyncio

        from app.screens.dashboard_text import run as print_dashboard

        _collect_garbage()
        return asyncio.run(print_dashboard(_engine(args, configuration), sys.stdout, sys.stderr))
    if args.one_shot:
        with stray_errors_to(screen_log()):
            return _answer(args, settings, configuration)
    return _converse(args, settings, configuration, problem, flaws)


def _engine(
    args: Namespace, configuration: Configuration, is_ready: Callable[[], None] = lambda: None
) -> Engine:
    """The engine that answers, not started yet: the server of --engine, or ours, which calls `is_ready` whenever it has
    started. Raises UsageError."""
    if args.engine is None:
        return _local_engine(configuration, is_ready)
    from engine.peers.openai_api import OpenAIEngine

    return OpenAIEngine(args.engine, api_key=options.key(args), model=args.model or "")


def _local_engine(configuration: Configuration, is_ready: Callable[[], None] = lambda: None) -> LocalEngine:
    from app.chat.speed_history import recording_engine

    return recording_engine(configuration.engine, is_ready, configuration.keep_warm_s)


def _answer(args: Namespace, settings: Settings, configuration: Configuration) -> int:
    """Prints a single answer."""
    import asyncio

    from app.chat.files import mentions
    from app.cli.model_file import greet, why_this
    from app.cli.oneshot import TextOutput, run, show_as_json
    from app.cli.progress import say
    from engine.protocol.events import Generate

    greet(args.model, configuration.engine.model_path, is_chat=False)
    beside = args.mmproj, args.draft, args.lora  # files of which one may be what fails
    with suppress(UsageError):  # too many
        for mention in mentions(" ".join(args.prompt))[:1]:
            say(
                sys.stderr,
                f"@{mention.name} goes as text.",
                "Files go along as arguments: orin-chat FILE PROMPT.",
            )
    files = options.attachments(args)
    request = Generate(
        request_id=1,
        prompt=options.prompt(args, files),
        sampling=configuration.sampling,
        max_tokens=args.max_tokens,
        logprobs=args.logprobs or 0,
        ignore_eos=args.ignore_eos,
    )
    as_text = TextOutput(
        sys.stdout,
        sys.stderr,
        verbose=args.verbose,
        sampling=request.sampling,
        files=files,
        why_this_model="" if args.engine or any(beside) else why_this(args.model, settings),
    )
    show = partial(show_as_json, sys.stdout) if args.json else as_text.show
    if not args.compare:
        tools = None
        if args.allow_tools:
            from app.cli.oneshot_tools import tools_for

            tools = tools_for(settings, args.allow_tools, configuration.engine.model_path, as_json=args.json)
        _collect_garbage()
        return asyncio.run(run(_engine(args, configuration), request, show, tools))
    from app.comparison.comparison_engine import compare_with_llama_server
    from app.comparison.report import report

    llama_server, key = args.llama_server or settings.llama_server, options.key(args)
    comparison = compare_with_llama_server(_local_engine(configuration), llama_server, api_key=key)
    _collect_garbage()
    code = asyncio.run(run(comparison, request, show))
    sys.stdout.write(report(comparison.view(), as_json=args.json))
    if code == 0 and comparison.view().right.problem:  # the report gives the reason
        raise BackendError("There is no comparison: llama.cpp did not answer.")
    return code


def _converse(
    args: Namespace, settings: Settings, configuration: Configuration, problem: str, flaws: Sequence[str]
) -> int:
    """Chats, line by line or on the full screen. `problem`: why the built-in model answers instead of the user's, or
    "". `flaws` are sentences about the settings."""
    from app.chat.chat_options import OpenedChat
    from app.chat.conversation import past_chat
    from app.chat.files import mention_of
    from app.chat.history import History
    from app.cli.model_file import greet, remember_last_model
    from app.cli.progress import say
    from app.tools.toolbox import Toolbox

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_terminal and not args.plain:
        raise UsageError("The chat needs a terminal.", "Give a PROMPT for a single answer, or use --plain.")
    in_lines = args.plain or os.environ.get("TERM") == "dumb"
    if not in_lines and not sys.stderr.isatty():  # Textual draws on stderr
        raise UsageError(
            "The screen is drawn on standard error, which goes elsewhere.",
            "Leave its redirection (2>) away, or use --plain.",
        )
    named = [*args.image, *args.files]
    draft = " ".join(map(mention_of, named)) + " " if named else ""
    history = History.open()
    try:
        chat = OpenedChat(
            chat_id=past_chat(history, args.chat, latest=args.resume),
            draft=draft,
            sampling=configuration.sampling,
            system=args.system,
            max_tokens=args.max_tokens,
            think=not args.no_think,
            tools=Toolbox(settings.mcp),
            allowed=args.allow_tools,
        )
        engine = _engine(
            args, configuration, lambda: None if problem else remember_last_model(args.model, settings)
        )
        if in_lines:
            if problem:
                say(sys.stderr, f"{problem}.")
            else:
                greet(args.model, configuration.engine.model_path, is_chat=True)
            with stray_errors_to(screen_log()):
                return _in_lines(args, settings, configuration, engine, history, chat)
        warning = " ".join((*flaws, problem and f"{problem} · Ctrl+L chooses another")).strip()
        return _on_screen(args, settings, configuration, engine, history, chat, warning)
    finally:
        history.close()


def _in_lines(
    args: Namespace,
    settings: Settings,
    configuration: Configuration,
    engine: Engine,
    history: History,
    chat: OpenedChat,
) -> int:
    """Chats line by line, on a terminal or from a pipe."""
    import asyncio

    from app.chat.commands import completions
    from app.lines.line_chat import LineChat
    from app.lines.line_input import FileLines, TerminalLines
    from app.lines.other_models import OtherModels

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    typed = is_terminal and TerminalLines(history.prompts(), completions(), vi=settings.keys == "vi")
    line_chat = LineChat(
        engine,
        history,
        typed or FileLines(sys.stdin, sys.stdout),
        sys.stdout,
        sys.stderr,
        models=None if args.engine else OtherModels(configuration.engine, settings),
        **chat,
    )
    _collect_garbage()
    return asyncio.run(line_chat.run())


def _on_screen(
    args: Namespace,
    settings: Settings,
    configuration: Configuration,
    engine: Engine,
    history: History,
    chat: OpenedChat,
    warning: str,
) -> int:
    """Chats on the full screen."""
    from app.chat.configuration import adapters_option
    from app.chat.settings import remember, remembered
    from app.chat.speed_history import recording_engine
    from app.screens.chat_app import ChatApp
    from app.screens.engine_setup import EngineSetup
    from widgets.chat.vi_keys import ViKeys

    setup = None
    if args.engine is None:
        setup = EngineSetup(
            configuration.engine,
            options.preset_name(args, settings),
            settings=settings,
            command_line=options.command_line(args),
            llama_server=args.llama_server or settings.llama_server,
            api_key=options.key(args),
            make=partial(recording_engine, keep_warm_s=configuration.keep_warm_s),
        )
        if args.compare:
            engine = setup.compare(engine)
    app = ChatApp(engine, history, setup=setup, theme=remembered("theme"), warning=warning, **chat)
    app.pictures.is_wanted = settings.thumbnails == "auto"
    app.transcript.wants_thumbnails = settings.thumbnails != "off"
    if settings.keys == "vi":
        app.prompt.vi = ViKeys(app.prompt)
    _collect_garbage()
    with stray_output_to(screen_log()):
        app.run()
    remember("theme", app.theme)
    named = adapters_option(setup.options) if setup else ""
    if not app.return_code and (way_back := app.session.conversation.way_back(named)):
        print(way_back)
    return app.return_code or 0


# --- commands ----------------------------------------------------------------------------------------------


def _command(name: str, arguments: Sequence[str]) -> int:
    match name:
        case "agents":
            from app.serve.agents_command import run
        case "bench":
            from app.bench.bench_command import run
        case "board":
            from app.bench.board_command import run
        case "doctor":
            from app.cli.doctor import run
        case "serve":
            from app.serve.serve_command import run
        case "stop":
            from app.cli.stop import run
        case "tokenize":
            from app.cli.tokenize import run
        case "tune":
            from app.cli.tune import run
        case _:
            from app.cli import models

            run = partial(models.run, name, COMMANDS[name][1])
    settings = _settings()
    _collect_garbage()
    return run(arguments, settings)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    name: (partial(_command, name), meaning)
    for name, meaning in {
        "agents": "set other programs up for orin-chat serve",
        "bench": "how fast models are on this machine, also beside llama.cpp",
        "board": "measure a Jetson beside the figures of before, with a report",
        "doctor": "what this machine has and lacks, and what to do about it",
        "models": "the models on this machine, and those known by name",
        "pull": "download a model, or verify and update it",
        "rm": "delete a downloaded model",
        "serve": "answer other programs, as OpenAI, Google and Ollama do",
        "show": "what a model's file says, and how fast it could be here",
        "stop": "end engines that --keep-warm has left running",
        "tokenize": "what a model's tokenizer makes of a text",
        "tune": "find the fastest way to run a model on this GPU, and keep it",
    }.items()
}
