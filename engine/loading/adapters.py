"""LoRA adapters: files that change matrices W of a model to W + factor * B A, with A and B of few rows and columns.

The product is added to the weights as they are read, so the model runs as any other. Where W is quantized the sum is
Q8_0, and else of W's own type. llama.cpp leaves W as it is and multiplies by A and B in each step.

The format: src/llama-adapter.cpp and convert_lora_to_gguf.py of llama.cpp. Where adapters are from:
https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.formats.dequantize import dequantized, encoded_floats
from engine.formats.ggml_types import GGML_TYPES
from engine.formats.gguf import GGUF, TensorInfo, damaged, printable
from engine.formats.quantization import FLOATS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_NAMED = re.compile(r"(?P<path>.+?)(?::(?P<scale>-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?", re.DOTALL)
_Q8_0 = next(number for number, kind in GGML_TYPES.items() if kind.name == "Q8_0")
_RUN = 1 << 17
"""Weights that a thread changes at a time: they stay in a core's cache."""
_MOST_CHANGED = 1e4
"""Weights are changed by less: float16, the smallest type that they are kept in, ends at 65504."""
_OTHER = "Choose an adapter that was made for this model, with convert_lora_to_gguf.py of llama.cpp."
_MERGED = "Choose a model that the adapter is merged into."


@dataclass(frozen=True)
class Adapter:
    """What the file at `path` changes counts `scale` times."""

    path: Path
    scale: float = 1.0

    @property
    def name(self) -> str:
        """That of the file, with the scale unless it is 1."""
        return self.path.stem + ("" if self.scale == 1 else f" × {self.scale:g}")


def parse_adapters(text: str) -> list[Adapter]:
    """The adapters of "FILE,FILE:SCALE"; none of ""."""
    named = (_NAMED.fullmatch(part.strip()) for part in text.split(","))
    return [Adapter(Path(match["path"]), float(match["scale"] or 1)) for match in named if match]


def adapted(file: GGUF, adapters: str) -> GGUF:
    """The file of a model as adapters change it (see `parse_adapters`), whose `paths` are theirs, too; `file` itself if
    there are none. Raises ModelFileError for a file that is no adapter, or not one for this model."""
    if not (parsed := parse_adapters(adapters)):
        return file
    changes: dict[str, list[_Change]] = {}
    changed = copy.copy(file)
    changed.paths = [*file.paths, *(adapter.path for adapter in parsed)]
    changed.tensors = tensors = dict(file.tensors)
    for adapter in parsed:
        reader = _AdapterReader(file, adapter)
        for name in reader.matrices:
            changes.setdefault(name, []).append(reader.change(name))
        tensors |= reader.norms()
    tensors |= {name: AdaptedTensor.of(file.tensors[name], tuple(of)) for name, of in changes.items()}
    return changed


@dataclass(frozen=True)
class _Change:
    """`factor` times `left` (experts, rows, rank) times `right` (experts, rank, columns), or `right` transposed if it
    `is_turned`; without experts, of two dimensions each. They are read whenever they are multiplied: nothing of an
    adapter stays in memory."""

    left: TensorInfo
    right: TensorInfo
    factor: np.float32
    is_turned: bool

    def product(self, among: range) -> Callable[[range], Floats]:
        """What computes rows of the product, among those that are told here, counted through all experts: float32
        (rows, columns). It has read what it multiplies."""
        (*_, each, _), (*_, n, _) = self.left.shape, self.right.shape
        first, end = among.start // each, (among.stop - 1) // each + 1
        left = _read(self.left, among) * self.factor
        right = _read(self.right, range(first * n, end * n)).reshape(end - first, n, -1)
        right = right.swapaxes(1, 2) if self.is_turned else right

        def product(rows: range) -> Floats:
            parts = []
            for expert in range(rows.start // each, (rows.stop - 1) // each + 1):
                start, stop = max(rows.start, expert * each), min(rows.stop, (expert + 1) * each)
                parts.append(left[start - among.start : stop - among.start] @ right[expert - first])
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return product


class AdaptedTensor(TensorInfo):
    """A tensor that is changed. Its bytes are made each time that they are read, by some threads."""

    __slots__ = ("_changes", "_original")
    _original: TensorInfo
    _changes: tuple[_Change, ...]

    @classmethod
    def of(cls, original: TensorInfo, changes: tuple[_Change, ...]) -> Self:
        type = original.type if original.type in FLOATS else _Q8_0
        n_bytes = math.prod(original.shape) // GGML_TYPES[type].block * GGML_TYPES[type].block_bytes
        place = original._buffer, original._offset
        made = cls(original.name, original.shape, type, n_bytes, *place)
        object.__setattr__(made, "_original", original)
        object.__setattr__(made, "_changes", changes)
        return made

    @property
    def data(self) -> Bytes:
        return self.part(0, self.n_bytes)

    def part(self, start: int, n_bytes: int) -> Bytes:
        made = np.empty(n_bytes, np.uint8)
        self.read_into(start, made.data)
        return made

    def read_into(self, start: int, out: memoryview) -> None:
        into, row_bytes = np.frombuffer(out, np.uint8), self.n_bytes // self._n_rows
        first, end = start // row_bytes, -(-(start + len(out)) // row_bytes)
        products = [change.product(range(first, end)) for change in self._changes]

        def fill(rows: range) -> None:
            begin = rows.start * row_bytes - start
            floats = _read(self._original, rows) + sum(product(rows) for product in products)
            made = _encoded(floats, self.type)[max(-begin, 0) : len(out) - begin]
            into[max(begin, 0) :][: len(made)] = made

        step = max(_RUN // self.shape[-1], 1)
        list(_threads().map(fill, (range(i, min(i + step, end)) for i in range(first, end, step))))

    def release(self, start: int, n_bytes: int, keep_cached: bool) -> None:
        first, end = (place * self._original.n_bytes // self.n_bytes for place in (start, start + n_bytes))
        self._original.release(first, end - first, keep_cached)

    @property
    def _n_rows(self) -> int:
        return math.prod(self.shape[:-1])


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "adapters")


def _read(info: TensorInfo, rows: range) -> Floats:
    """Rows of a tensor, counted through all its matrices: (len(rows), columns). Raises NotImplementedError for types
    that are not known."""
    row_bytes = info.n_bytes // math.prod(info.shape[:-1])
    raw = np.empty(len(rows) * row_bytes, np.uint8)
    info.read_into(rows.start * row_bytes, raw.data)
    return dequantized(raw.reshape(len(rows), row_bytes), info.type)


def _encoded(floats: Floats, ggml_type: int) -> Bytes:
    """float32 (rows, columns) as Q8_0 or a type of `FLOATS`: uint8 (bytes,)."""
    if ggml_type == _Q8_0:
        blocks = floats.reshape(-1, GGML_TYPES[_Q8_0].block)
        d = (np.abs(blocks).max(1) * np.float32(1 / 127)).astype(np.float16)
        scale = d.astype(np.float32)
        numbers = blocks * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[:, None]
        np.rint(numbers, out=numbers).clip(-127, 127, out=numbers)
        encoded = np.empty((len(blocks), GGML_TYPES[_Q8_0].block_bytes), np.uint8)
        encoded[:, :2] = d[:, None].view(np.uint8)
        np.copyto(encoded[:, 2:].view(np.int8), numbers, casting="unsafe")
        return encoded.reshape(-1)
    return encoded_floats(floats, ggml_type)


class _AdapterReader:
    """An adapter, and the file of the model that it changes. All methods raise ModelFileError."""

    def __init__(self, model: GGUF, adapter: Adapter) -> None:
        self._model, self._scale = model, adapter.scale
        self._file = file = GGUF(adapter.path)
        self._name = printable(file.path.name)
        kind, form = (file.get(key, str, "") for key in ("general.type", "adapter.type"))
        if kind != "adapter" or form != "lora":
            raise ModelFileError(f"{self._name} is no LoRA adapter.", _OTHER)
        architecture, of = (f.get("general.architecture", str) for f in (file, model))
        if architecture != of:
            raise self._misfit(f"is for models of the architecture {printable(architecture)}")
        if "adapter.alora.invocation_tokens" in file.metadata:
            raise ModelFileError(
                f"{self._name} changes a model only after certain tokens (aLoRA), which orin-chat does not do.",
                "Choose another adapter.",
            )
        self._alpha = file.get("adapter.lora.alpha", float, 0.0)
        names = (name.rpartition(".lora_") for name in file.tensors)
        self.matrices = sorted({name for name, lora, _ in names if lora})

    def norms(self) -> dict[str, TensorInfo]:
        """Norms that take the place of the model's, by name."""
        norms = {name: info for name, info in self._file.tensors.items() if ".lora_" not in name}
        for name, info in norms.items():
            original = self._model.tensors.get(name)
            if not name.endswith("_norm.weight") or info.type not in FLOATS:
                raise ModelFileError(f"{self._name} holds {printable(name)}, which is no matrix.", _OTHER)
            if original is None or original.shape != info.shape:
                raise self._misfit(f"has another norm {printable(name)}")
            self._largest(info)
        return norms

    def change(self, name: str) -> _Change:
        """What is added to a matrix of the model."""
        original = self._model.tensors.get(name)
        if original is None or len(original.shape) not in (2, 3):
            raise self._misfit(f"changes {printable(name)}, which the model does not have")
        of_left, of_right = (self._half(f"{name}.lora_{x}") for x in "ba")
        if is_turned := name == "token_embd.weight":  # of which A is the longer one
            if "output.weight" not in self._model.tensors:
                raise ModelFileError(
                    f"{self._name} changes the embeddings of a model whose output head they are.", _MERGED
                )
            of_left, of_right = of_right, of_left
        *_, rank = of_left.shape
        *experts, rows, columns = original.shape
        right_shape = (*experts, columns, rank) if is_turned else (*experts, rank, columns)
        if of_left.shape != (*experts, rows, rank) or of_right.shape != right_shape:
            raise self._misfit(f"has another shape of {printable(name)}")
        if f"{name.removesuffix('.weight')}.scale" in self._model.tensors:
            raise ModelFileError(f"{self._name} changes {printable(name)}, which has a scale.", _MERGED)
        try:
            dequantized(np.zeros((1, GGML_TYPES[original.type].block_bytes), np.uint8), original.type)
        except NotImplementedError:
            raise ModelFileError(
                f"The model holds {printable(name)} as {original.type_name}, to which no adapter can be added.",
                _MERGED,
            ) from None
        factor = self._scale * (self._alpha / rank if self._alpha else 1)
        largest = math.prod(map(self._largest, (of_left, of_right)))
        if not abs(factor) * rank * largest < _MOST_CHANGED:  # nor is NaN
            raise self._misfit(f"changes {printable(name)} by more than {_MOST_CHANGED:g}, or by NaN")
        return _Change(of_left, of_right, np.float32(factor), is_turned)

    def _half(self, name: str) -> TensorInfo:
        """One of the two matrices, "lora_a" and "lora_b"."""
        info = self._file.tensors.get(name)
        if info is None or len(info.shape) not in (2, 3):
            raise damaged(self._file.path, f"it has no matrix {printable(name)}")
        return info

    def _largest(self, info: TensorInfo) -> float:
        """The largest magnitude of a tensor's numbers, which are finite."""
        name = printable(info.name)
        try:
            floats = _read(info, range(math.prod(info.shape[:-1])))
        except NotImplementedError:
            raise damaged(self._file.path, f"it holds {name} as {info.type_name}") from None
        largest = max(float(floats.max()), -float(floats.min()))
        if not math.isfinite(largest):
            raise damaged(self._file.path, f"{name} has numbers that are not finite")
        return largest

    def _misfit(self, problem: str) -> ModelFileError:
        model = printable(self._model.path.name)
        return ModelFileError(f"{self._name} does not fit {model}: it {problem}.", _OTHER)
