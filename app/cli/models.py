"""`orin-chat models`, `pull` and `rm`: lists, downloads and deletes models. `show` describes one (`show`)."""

import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.chat.model_list import Entry, delete_downloaded, not_here, on_this_machine, read_entry, source_of
from app.chat.settings import Settings
from app.cli import options
from app.cli.download import fetch, write_json
from app.cli.model_words import UNKNOWN, as_json, encoder_text, meant
from engine.catalog import cache
from engine.catalog.names import draft_for, known_models
from engine.errors import ModelFileError, UsageError
from engine.loading import packed_weights_cache
from engine.system.invocation import call
from presets import GUIDE, guide_path
from widgets.text import as_bytes, counted, one_line


def run(command: str, meaning: str, arguments: Sequence[str], settings: Settings) -> int:
    """Runs models, pull, rm or show; `meaning` describes it in its help. Returns the exit code. Raises OrinError."""
    parser = options.Parser(command, f"{meaning.capitalize()}.")
    if command != "models":
        names = "qwen3:0.6b, hf.co/user/repository:Q4_K_M, an address, a file, or a name of your own"
        parser.add_argument("model", metavar="NAME", help=names)
    if command == "rm":
        parser.add_argument("--yes", action="store_true", help="do not ask")
    if command == "show":
        options.add_backend(parser.add_argument, "the device to measure")
    parser.add_argument("--json", action="store_true", help="write JSON")
    commands = {"models": list_models, "pull": pull, "rm": remove}
    args = parser.parse_args(arguments)
    if command == "show":
        from app.cli.show import show  # imports what plans the loading of models

        commands["show"] = show
    commands[command](args, settings.names)
    return 0


# --- models --------------------------------------------------------------------------------------------


def list_models(args: Namespace, aliases: Mapping[str, str]) -> None:
    """Prints the models on this machine, and the names of others. `aliases`: see `Settings.names`."""
    local = on_this_machine(aliases)
    if args.json:
        write_json(sys.stdout, [as_json(entry) for entry in [*local, *not_here(local, aliases)]])
        return
    titles = ("NAME", "SIZE", "TYPE", "PARAMETERS", "CONTEXT", "LAST USED", "SPEED", "WHERE")
    rows = [titles, *(_row(entry) for entry in local)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in local:
        if entry.problem:
            print(one_line(f"{entry.name} cannot be used: {entry.problem}"))
    print(f"\nNot here, but known ({call('pull NAME')} downloads one, also hf.co/user/repository:Q4_K_M):")
    answering_nothing = {model.name for model in known_models() if not model.chats}
    names = [entry.name for entry in not_here(local, aliases)]
    families = list(dict.fromkeys(name.partition(":")[0] for name in names))
    names.sort(key=lambda name: families.index(name.partition(":")[0]))
    _print_in_columns([name for name in names if name not in answering_nothing])
    if embedding := [name for name in names if name in answering_nothing]:
        print(f"\nFor embeddings and ranking, with {call('serve')}:")
        _print_in_columns(embedding)


def _print_in_columns(names: Sequence[str]) -> None:
    """As many columns as the terminal has room for, to be read from top to bottom."""
    from rich.columns import Columns
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as printed:
        console.print(Columns([one_line(name) for name in names], (0, 2), column_first=True))
    for line in printed.get().splitlines():
        print(line.rstrip())


def _row(entry: Entry) -> tuple[str, ...]:
    home, path = str(Path.home()), str(entry.path)
    cells = (
        entry.name,
        as_bytes(entry.size_bytes),
        (entry.quantization or UNKNOWN) + (", sees" if entry.encoder else ""),
        entry.parameters_text or UNKNOWN,
        f"{entry.context_length:,}" if entry.context_length else UNKNOWN,
        ago(entry.record.used_at) if entry.record else UNKNOWN,
        f"{entry.tokens_per_s:.1f} tok/s" if entry.tokens_per_s else UNKNOWN,
        "" if path == entry.name else f"~{path.removeprefix(home)}" if path.startswith(f"{home}/") else path,
    )
    return tuple(one_line(cell) for cell in cells)


def ago(time_s: float) -> str:
    """How long ago a time was: just now, 5 minutes ago, 3 days ago. `time_s` in seconds since 1970."""
    past = max(0.0, time.time() - time_s)
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if count := int(past // length):
            return f"{counted(count, unit)} ago"
    return "just now"


# --- pull ----------------------------------------------------------------------------------------------


def pull(args: Namespace, aliases: Mapping[str, str]) -> None:
    """Downloads a model, or verifies and updates it, and prints its path."""
    source, _ = source_of(args.model, aliases)
    if isinstance(source, Path):
        if source.exists():
            raise UsageError(f"{source} is a file: there is nothing to download.")
        raise UsageError(f"There is no file {source}, and nothing to download.", meant(args.model))
    path = fetch(source, sys.stdout if args.json else sys.stderr, as_json=args.json)
    entry = read_entry(source, path, aliases)
    if args.json:
        write_json(sys.stdout, {"event": "finished", **as_json(entry)})
        return
    facts = f"{entry.quantization}, {as_bytes(entry.size_bytes)}"
    print(one_line(f"{entry.name} is {path.name} ({facts}): {path}"))
    if entry.encoder:
        print(one_line(f"It sees pictures, with {encoder_text(entry.encoder)}"))
    if draft := draft_for(args.model, aliases):
        print(one_line(f"{draft} may guess its next tokens: --draft auto downloads that one."))
    if entry.problem:
        print(one_line(entry.problem), file=sys.stderr)


# --- rm ------------------------------------------------------------------------------------------------


def remove(args: Namespace, aliases: Mapping[str, str]) -> None:
    """Deletes a downloaded model and its packed weights, after a question. Of a user's own file, it deletes only the
    packed weights."""
    source, path = source_of(args.model, aliases)
    if source == guide_path():
        raise UsageError(f"{GUIDE} is built in: there is nothing to delete.")
    if isinstance(source, Path):
        if not (freed := packed_weights_cache.delete(source)):
            raise UsageError(f"{source} was not downloaded by a name.", "Delete the file itself.")
        if args.json:
            write_json(sys.stdout, {"removed": [], "freed_bytes": freed})
        else:
            print(f"Deleted its packed weights, {as_bytes(freed)} are free again. The file stays.")
        return
    model = next((model for model in cache.installed() if model.path == path), None)
    if model is None:
        raise ModelFileError(f"{args.model} is not on this machine.", f"{call('models')} lists what is.")
    name = one_line(model.path.name)
    if not args.yes and not _is_confirmed(f"Delete {name} ({as_bytes(model.size_bytes)})? [y/N] "):
        print("It stays.", file=sys.stderr)
        return
    try:
        freed = delete_downloaded(model)
    except OSError as error:
        raise ModelFileError(f"{model.path} cannot be deleted: {error.strerror}.") from error
    if args.json:
        write_json(sys.stdout, {"removed": [str(path) for path in model.paths], "freed_bytes": freed})
        return
    shared = "" if freed else " Its bytes are in a store that the hub shares: `hf cache prune` frees them."
    print(f"Deleted {name}, {as_bytes(freed)} are free again.{shared}")


def _is_confirmed(question: str) -> bool:
    """Asks on the terminal. Raises UsageError without one."""
    if not sys.stdin.isatty():
        raise UsageError("There is no terminal to ask on.", "Give --yes to delete it without a question.")
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
