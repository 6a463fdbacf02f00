"""The options of a chat or a single answer, and what other commands need to read theirs."""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from app.chat.mention import Mention, argument
from app.cli.help_format import HelpFormat
from app.cli.meant import about_option
from app.cli.values import context, count, counts, duration, names, positive
from engine.errors import UsageError, one_line
from engine.formats.kv_format import NAMES as KV_FORMATS
from engine.system.invocation import call, own_version

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from app.chat.configuration import Configuration
    from app.chat.settings import Settings
    from engine.protocol.events import Chat, RawText, TokenIds
    from widgets.chat.turn import Attachment

BACKENDS = ("auto", "CPU", "CUDA", "NV")
EFFORTS = ("low", "medium", "high")
STDIN_LIMIT_BYTES = 16 << 20
_IN_WORDS = (
    (re.compile(r"invalid float value: (.*)"), r"must be a number, not \1"),
    (re.compile(r"invalid int value: (.*)"), r"must be a whole number, not \1"),
    (re.compile(r"invalid choice: (.*) \(choose from (.*)\)"), r"must be one of \2, not \1"),
)
"""What argparse says, and how the other options say it."""
_FILE_NAME = re.compile(r"[^\s?]*\.\w{1,5}")  # a word that ends as names of files do

EPILOG = """\
With a PROMPT, or text on standard input, the answer goes to standard output and
the program ends. All are joined: cat report.txt | orin-chat notes.md "Compare."
A FILE alone opens the chat with it. A PROMPT that is the name of a command or
of a file comes after --.

commands (each has its own --help):
{commands}

exit codes:
  0 done              1 internal error       2 wrong usage      3 model file
  4 backend, engine   5 context is full    130 interrupted    143 terminated
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations that raises UsageError instead of ending the program. `command` is "" for
    the chat, "bench" for orin-chat bench."""

    def __init__(self, command: str = "", description: str = "", epilog: str = "", **options: Any) -> None:
        self._command = command
        super().__init__(
            prog=f"orin-chat {command}".strip(),
            description=description,
            epilog=epilog or None,
            allow_abbrev=False,
            formatter_class=HelpFormat,
            **options,
        )

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Raises OSError; ArgumentParser's own hides it."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        hint = f"{call(f'{self._command} --help'.strip())} lists the options."
        if unknown := re.match(r"unrecognized arguments: (--?[a-zA-Z][\w-]*)", message):
            taken = [action.metavar for action in self._get_positional_actions()]
            hint = f"{about_option(unknown[1], self._option_string_actions, taken)} {hint}".strip()
        elif "--model" in self._option_string_actions and message.startswith("unrecognized arguments"):
            hint = f"A model is named with --model. {hint}"
        for pattern, words in _IN_WORDS:
            message = pattern.sub(words, message)
        raise UsageError(f"{message[0].upper()}{message[1:]}.", hint)


def parse(arguments: Sequence[str], commands: dict[str, str]) -> argparse.Namespace:
    """The options; `files` and `one_shot` are added: the paths among the PROMPTs, and whether a single answer is asked
    for. `commands` (name: meaning) are listed in the help. Raises UsageError."""
    parser = _parser(commands)
    args = parser.parse_args(arguments)
    if args.version:
        print("orin-chat", own_version())
        parser.exit()
    if "--" not in arguments and (models := [text for text in args.prompt if _is_model(text)]):
        if args.model is not None or len(models) > 1:
            raise UsageError(f"{one_line(models[-1])} is a model, and only one answers.", "Name it alone.")
        args.model = models[0]
        args.prompt.remove(args.model)
    # A script that passes a prompt on must not read a file because the prompt spells its name.
    may_be_files = "--" not in arguments and (len(args.prompt) > 1 or (_is_terminal() and not args.json))
    args.files = [text for text in args.prompt if may_be_files and argument(text)]
    args.prompt = [text for text in args.prompt if text not in args.files]
    if len(args.prompt) > 1:
        if args.prompt[0] in commands and "--" not in arguments:
            parser.error(f"the command comes first: {call(args.prompt[0])} ...")
        missing = [text for text in args.prompt if _FILE_NAME.fullmatch(text)]
        if missing and len(missing) < len(args.prompt):
            parser.error(f"there is no file {missing[0]}")
        for text in args.prompt:
            if no_file := _no_file(text):
                parser.error(no_file)
        parser.error("the prompt is one argument: put it in quotes")
    if args.prompt and may_be_files and (no_file := _no_file(args.prompt[0])):
        parser.error(no_file)
    asked = bool(args.prompt) or args.prompt_ids is not None
    args.one_shot = asked or (not args.plain and not args.once and _stdin_has_text())
    _refuse_contradictions(args)
    return args


def presets_listed() -> str:
    """The presets, a line each."""
    from presets.loader import preset_files
    from widgets.text import one_line

    titles = (
        (name, file.preset.title if file.preset else file.problem) for name, file in preset_files().items()
    )
    lines = [f"  {name:<16} {one_line(title)}" for name, title in titles]
    return "\n".join(
        ["presets:", *lines, "", f"{call('--preset NAME')} uses one; F8 in the chat edits them."]
    )


def _parser(commands: dict[str, str]) -> Parser:
    listed = "\n".join(f"  {name:<16} {meaning}" for name, meaning in commands.items())
    parser = Parser(
        usage="orin-chat [OPTION...] [FILE...] [PROMPT]\n       orin-chat COMMAND ...",
        description="Chat with a GGUF model in the terminal, and see what the machine does.",
        epilog=EPILOG.format(commands=listed),
    )
    add = parser.add_argument
    add(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="answer this, with the files before it; without it, open the chat",
    )
    add("--version", action="store_true", help="show the version and exit")
    add("--verbose", action="store_true", help="show on standard error what the engine did")

    add = parser.add_argument_group("model").add_argument
    add_engine(add)

    add = parser.add_argument_group("other engines").add_argument
    add("--engine", metavar="URL", help="a server with OpenAI's protocol, http://host:8000/v1, answers")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the server's key")
    add("--compare", action="store_true", help="llama.cpp answers too, on the same file, beside it")
    add("--llama-server", metavar="PATH", help="its llama-server, or the address of one that runs")

    add = parser.add_argument_group("chat").add_argument
    add("--system", metavar="TEXT", help="the system prompt")
    add("--no-think", action="store_true", help="ask a thinking model not to think")
    add("--effort", choices=EFFORTS, help="how much gpt-oss should think (medium)")
    add(
        "--allow-tools",
        type=names,
        default=(),
        metavar="NAME,...",
        help="these run unasked: a server of settings.toml, files.read_*, or all",
    )
    add("--once", action="store_true", help="measure the engine, print the dashboard as text, and leave")
    add("--plain", action="store_true", help="chat line by line, without the full screen")
    add("--image", action="append", default=[], metavar="FILE", help="a picture with the prompt; repeatable")
    add("--continue", dest="resume", action="store_true", help="go on with the most recent chat")
    add("--chat", type=count, metavar="ID", help="go on with this past chat (--plain lists them: /chats)")

    add = parser.add_argument_group("sampling (settings.toml may change these defaults)").add_argument
    add_sampling(add)
    add("--seed", type=int, metavar="N", help="the same seed gives the same text (another each time)")
    add("--max-tokens", type=positive, metavar="N", help="the longest reply (what the context holds)")

    add = parser.add_argument_group("a single answer, for programs").add_argument
    add("--json", action="store_true", help="write each event as one line of JSON")
    add("--logprobs", type=positive, metavar="N", help="with --json: log-probabilities, and the N highest")
    add("--raw", action="store_true", help="the prompt as it is, without the model's chat template")
    add("--prompt-ids", type=counts, metavar="1,2,3", help="token ids instead of a prompt")
    add("--ignore-eos", action="store_true", help="go on past the end of the reply")
    return parser


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raises UsageError for options that exclude each other, or that have no effect."""
    templated = args.system is not None or args.no_think or args.effort
    by_ids = args.prompt_ids is not None
    resumed = args.resume or args.chat is not None
    asked_of_chat = args.one_shot or resumed
    for_programs = args.raw or args.json or args.ignore_eos
    chosen = (
        args.preset,
        args.mmproj,
        args.lora,
        args.draft,
        args.backend,
        args.context,
        args.kv,
        args.speculate,
    )
    set_up = any(chosen) or args.beam is not None
    keyed = args.engine or args.llama_server
    no_screen = args.plain or args.once
    alone = args.one_shot or no_screen or args.engine
    for refused, sentence in (
        (
            by_ids and (templated or args.raw or args.prompt or args.files or args.image),
            "--prompt-ids takes no other prompt, and no chat template.",
        ),
        (args.raw and templated, "--raw takes no chat template, so no --system, --no-think or --effort."),
        (args.no_think and args.effort, "--no-think and --effort exclude each other."),
        (args.logprobs and not args.json, "--logprobs needs --json."),
        (args.resume and args.chat is not None, "--continue and --chat exclude each other."),
        (
            args.once and (args.plain or asked_of_chat),
            "--once measures and ends: it takes no PROMPT and no option of a chat.",
        ),
        (args.one_shot and args.plain, "--plain is a chat and takes no PROMPT."),
        (args.one_shot and resumed, "--continue and --chat are for a chat and take no PROMPT."),
        (for_programs and not args.one_shot, "--raw, --json and --ignore-eos need a PROMPT."),
        (args.engine and set_up, "--engine is set up where it runs, not by --preset and the like."),
        (args.engine and args.compare, "--compare is for the engine of orin-chat, not for --engine."),
        (args.api_key_env and not keyed, "--api-key-env is for the server of --engine."),
        (args.llama_server and alone and not args.compare, "--llama-server is for a comparison."),
        (args.compare and no_screen, "--compare is for the full screen, or for a PROMPT."),
        (
            args.allow_tools and (args.raw or by_ids or args.compare or args.once),
            "--allow-tools needs a chat, or a PROMPT with the model's chat template.",
        ),
        (args.compare and args.logprobs, "--compare leaves no place for --logprobs."),
    ):
        if refused:
            raise UsageError(sentence, f"{call('--help')} says what the options do.")


# --- what the options mean ------------------------------------------------------------------------------


def attachments(args: argparse.Namespace) -> list[Attachment]:
    """The files of a single answer. Raises UsageError if one cannot be read."""
    from app.chat.files import read, read_picture

    named = (argument(name) or Mention(Path(name)) for name in args.files)  # one that is gone is not left out
    return [*map(read_picture, args.image), *map(read, named)]


def prompt(args: argparse.Namespace, files: Sequence[Attachment] | None = None) -> Chat | RawText | TokenIds:
    """The prompt of a single answer: `files` (None: they are read), PROMPT, then standard input. Raises UsageError if
    it is empty or too long, or if a file cannot be read."""
    from app.chat.files import decoded_text
    from engine.formats.picture_kind import is_binary_picture
    from engine.protocol.events import Chat, Message, Picture, RawText, TokenIds, plain

    if args.prompt_ids is not None:
        return TokenIds(ids=args.prompt_ids)
    files = attachments(args) if files is None else files
    pictures = [Picture(data=file.picture.data, name=file.path) for file in files if file.picture]
    parts = [*(file.quoted for file in files if not file.picture), *args.prompt]
    if _stdin_has_text():
        data = _read_stdin()
        if is_binary_picture(data):
            pictures.append(Picture(data=data))
        elif (piped := None if args.raw else decoded_text(data)) is not None:
            parts.append(piped)
        elif not args.raw and (b"\0" in data or data.startswith(b"%PDF-")):
            raise UsageError("Standard input is no text and no picture.")
        else:
            parts.append(data.decode("utf-8", "replace"))
    text = "\n\n".join(part for part in parts if part)
    if args.raw:
        if pictures:
            raise UsageError("--raw takes no pictures: the chat template says where they stand.")
        return RawText(text=text)
    if not text.strip() and not pictures:
        raise UsageError("The prompt is empty.", "Write it in quotes, or on standard input.")
    system = [Message(role="system", content=plain(args.system))] if args.system else []
    asked = Message(role="user", content=plain(text.rstrip("\n")), pictures=tuple(pictures))
    return Chat(messages=(*system, asked), think=not args.no_think)


def configuration(args: argparse.Namespace, settings: Settings) -> Configuration:
    """What the engine is started with, without the model file, and which sampling holds. Raises UsageError."""
    from msgspec.structs import replace

    from app.chat.configuration import configure
    from presets.loader import find_preset

    name = preset_name(args, settings)
    chosen = configure("", settings, find_preset(name) if name else None, command_line(args))
    if args.engine is not None:
        return chosen
    keep_warm_s = args.keep_warm
    if keep_warm_s is None:
        try:
            keep_warm_s = duration(settings.keep_warm or "0")
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"The key keep_warm in the settings {error}.") from None
    chosen = chosen._replace(keep_warm_s=keep_warm_s)
    try:
        backend = _backend(chosen.engine.backend)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"The backend in the settings {error}.") from None
    return chosen._replace(engine=replace(chosen.engine, backend=backend))


def command_line(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the engine and of sampling, as `configure` takes them; None if an option was not given."""
    from presets.sampling import PresetSampling

    engine = {
        "backend": args.backend,
        "context_length": args.context,
        "kv": args.kv,
        "speculate": args.speculate,
        "search_width": args.beam,
    }
    return engine | {name: getattr(args, name, None) for name in PresetSampling.__struct_fields__}


def key(args: argparse.Namespace) -> str:
    """The server's key, from the variable that --api-key-env names; "" without it. Raises UsageError if the variable is
    not set."""
    name = args.api_key_env
    if name is None:
        return ""
    value = os.environ.get(name, "").strip()
    if value.strip(" ,"):  # commas are between keys: none would let everyone in
        return value
    raise UsageError(f"The environment variable {name} is not set.", f"Set it to the key: export {name}=…")


def preset_name(args: argparse.Namespace, settings: Settings) -> str:
    """The preset of --preset, else that of the settings unless there is a --backend; "" for none."""
    return args.preset or ("" if args.backend else settings.preset)


def _stdin_has_text() -> bool:
    """Whether standard input is a file or a pipe. A terminal, /dev/null and a closed stream are none."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or not a file at all
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _is_terminal() -> bool:
    try:
        return sys.stdin.isatty() and sys.stdout.isatty()
    except (ValueError, AttributeError):  # closed
        return False


def _no_file(text: str) -> str:
    """The sentence for an argument that leads to a folder, a pipe or a device: what it is, and what to do instead; ""
    for others. A shell makes a pipe of <(PROGRAM)."""
    with suppress(OSError, ValueError):
        if ("/" in text or text in (".", "..")) and (path := Path(text)).is_dir():
            return (
                f"{text} is a folder: {text.rstrip('/')}/* names the files in it, and --model a model's file"
            )
        if "/" in text and path.exists() and not path.is_file():
            return f"{text} is a pipe or a device: what a program prints is its input, PROGRAM | {call('PROMPT')}"
    return ""


def _is_model(text: str) -> bool:
    """Whether an argument is the path of a model's file."""
    if not text.endswith(".gguf") or not argument(text):
        return False
    with suppress(OSError), Path(text).open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def _read_stdin() -> bytes:
    data = sys.stdin.buffer.read(STDIN_LIMIT_BYTES + 1)
    if len(data) > STDIN_LIMIT_BYTES:
        limit = f"{STDIN_LIMIT_BYTES >> 20} MiB"
        raise UsageError(
            f"Standard input is longer than {limit}. No context holds that much.", "Give a part of it."
        )
    return data


# --- values --------------------------------------------------------------------------------------------


def add_engine(add: Callable[..., Any]) -> None:
    """Adds the model, and how its engine is set up."""
    add(
        "--model",
        metavar="NAME",
        help="qwen3:0.6b, hf.co/user/repository, a GGUF file (the last one, or orin-guide)",
    )
    add(
        "--mmproj",
        metavar="FILE",
        help="the encoder with which it sees pictures (the one beside it); off: none",
    )
    add("--lora", metavar="FILE", help="LoRA adapters that change it: FILE,FILE, each also as FILE:SCALE")
    add("--preset", metavar="NAME", help="how the engine is set up: cpu, cuda, nv, safe or one of your own")
    add_backend(add)
    add(
        "--context",
        type=context,
        metavar="N|max",
        help="tokens; max is all that fits (the model's, up to 8192)",
    )
    add_kv(add)
    add_speculate(add, "auto")
    add(
        "--draft",
        metavar="NAME",
        help="a smaller model with the same tokens, which guesses next ones (auto: one that is known)",
    )
    add(
        "--keep-warm",
        type=duration,
        metavar="TIME",
        help="10m: the next run within that time finds the model loaded (0)",
    )
    add("--beam", type=count, metavar="N", help="width of the search for faster kernels (0)")


def add_kv(add: Callable[..., Any]) -> None:
    """Adds the format of the KV cache."""
    add("--kv", choices=KV_FORMATS, help="format of the KV cache; q8_0 takes half the memory (f16)")


SPECULATE = "auto", "off", "lookup", "heads", "draft"  # events.Speculate, whose import takes long


def add_speculate(add: Callable[..., Any], default: str) -> None:
    """Adds how the next tokens are guessed."""
    help = f"how next tokens are guessed, of which a step checks several; the text stays the same ({default})"
    choices = SPECULATE if default == "auto" else SPECULATE[:-1]  # bench loads no draft model
    add("--speculate", choices=choices, help=help)


def add_sampling(add: Callable[..., Any]) -> None:
    """Adds how tokens are drawn, without the seed."""
    add("--temperature", type=float, metavar="T", help="0 always takes the most probable token (0.7)")
    add("--top-k", type=int, metavar="K", help="only the K most probable tokens; 0 is all (40)")
    add("--top-p", type=float, metavar="P", help="only the first that add up to probability P (0.95)")
    add("--min-p", type=float, metavar="P", help="only those P times as probable as the first (0.05)")
    add("--repeat-penalty", type=float, metavar="R", help="above 1, repetition is less probable (1.0)")


def add_backend(
    add: Callable[..., Any], meaning: str = "the device (auto: CUDA if there is an NVIDIA GPU, else CPU)"
) -> None:
    """Adds --backend; its value may have any case."""
    add("--backend", type=_backend, choices=BACKENDS, help=meaning)


def _backend(text: str) -> str:
    """One of BACKENDS; `text` may have any case. Raises ArgumentTypeError."""
    for backend in BACKENDS:
        if backend.lower() == text.lower():
            return backend
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(BACKENDS)}, not {text!r}")
