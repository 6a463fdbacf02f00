"""`orin-chat show`: what a model's file says, what it needs of memory, and the decode speed that this allows."""

import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from app.chat.model_list import Entry, read_entry, source_of
from app.cli.download import write_json
from app.cli.model_words import UNKNOWN, as_json, encoder_text, meant
from engine.catalog.downloads import find_on_hub
from engine.catalog.hub import DownloadError
from engine.catalog.memory_fit import fits, memory_bytes
from engine.catalog.names import HubModel, WebFile, short_name
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
from widgets.text import as_bytes, one_line

KEY_CHARS, VALUE_CHARS = 44, 200
Row = tuple[str, str]


def show(args: Namespace, aliases: Mapping[str, str]) -> None:
    """Prints what a model's file says, and the decode speed that this machine's memory allows. Of a file that cannot be
    run, nothing is said of speed. Of a model that is not here, the error says how large it is."""
    source, path = source_of(args.model, aliases)
    if path is None and isinstance(source, Path) and source.exists():
        path = source  # reading it tells what it is: a folder, a pipe
    if path is None:
        here = f"{source} is not on this machine."
        hint = meant(args.model) if isinstance(source, Path) else _to_download(source, aliases, args.backend)
        raise ModelFileError(here, hint)
    model = _Model.read(read_entry(source, path, aliases), path, args.backend)
    if args.json:
        write_json(sys.stdout, as_json(model.entry) | model.figures() | {"metadata": model.metadata})
        return
    rows = list(model.rows())
    width = min(KEY_CHARS, max(len(one_line(key)) for key, _ in rows))
    for key, value in rows:
        print(f"{one_line(key).ljust(width)}  {one_line(value)[:VALUE_CHARS]}".rstrip())


@dataclass
class _Model:
    """What there is to say of a model's file. `types`: the tensors and bytes of each type. Without a `spec` the engine
    does not run it. `device`: what would run it, in words, and `gbps` the bandwidth of its memory in 10^9 bytes a
    second; None for a `problem`."""

    entry: Entry
    path: Path
    metadata: Mapping[str, Any]
    types: Mapping[str, Mapping[str, int]]
    spec: ModelSpec | None
    device: str = ""
    gbps: float | None = None
    problem: str = ""

    @classmethod
    def read(cls, entry: Entry, path: Path, backend: str | None) -> "_Model":
        """Raises ModelFileError."""
        with GGUF(path) as file:
            metadata = {key: _plain(value) for key, value in file.metadata.items()}
            types: dict[str, dict[str, int]] = {}
            for tensor in file.tensors.values():
                of_type = types.setdefault(tensor.type_name, {"tensors": 0, "bytes": 0})
                of_type["tensors"] += 1
                of_type["bytes"] += tensor.n_bytes
            spec = None if entry.problem else read_spec(file)
        return cls(entry, path, metadata, types, spec, *(_bandwidth(backend) if spec else ()))

    @property
    def bytes_per_token(self) -> int | None:
        return self.spec.weight_bytes_per_token if self.spec else None

    @property
    def ceiling(self) -> float | None:
        """The decode speed that the memory allows, in tokens a second."""
        return self.gbps * 1e9 / self.bytes_per_token if self.gbps and self.bytes_per_token else None

    @cached_property
    def as_graph(self) -> str:
        """Why the model runs as tensor graphs on the device; "" if it does not."""
        return runs_as_graph_because(self.spec, self.device.split()[0]) if self.spec and self.device else ""

    @cached_property
    def memory(self) -> dict[str, Any]:
        """See `_memory`."""
        return _memory(self.spec, self.device.split()[0] if self.device else "") if self.spec else {}

    def figures(self) -> dict[str, Any]:
        """What JSON has beside the entry and the metadata."""
        return {
            "tensors": self.types,
            "runs_as_graph_because": self.as_graph or None,
            "not_run": (self.spec.not_run if self.spec else "") or None,
            "bytes_per_token": self.bytes_per_token,
            "device": self.device or None,
            "copy_gbps": self.gbps,
            "ceiling_tokens_per_s": self.ceiling,
            "memory": self.memory or None,
        }

    def rows(self) -> Iterator[Row]:
        """All that is said, for people."""
        entry = self.entry
        yield "name", entry.name
        yield "file", str(self.path)
        yield "type", f"{entry.quantization}, {as_bytes(entry.size_bytes)}"
        if entry.problem:
            yield "cannot be used", entry.problem
        if entry.encoder:
            yield "pictures", encoder_text(entry.encoder)
        yield "architecture", entry.architecture
        if entry.parameters_text:
            yield "parameters", entry.parameters_text
        if entry.context_length:
            yield "context", f"{entry.context_length:,} tokens"
        for name, of_type in self.types.items():
            yield f"tensors in {name}", f"{of_type['tensors']:,}, {as_bytes(of_type['bytes'])}"
        if self.bytes_per_token:
            yield "a token reads", f"{as_bytes(self.bytes_per_token)} of weights"
        if self.memory:
            yield from _memory_rows(self.memory)
        for cached in packed_weights_cache.cached_files(self.path):
            yield "packed weights", f"{as_bytes(cached.size_bytes)} in {cached.path}"
        if self.spec:
            yield from self._speed_rows()
        if self.as_graph:
            yield "kernels", self.as_graph
        if self.spec and self.spec.not_run:
            yield "not run", self.spec.not_run
        yield "", ""
        yield from ((key, str(value)) for key, value in self.metadata.items())

    def _speed_rows(self) -> Iterator[Row]:
        entry, gbps = self.entry, self.gbps
        bandwidth = f"{gbps:.0f} GB/s on {self.device}" if gbps else f"not measured: {self.problem}"
        yield "read bandwidth" if self.device.startswith("CPU") else "copy bandwidth", bandwidth
        yield "ceiling", _ceiling_text(self.ceiling, entry, self.device)
        speed = f"{entry.tokens_per_s:,.1f} tokens/s" if entry.tokens_per_s else UNKNOWN
        backend = entry.record.backend if entry.record else ""
        yield "last measured", f"{speed} on {backend}" if backend else speed


def _to_download(source: HubModel | WebFile, aliases: Mapping[str, str], backend: str | None) -> str:
    """The command that downloads a model, after what the hub says of its size, if it can be asked. Raises
    ModelFileError if the engine cannot run it."""
    command = call(f"pull {short_name(source, aliases)}")
    if isinstance(source, WebFile):
        return f"{command} downloads it."
    try:
        size, memory = find_on_hub(source).size_bytes, memory_bytes(backend or "auto")
    except (DownloadError, UsageError):
        return f"{command} downloads it."
    room = f"{as_bytes(memory)} of memory"
    fit = f"fits into {room}" if fits(memory, size) else f"does not fit into {room}"
    return f"It has {as_bytes(size)}{f' and {fit}' if memory else ''}: {command} downloads it."


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


def _memory_rows(memory: Mapping[str, Any]) -> Iterator[Row]:
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
