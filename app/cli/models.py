"""`orin-chat models`, `pull`, `rm` and `show`: the models on this machine, and how they come and go."""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from app.chat.model_list import Entry, not_here, on_this_machine, read_entry, source_of
from app.chat.settings import Settings
from app.cli import options
from app.cli.download import fetch, write_json
from engine.catalog import cache
from engine.errors import ModelFileError, OrinError, UsageError
from engine.events import EngineOptions
from engine.formats.gguf import GGUF, StringArray
from engine.model import file_summary, packed_weights_cache
from presets import GUIDE, guide_path
from widgets.text import as_bytes, as_count, one_line

NOT_YET = "–"
KEY_CHARS, VALUE_CHARS = 44, 200


def run(command: str, meaning: str, arguments: Sequence[str], settings: Settings) -> int:
    """Runs models, pull, rm or show; `meaning` describes it in its help. Returns the exit code. Raises OrinError."""
    parser = options.Parser(prog=f"orin-chat {command}", description=f"{meaning.capitalize()}.")
    if command != "models":
        names = "qwen3:0.6b, hf.co/user/repository:Q4_K_M, an address, a file, or a name of your own"
        parser.add_argument("model", metavar="NAME", help=names)
    if command == "rm":
        parser.add_argument("--yes", action="store_true", help="do not ask")
    if command == "show":
        options.add_backend(parser.add_argument, "the device to measure")
    parser.add_argument("--json", action="store_true", help="write JSON")
    given, own = parser.parse_args(arguments), settings.names
    match command:
        case "models":
            return list_models(given, own, sys.stdout)
        case "pull":
            return pull(given, own, sys.stdout, sys.stderr)
        case "rm":
            return remove(given, own, sys.stdout, sys.stderr, sys.stdin)
    return show(given, own, sys.stdout)


# --- models --------------------------------------------------------------------------------------------


def list_models(given: Namespace, own: Mapping[str, str], out: TextIO) -> int:
    """Writes what is on this machine, and which names are known. Returns the exit code."""
    here = on_this_machine(own)
    if given.json:
        write_json(out, [_as_json(entry) for entry in [*here, *not_here(here, own)]])
        return 0
    titles = ("NAME", "SIZE", "TYPE", "PARAMETERS", "CONTEXT", "LAST USED", "SPEED", "WHERE")
    rows = [titles, *(_row(entry) for entry in here)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip(), file=out)
    for model in here:
        if model.problem:
            print(one_line(f"{model.name} cannot be used: {model.problem}"), file=out)
    names = ", ".join(model.name for model in not_here(here, own))
    print(f"\nNot here, but known: {names}.", file=out)
    print("orin-chat pull NAME downloads one; so does hf.co/user/repository[:Q4_K_M].", file=out)
    return 0


def _row(entry: Entry) -> tuple[str, ...]:
    speed = f"{entry.tokens_per_s:.1f} tok/s" if entry.tokens_per_s else NOT_YET
    home = str(Path.home())
    where = str(entry.path)
    cells = (
        entry.name,
        as_bytes(entry.size_bytes),
        entry.quantization or NOT_YET,
        as_count(entry.parameters) if entry.parameters else NOT_YET,
        f"{entry.context_length:,}" if entry.context_length else NOT_YET,
        ago(entry.record.used_at) if entry.record else NOT_YET,
        speed,
        f"~{where.removeprefix(home)}" if where.startswith(f"{home}/") else where,
    )
    return tuple(one_line(cell) for cell in cells)


def ago(seconds: float) -> str:
    """How long ago a moment was: just now, 5 minutes ago, 3 days ago."""
    past = max(0.0, time.time() - seconds)
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if count := int(past // length):
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


# --- pull ----------------------------------------------------------------------------------------------


def pull(given: Namespace, own: Mapping[str, str], out: TextIO, messages: TextIO) -> int:
    """Downloads a model, or verifies and updates it, and says where it is."""
    source, _ = source_of(given.model, own)
    if isinstance(source, Path):
        raise UsageError(f"{source} is a file: there is nothing to download.")
    path = fetch(source, out if given.json else messages, as_json=given.json)
    found = read_entry(source, path, own)
    if given.json:
        write_json(out, {"event": "finished", **_as_json(found)})
    else:
        facts = ", ".join((found.quantization, as_bytes(found.size_bytes)))
        print(one_line(f"{found.name} is {path.name} ({facts}): {path}"), file=out)
        if found.problem:
            print(one_line(found.problem), file=messages)
    return 0


# --- rm ------------------------------------------------------------------------------------------------


def remove(given: Namespace, own: Mapping[str, str], out: TextIO, messages: TextIO, stdin: TextIO) -> int:
    """Deletes a downloaded model, after asking, and what is kept of its weights; of a file of the user's own, only
    that."""
    source, path = source_of(given.model, own)
    if source == guide_path():
        raise UsageError(f"{GUIDE} is built in: there is nothing to delete.")
    if isinstance(source, Path):
        if not (freed := packed_weights_cache.delete(source)):
            raise UsageError(f"{source} was not downloaded by a name.", "Delete the file itself.")
        if given.json:
            write_json(out, {"removed": [], "freed_bytes": freed})
        else:
            print(f"Deleted its packed weights, {as_bytes(freed)} are free again. The file stays.", file=out)
        return 0
    model = next((model for model in cache.installed() if model.path == path), None)
    if model is None:
        raise ModelFileError(f"{given.model} is not on this machine.", "orin-chat models lists what is.")
    if not given.yes:
        if not stdin.isatty():
            raise UsageError(
                "It is not asked for without a terminal.", "Give --yes to delete it all the same."
            )
        print(
            f"Delete {one_line(model.path.name)} ({as_bytes(model.size_bytes)})? [y/N] ",
            end="",
            file=messages,
        )
        messages.flush()
        if stdin.readline().strip().lower() not in ("y", "yes"):
            print("It stays.", file=messages)
            return 0
    try:
        freed = packed_weights_cache.delete(model.path) + cache.remove(model)
    except OSError as error:
        raise ModelFileError(f"{model.path} cannot be deleted: {error.strerror}.") from error
    if given.json:
        write_json(out, {"removed": [str(path) for path in model.paths], "freed_bytes": freed})
    else:
        shared = (
            "" if freed else " Its bytes are in a store that the hub shares: `hf cache prune` frees them."
        )
        print(f"Deleted {one_line(model.path.name)}, {as_bytes(freed)} are free again.{shared}", file=out)
    return 0


# --- show ----------------------------------------------------------------------------------------------


def show(given: Namespace, own: Mapping[str, str], out: TextIO) -> int:
    """What a model's file says, and how fast it could be here at best."""
    source, path = source_of(given.model, own)
    if path is None:
        raise ModelFileError(
            f"{source} is not on this machine.",
            "Check the path for a typing error." if isinstance(source, Path) else f"orin-chat pull {source}",
        )
    found = read_entry(source, path, own)
    with GGUF(path) as file:
        metadata = {key: _plain(value) for key, value in file.metadata.items()}
        types: dict[str, dict[str, int]] = {}
        for tensor in file.tensors.values():
            counted = types.setdefault(tensor.type_name, {"tensors": 0, "bytes": 0})
            counted["tensors"] += 1
            counted["bytes"] += tensor.n_bytes
        bytes_per_token = file_summary.weight_bytes_per_token(file)
    device, gbps, why_not = _copy_gbps(given.backend)
    ceiling = gbps * 1e9 / bytes_per_token if gbps and bytes_per_token else None
    if given.json:
        figures = {
            "tensors": types,
            "bytes_per_token": bytes_per_token,
            "device": device or None,
            "copy_gbps": gbps,
            "ceiling_tokens_per_s": ceiling,
        }
        write_json(out, _as_json(found) | figures | {"metadata": metadata})
        return 0
    measured = f"{found.tokens_per_s:.1f} tokens/s" if found.tokens_per_s else NOT_YET
    rows = [
        ("name", found.name),
        ("file", str(path)),
        ("type", f"{found.quantization}, {as_bytes(found.size_bytes)}"),
        ("architecture", found.architecture),
        ("parameters", as_count(found.parameters)),
        ("context", f"{found.context_length:,} tokens"),
        *((f"tensors in {name}", _amount(counted)) for name, counted in types.items()),
        ("a token reads", f"{as_bytes(bytes_per_token)} of weights"),
        *(
            ("packed weights", f"{as_bytes(cached.size_bytes)} in {cached.path}")
            for cached in packed_weights_cache.cached_files(path)
        ),
        ("copy bandwidth", f"{gbps:.0f} GB/s on {device}" if gbps else f"not measured: {why_not}"),
        ("ceiling", f"{ceiling:.0f} tokens/s: that bandwidth by those bytes" if ceiling else NOT_YET),
        (
            "last measured",
            f"{measured} on {found.record.backend}" if found.record and found.record.backend else measured,
        ),
        *([("cannot be used", found.problem)] if found.problem else ()),
        ("", ""),
        *((key, str(value)) for key, value in metadata.items()),
    ]
    width = min(KEY_CHARS, max(len(one_line(key)) for key, _ in rows))
    for key, value in rows:
        print(f"{one_line(key).ljust(width)}  {one_line(value)[:VALUE_CHARS]}".rstrip(), file=out)
    return 0


def _amount(counted: Mapping[str, int]) -> str:
    return f"{counted['tensors']:,}, {as_bytes(counted['bytes'])}"


def _plain(value: object) -> Any:
    """A metadata value, lists by their length alone."""
    if isinstance(value, np.ndarray):
        return f"[{value.size} of {value.dtype}]"
    if isinstance(value, StringArray | list):
        return f"[{len(value)} strings]" if isinstance(value, StringArray) else f"[{len(value)} lists]"
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _copy_gbps(backend: str | None) -> tuple[str, float | None, str]:
    """The device, its copy bandwidth in 10^9 bytes a second, and why that is not known where it is not."""
    try:
        from engine.backends import prepare

        prepare(EngineOptions(model_path="", backend=backend or "auto"))
        from tinygrad import Device

        from engine.devices.device_name import device_name
        from engine.measure.bandwidth import copy_gbps

        device = str(Device.DEFAULT)
        return f"{device} ({device_name(device)})", copy_gbps(device), ""
    except OrinError as error:
        return "", None, str(error)
    except Exception as error:  # whatever a driver does
        return "", None, one_line(f"{type(error).__name__}: {error}")


# --- words ---------------------------------------------------------------------------------------------


def _as_json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "source": str(entry.source),
        "path": None if entry.path is None else str(entry.path),
        "size_bytes": entry.size_bytes or None,
        "quantization": entry.quantization or None,
        "architecture": entry.architecture or None,
        "parameters": entry.parameters or None,
        "context_length": entry.context_length or None,
        "used_at": entry.record.used_at if entry.record else None,
        "tokens_per_s": entry.tokens_per_s,
        "backend": (entry.record.backend or None) if entry.record else None,
        "problem": entry.problem or None,
    }
