"""The options of a chat or a single answer: read, checked, joined with the settings."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from app.chat.configuration import Configuration
    from app.chat.settings import Settings
    from engine.events import Chat, RawText, TokenIds

BACKENDS = ("auto", "CPU", "CUDA", "NV")
STDIN_LIMIT_BYTES = 16 << 20

EPILOG = """\
With a PROMPT, or text on standard input, the answer goes to standard output and
the program ends. Both are joined: cat report.txt | orin-chat "Summarize this."
A PROMPT that is the name of a command comes after --.

commands (each has its own --help):
{commands}

exit codes:
  0 done              1 internal error       2 wrong usage      3 model file
  4 backend, engine   5 context is full    130 interrupted    143 terminated
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations that raises UsageError instead of ending the program."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Raises OSError, which ArgumentParser's own would keep to itself."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[0].upper()}{message[1:]}.", f"{self.prog} --help lists the options.")


def parse(arguments: Sequence[str], commands: dict[str, str]) -> argparse.Namespace:
    """The options in `arguments`; `one_shot` says whether they ask for a single answer. `commands` are listed
    in the help. Raises UsageError for what cannot be."""
    parser = _parser(commands)
    options = parser.parse_args(arguments)
    if len(options.prompt) > 1:
        if options.prompt[0] in commands and "--" not in arguments:
            parser.error(f"the command comes first: orin-chat {options.prompt[0]} ...")
        parser.error("the prompt is one argument: put it in quotes")
    asked = bool(options.prompt) or options.prompt_ids is not None
    options.one_shot = asked or (not options.plain and not options.once and _stdin_has_text())
    _refuse_contradictions(options)
    return options


def _parser(commands: dict[str, str]) -> Parser:
    listed = "\n".join(f"  {name:<16} {meaning}" for name, meaning in commands.items())
    parser = Parser(
        prog="orin-chat",
        usage="orin-chat [OPTION...] [PROMPT]\n       orin-chat COMMAND ...",
        description="Chat with a GGUF model in the terminal, and see what the machine does.",
        epilog=EPILOG.format(commands=listed),
    )
    add = parser.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="answer this and end; without it, open the chat")
    add("--version", action=_Version, help="show the version and exit")
    add("--verbose", action="store_true", help="show on standard error what the engine did")

    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        metavar="NAME",
        help="qwen3:0.6b, hf.co/user/repository, a GGUF file (the last one, or orin-guide)",
    )
    add("--preset", metavar="NAME", help="how the engine is set up: cpu, cuda, nv, safe or one of your own")
    add_backend(add)
    add("--context", type=positive, metavar="N", help="context in tokens (the model's, within bounds)")
    add("--beam", type=count, metavar="N", help="width of the search for faster kernels (0)")

    add = parser.add_argument_group("other engines").add_argument
    add("--engine", metavar="URL", help="a server with OpenAI's protocol, http://host:8000/v1, answers")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the server's key")
    add("--compare", action="store_true", help="llama.cpp answers too, on the same file, beside it")
    add("--llama-server", metavar="PATH", help="its llama-server, or the address of one that runs")

    add = parser.add_argument_group("chat").add_argument
    add("--system", metavar="TEXT", help="the system prompt")
    add("--no-think", action="store_true", help="ask a thinking model not to think")
    add("--once", action="store_true", help="measure the engine, print the dashboard as text, and leave")
    add("--plain", action="store_true", help="chat line by line, without the full screen")
    add("--continue", dest="resume", action="store_true", help="go on with the most recent chat")
    add("--chat", type=count, metavar="ID", help="go on with this past chat (--plain lists them: /chats)")

    add = parser.add_argument_group("sampling (settings.toml may change these defaults)").add_argument
    add("--temperature", type=float, metavar="T", help="0 always takes the most probable token (0.7)")
    add("--top-k", type=int, metavar="K", help="only the K most probable tokens; 0 is all (40)")
    add("--top-p", type=float, metavar="P", help="only the first that add up to probability P (0.95)")
    add("--min-p", type=float, metavar="P", help="only those P times as probable as the first (0.05)")
    add("--repeat-penalty", type=float, metavar="R", help="above 1, repetition is less probable (1.0)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text (another each time)")
    add("--max-tokens", type=positive, metavar="N", help="the longest reply (what the context holds)")

    add = parser.add_argument_group("a single answer, for programs").add_argument
    add("--json", action="store_true", help="write each event as one line of JSON")
    add("--logprobs", type=positive, metavar="N", help="with --json: log-probabilities, and the N highest")
    add("--raw", action="store_true", help="the prompt as it is, without the model's chat template")
    add("--prompt-ids", type=_token_ids, metavar="1,2,3", help="token ids instead of a prompt")
    add("--ignore-eos", action="store_true", help="go on past the end of the reply")
    return parser


def _refuse_contradictions(options: argparse.Namespace) -> None:
    """Raises UsageError for options that exclude each other, or that would do nothing."""
    templated = options.system is not None or options.no_think
    by_ids = options.prompt_ids is not None
    resumed = options.resume or options.chat is not None
    asked_of_chat = options.one_shot or resumed
    for_programs = options.raw or options.json or options.ignore_eos
    set_up = options.preset or options.backend or options.context or options.beam is not None
    keyed = options.engine or options.llama_server
    no_screen = options.plain or options.once
    alone = options.one_shot or no_screen or options.engine
    for refused, sentence in (
        (by_ids and (templated or options.raw or options.prompt), "--prompt-ids are the whole prompt."),
        (options.raw and templated, "--raw leaves no place for --system or --no-think."),
        (options.logprobs and not options.json, "--logprobs are written with --json alone."),
        (options.resume and options.chat is not None, "--continue and --chat exclude each other."),
        (options.once and (options.plain or asked_of_chat), "--once is no chat: it measures and leaves."),
        (options.one_shot and options.plain, "--plain is a chat and takes no PROMPT."),
        (options.one_shot and resumed, "--continue and --chat are for a chat and take no PROMPT."),
        (for_programs and not options.one_shot, "--raw, --json and --ignore-eos need a PROMPT."),
        (options.engine and set_up, "--engine is set up where it runs, not by --preset and the like."),
        (options.engine and options.compare, "--compare is for the engine of orin-chat, not for --engine."),
        (options.api_key_env and not keyed, "--api-key-env is for the server of --engine."),
        (options.llama_server and alone and not options.compare, "--llama-server is for a comparison."),
        (options.compare and no_screen, "--compare is for the full screen, or for a PROMPT."),
        (options.compare and options.logprobs, "--compare leaves no place for --logprobs."),
    ):
        if refused:
            raise UsageError(sentence, "orin-chat --help says what the options do.")


# --- what the options start ----------------------------------------------------------------------------


def prompt(options: argparse.Namespace) -> Chat | RawText | TokenIds:
    """What a single answer is to: PROMPT, standard input, or one after the other. Raises UsageError."""
    from engine.events import Chat, Message, RawText, TokenIds

    if options.prompt_ids is not None:
        return TokenIds(ids=options.prompt_ids)
    parts = [*options.prompt, *([_read_stdin()] if _stdin_has_text() else [])]
    text = "\n\n".join(part for part in parts if part)
    if options.raw:
        return RawText(text=text)
    if not text.strip():
        raise UsageError("The prompt is empty.", "Write it in quotes, or on standard input.")
    system = [Message(role="system", content=options.system)] if options.system else []
    return Chat(
        messages=(*system, Message(role="user", content=text.rstrip("\n"))), think=not options.no_think
    )


def configuration(options: argparse.Namespace, settings: Settings) -> Configuration:
    """What the engine is started with, and which sampling holds; the model becomes the one used last. With --engine
    there is no model file. Raises UsageError, and ModelFileError as `model_path` does."""
    from msgspec.structs import replace

    from app.chat.configuration import configure
    from app.cli.model_file import model_path, remember
    from presets.loader import find

    name = preset_name(options, settings)
    chosen = configure("", settings, find(name) if name else None, command_line(options))
    if options.engine is not None:
        return chosen
    try:
        backend = _backend(chosen.engine.backend)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"The backend in the settings {error}.") from None
    path = model_path(options.model, settings)
    remember(options.model, settings)
    return chosen._replace(engine=replace(chosen.engine, model_path=str(path), backend=backend))


def command_line(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the engine and of sampling, as `configure` takes it."""
    from presets.sampling import RANGES

    engine = {"backend": options.backend, "context_length": options.context, "search_width": options.beam}
    return engine | {name: getattr(options, name, None) for name in RANGES}


def key(options: argparse.Namespace) -> str:
    """The key of the server that is asked for; "" for none. Raises UsageError where its variable is not set."""
    name = options.api_key_env
    if name is None:
        return ""
    if value := os.environ.get(name, "").strip():
        return value
    raise UsageError(f"The environment variable {name} is not set.", f"Set it to the key: export {name}=…")


def preset_name(options: argparse.Namespace, settings: Settings) -> str:
    """The preset that is asked for; "" for none. The settings' gives way to a --backend."""
    return options.preset or ("" if options.backend else settings.preset)


def greeting(options: argparse.Namespace, configuration: Configuration) -> str:
    """Introduces the built-in model if it answers without having been asked for; else ""."""
    from presets import GREETING, guide_path

    is_default = options.model is None and configuration.engine.model_path == str(guide_path())
    return GREETING if is_default else ""


def _stdin_has_text() -> bool:
    """Whether standard input is a file or a pipe, rather than a terminal, /dev/null or nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or not a file at all
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _read_stdin() -> str:
    data = sys.stdin.buffer.read(STDIN_LIMIT_BYTES + 1)
    if len(data) > STDIN_LIMIT_BYTES:
        limit = f"{STDIN_LIMIT_BYTES >> 20} MiB"
        raise UsageError(
            f"Standard input holds more than {limit}, which no context does.", "Give a part of it."
        )
    return data.decode("utf-8", "replace")


# --- values --------------------------------------------------------------------------------------------


def add_backend(
    add: Callable[..., Any], meaning: str = "the device (auto takes the fastest there is)"
) -> None:
    """Adds --backend, in capitals or not."""
    add("--backend", type=_backend, choices=BACKENDS, help=meaning)


def _backend(text: str) -> str:
    """One of BACKENDS, however it is written. Raises ArgumentTypeError."""
    for backend in BACKENDS:
        if backend.lower() == text.lower():
            return backend
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(BACKENDS)}, not {text!r}")


def count(text: str, least: int = 0) -> int:
    """A whole number of `least` or more. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) < least or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, not {text!r}")
    return int(text)


def positive(text: str) -> int:
    """A whole number of 1 or more. Raises ArgumentTypeError."""
    return count(text, 1)


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(count(part.strip()) for part in text.split(","))


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print("orin-chat", version("orin-chat"))
        parser.exit()
