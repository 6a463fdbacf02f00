"""`orin-chat models`, `pull`, `rm` and `show`: lists, downloads, deletes and describes models."""

import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.chat.model_list import Entry, delete_downloaded, not_here, on_this_machine, read_entry, source_of
from app.chat.settings import Settings
from app.cli import options
from app.cli.download import fetch, write_json
from engine.catalog import cache
from engine.catalog.downloads import find_on_hub
from engine.catalog.hub import DownloadError
from engine.catalog.memory_fit import fits, memory_bytes
from engine.catalog.names import HubModel, WebFile, draft_for, hub_hint, short_name
from engine.description.architectures import read_spec
from engine.description.spec import ModelSpec
from engine.errors import ModelFileError, OrinError, UsageError
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.formats.string_array import StringArray
from engine.loading import packed_weights_cache
from engine.model.coverage import Target, runs_as_graph_because, target_of
from engine.model.memory_need import largest_context, memory_need
from engine.protocol.events import EngineOptions
from engine.system.invocation import call
from presets import GUIDE, guide_path
from widgets.text import as_bytes, counted, one_line

UNKNOWN = "–"
KEY_CHARS, VALUE_CHARS = 44, 200


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
    commands = {"models": list_models, "pull": pull, "rm": remove, "show": show}
    commands[command](parser.parse_args(arguments), settings.names)
    return 0


# --- models --------------------------------------------------------------------------------------------


def list_models(args: Namespace, aliases: Mapping[str, str]) -> None:
    """Prints the models on this machine, and the names of others. `aliases`: see `Settings.names`."""
    local = on_this_machine(aliases)
    if args.json:
        write_json(sys.stdout, [_as_json(entry) for entry in [*local, *not_here(local, aliases)]])
        return
    titles = ("NAME", "SIZE", "TYPE", "PARAMETERS", "CONTEXT", "LAST USED", "SPEED", "WHERE")
    rows = [titles, *(_row(entry) for entry in local)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in local:
        if entry.problem:
            print(one_line(f"{entry.name} cannot be used: {entry.problem}"))
    print(f"\nNot here, but known: {', '.join(entry.name for entry in not_here(local, aliases))}.")
    print(f"{call('pull NAME')} downloads one; so does hf.co/user/repository[:Q4_K_M].")


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
        f"~{path.removeprefix(home)}" if path.startswith(f"{home}/") else path,
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
        raise UsageError(f"There is no file {source}, and nothing to download.", _meant(args.model))
    path = fetch(source, sys.stdout if args.json else sys.stderr, as_json=args.json)
    entry = read_entry(source, path, aliases)
    if args.json:
        write_json(sys.stdout, {"event": "finished", **_as_json(entry)})
        return
    facts = f"{entry.quantization}, {as_bytes(entry.size_bytes)}"
    print(one_line(f"{entry.name} is {path.name} ({facts}): {path}"))
    if entry.encoder:
        print(one_line(f"It sees pictures, with {_encoder_text(entry.encoder)}"))
    if draft := draft_for(args.model, aliases):
        print(one_line(f"{draft} may guess its next tokens: --draft auto downloads that one."))
    if entry.problem:
        print(one_line(entry.problem), file=sys.stderr)


def _meant(name: str) -> str:
    """What to do about a model's name that is a path where nothing is."""
    return hub_hint(name) or "Check the path for a typing error."


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


# --- show ----------------------------------------------------------------------------------------------


def show(args: Namespace, aliases: Mapping[str, str]) -> None:
    """Prints what a model's file says, and the decode speed that this machine's memory allows. Of a file that cannot be
    run, nothing is said of speed. Of a model that is not here, the error says how large it is."""
    source, path = source_of(args.model, aliases)
    if path is None and isinstance(source, Path) and source.exists():
        path = source  # reading it tells what it is: a folder, a pipe
    if path is None:
        here = f"{source} is not on this machine."
        hint = _meant(args.model) if isinstance(source, Path) else _to_download(source, aliases, args.backend)
        raise ModelFileError(here, hint)
    entry = read_entry(source, path, aliases)
    with GGUF(path) as file:
        metadata = {key: _plain(value) for key, value in file.metadata.items()}
        types: dict[str, dict[str, int]] = {}
        for tensor in file.tensors.values():
            of_type = types.setdefault(tensor.type_name, {"tensors": 0, "bytes": 0})
            of_type["tensors"] += 1
            of_type["bytes"] += tensor.n_bytes
        spec = None if entry.problem else read_spec(file)
    bytes_per_token = spec.weight_bytes_per_token if spec else None
    device, gbps, problem = _bandwidth(args.backend) if spec else ("", None, "")
    ceiling = gbps * 1e9 / bytes_per_token if gbps and bytes_per_token else None
    as_graph = runs_as_graph_because(spec, device.split()[0]) if spec and device else ""
    memory = _memory(spec, device.split()[0] if device else "") if spec else {}
    if args.json:
        figures = {
            "tensors": types,
            "runs_as_graph_because": as_graph or None,
            "not_run": (spec.not_run if spec else "") or None,
            "bytes_per_token": bytes_per_token,
            "device": device or None,
            "copy_gbps": gbps,
            "ceiling_tokens_per_s": ceiling,
            "memory": memory or None,
        }
        write_json(sys.stdout, _as_json(entry) | figures | {"metadata": metadata})
        return
    rows = [
        ("name", entry.name),
        ("file", str(path)),
        ("type", f"{entry.quantization}, {as_bytes(entry.size_bytes)}"),
        *([("cannot be used", entry.problem)] if entry.problem else ()),
        *([("pictures", _encoder_text(entry.encoder))] if entry.encoder else ()),
        ("architecture", entry.architecture),
        *([("parameters", entry.parameters_text)] if entry.parameters_text else ()),
        *([("context", f"{entry.context_length:,} tokens")] if entry.context_length else ()),
        *(
            (f"tensors in {name}", f"{of_type['tensors']:,}, {as_bytes(of_type['bytes'])}")
            for name, of_type in types.items()
        ),
        *([("a token reads", f"{as_bytes(bytes_per_token)} of weights")] if bytes_per_token else ()),
        *(_memory_rows(memory) if memory else ()),
        *(
            ("packed weights", f"{as_bytes(cached.size_bytes)} in {cached.path}")
            for cached in packed_weights_cache.cached_files(path)
        ),
        *(_speed_rows(entry, device, gbps, problem, ceiling) if spec else ()),
        *([("kernels", as_graph)] if as_graph else ()),
        *([("not run", spec.not_run)] if spec and spec.not_run else ()),
        ("", ""),
        *((key, str(value)) for key, value in metadata.items()),
    ]
    width = min(KEY_CHARS, max(len(one_line(key)) for key, _ in rows))
    for key, value in rows:
        print(f"{one_line(key).ljust(width)}  {one_line(value)[:VALUE_CHARS]}".rstrip())


def _to_download(source: HubModel | WebFile, aliases: Mapping[str, str], backend: str) -> str:
    """The command that downloads a model, after what the hub says of its size, if it can be asked. Raises
    ModelFileError if the engine cannot run it."""
    command = call(f"pull {short_name(source, aliases)}")
    if isinstance(source, WebFile):
        return f"{command} downloads it."
    try:
        size, memory = find_on_hub(source).size_bytes, memory_bytes(backend)
    except (DownloadError, UsageError):
        return f"{command} downloads it."
    room = f"{as_bytes(memory)} of memory"
    fit = f"fits into {room}" if fits(memory, size) else f"does not fit into {room}"
    return f"It has {as_bytes(size)}{f' and {fit}' if memory else ''}: {command} downloads it."


def _speed_rows(
    entry: Entry, device: str, gbps: float | None, problem: str, ceiling: float | None
) -> Iterator[tuple[str, str]]:
    bandwidth = f"{gbps:.0f} GB/s on {device}" if gbps else f"not measured: {problem}"
    yield "read bandwidth" if device.startswith("CPU") else "copy bandwidth", bandwidth
    yield "ceiling", _ceiling_text(ceiling, entry, device)
    speed = f"{entry.tokens_per_s:,.1f} tokens/s" if entry.tokens_per_s else UNKNOWN
    yield (
        "last measured",
        f"{speed} on {entry.record.backend}" if entry.record and entry.record.backend else speed,
    )


def _memory(spec: ModelSpec, device: str) -> dict[str, Any]:
    """What a model needs in the memory of tinygrad's device, which is open ("": none is), and the largest context for
    what is free (None: not known): by default, and for each format of the KV cache that the device has."""
    from engine.measure.free_memory import free_bytes

    target: Target = target_of(spec, device) if device else "cpu"
    need, free = memory_need(spec, target=target), free_bytes(device) if device else None
    formats = [kv for kv in KVFormat if not spec.lacks_format_because(kv)]
    return {
        "needed_bytes": need.total_bytes,
        "weights_bytes": need.weights_bytes,
        "cache_bytes": need.cache_bytes,
        "states_bytes": need.states_bytes,
        "kernels_bytes": need.kernels_bytes,
        "context_length": need.context,
        "free_bytes": free,
        "largest_context_length": None if free is None else largest_context(spec, free, target),
        "kv": {kv.value: _kv_cache(spec, free, target, kv) for kv in formats},
    }


def _kv_cache(spec: ModelSpec, free: int | None, target: Target, kv: KVFormat) -> dict[str, int | None]:
    """What a KV cache of the format `kv` takes for the default context, and the largest context for `free` bytes."""
    return {
        "cache_bytes": memory_need(spec, target=target, kv=kv).cache_bytes,
        "largest_context_length": None if free is None else largest_context(spec, free, target, kv=kv),
    }


def _memory_rows(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    parts = {name: as_bytes(n or 0) for name, n in memory.items() if name.endswith("_bytes")}
    states = f"{parts['states_bytes']} for recurrent states, " if memory["states_bytes"] else ""
    yield (
        "memory",
        f"{parts['needed_bytes']}: {parts['weights_bytes']} of weights, {parts['cache_bytes']} for a context of "
        f"{memory['context_length']:,} tokens, {states}{parts['kernels_bytes']} for kernels",
    )
    if memory["free_bytes"] is not None:
        largest = memory["largest_context_length"]
        for_what = f"enough for a context of {largest:,} tokens" if largest else "it does not fit"
        yield "free memory", f"{parts['free_bytes']}: {for_what}"
    formats = memory["kv"] if len(memory["kv"]) > 1 else {}
    for kv, of_kv in formats.items():
        largest = of_kv["largest_context_length"]
        room = f", room for {largest:,}" if largest else ""
        yield (
            f"KV cache, {kv}",
            f"{as_bytes(of_kv['cache_bytes'])} for {memory['context_length']:,} tokens{room}",
        )


def _encoder_text(encoder: Path) -> str:
    return f"{encoder.name} ({as_bytes(encoder.stat().st_size)}): {encoder}"


def _plain(value: object) -> Any:
    """A metadata value for printing; of a list, its length."""
    if isinstance(value, np.ndarray):
        return f"[{value.size} of {value.dtype}]"
    if isinstance(value, StringArray | list):
        return f"[{len(value)} strings]" if isinstance(value, StringArray) else f"[{len(value)} lists]"
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _ceiling_text(ceiling: float | None, entry: Entry, device: str) -> str:
    """The decode speed that the memory allows, in tokens/s, and what to think of it if a reply was faster."""
    if ceiling is None:
        return UNKNOWN
    text = f"{ceiling:,.0f} tokens/s: that bandwidth by those bytes"
    has_same_device = entry.record is not None and device.startswith(entry.record.backend or UNKNOWN)
    if has_same_device and (entry.tokens_per_s or 0.0) > ceiling:
        text += "; replies were faster, since caches hold weights, or other programs slow the memory now"
    return text


def _bandwidth(backend: str | None) -> tuple[str, float | None, str]:
    """The device, the bandwidth of its memory in 10^9 bytes/s (None: not known), and why it is not known."""
    from engine.backends import install, no_device_error, prepare

    dev = ""
    try:
        dev = prepare(EngineOptions(model_path="", backend=backend or "auto"))
        install(dev)
        from tinygrad import Device

        from engine.devices.device_name import device_name
        from engine.measure.bandwidth import copy_gbps

        device = str(Device.DEFAULT)
        return f"{device} ({device_name(device)})", copy_gbps(device), ""
    except OrinError as error:
        return "", None, str(error)
    except ExceptionGroup as failures:
        return "", None, str(no_device_error(dev, failures))
    except Exception as error:  # a driver may raise anything
        return "", None, one_line(f"{type(error).__name__}: {error}")


def _as_json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "source": str(entry.source),
        "path": None if entry.path is None else str(entry.path),
        "size_bytes": entry.size_bytes or None,
        "quantization": entry.quantization or None,
        "architecture": entry.architecture or None,
        "parameters": entry.parameters or None,
        "active_parameters": entry.active_parameters or None,
        "context_length": entry.context_length or None,
        "used_at": entry.record.used_at if entry.record else None,
        "tokens_per_s": entry.tokens_per_s,
        "backend": (entry.record.backend or None) if entry.record else None,
        "problem": entry.problem or None,
        "mmproj": None if entry.encoder is None else str(entry.encoder),
    }
