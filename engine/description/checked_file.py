"""A model file's metadata and tensors, checked: what is missing or has another shape than a model needs is an error."""

from __future__ import annotations

import math

import numpy as np

from engine.description.sublayers import Vector, Weight
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged, printable
from engine.formats.quantization import FLOATS, FORMATS, WIDENED_NVFP4, read_as
from engine.formats.rope_order import HeadOrder

MOST = float(np.finfo(np.float32).max)
"""The largest number of single precision, in which the engine has those of the metadata."""


class CheckedFile:
    """A file of an architecture. The tensors that are `used` are noted, so that none is left out without a word. All
    methods raise ModelFileError."""

    def __init__(self, file: GGUF, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self.name = printable(file.path.name)
        self.used: set[str] = set()

    # --- metadata --------------------------------------------------------------------------------------

    def key(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def size(self, key: str, default: int | None = None) -> int:
        full_key = self.key(key)
        value = self.file.get(full_key, int) if default is None else self.file.get(full_key, int, default)
        if not 0 < value < 1 << 31:
            raise damaged(self.file.path, f"{full_key} is {value}")
        return value

    def size_of_layer(self, key: str, i: int, default: int | None = None) -> int:
        """A size of layer i: the file has one for all layers, or one for each."""
        sizes = self.file.metadata.get(self.key(key))
        if not isinstance(sizes, np.ndarray):
            return self.size(key, default)
        if i >= len(sizes) or sizes.dtype.kind not in "iu" or not 0 < sizes[i] < 1 << 31:
            raise damaged(self.file.path, f"{self.key(key)} has no size of layer {i}")
        return int(sizes[i])

    def number(self, key: str, default: float) -> float:
        value = float(self.file.get(self.key(key), float, default))
        if not abs(value) <= MOST:  # nor is NaN
            raise damaged(self.file.path, f"{self.key(key)} is {value}")
        return value

    def factor(self, key: str, default: float) -> float:
        """A number by which others are divided."""
        if abs(value := self.number(key, default)) < 1 / MOST:
            raise damaged(self.file.path, f"{self.key(key)} is {value:g}")
        return value

    # --- tensors ---------------------------------------------------------------------------------------

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def norm_named(self, name: str) -> str:
        """The tensor of a norm: some files have names without ".weight" (PLaMo, Falcon H1)."""
        return name if self.has(name) else f"{name}.weight"

    def check(self, tensor: str, shape: tuple[int, ...]) -> int:
        """The type of a tensor. Raises ModelFileError if the file does not have it with this shape."""
        info = self.file.tensors.get(tensor)
        if info is None or info.shape != shape:
            problem = f"has no {tensor}" if info is None else f"has {tensor} with the shape {info.shape}"
            raise ModelFileError(
                f"{self.name} {problem}; the model needs it with the shape {shape}.",
                "The file is damaged, or of a variant that orin-chat does not run. Get another copy.",
            )
        self.used.add(tensor)
        return info.type

    def weight(
        self,
        tensor: str,
        rows: int,
        cols: int,
        first: int = 0,
        of: int = 0,
        order: HeadOrder | None = None,
        experts: int = 1,
        every: int = 0,
        run: int = 0,
    ) -> Weight:
        """A matrix: `rows` rows from `first` on, of a tensor that has `of` (0: as many). `every`, `run`: see `Weight`.
        A matrix of one row may be a vector in the file. If its blocks have a scale of half precision, or it has floats,
        all of it may have one more. Matrices of experts may in NVFP4 alone: in other types, such a scale is of their
        results (`Experts.scales`)."""
        name, shape = f"{tensor}.weight", (*([experts] if experts > 1 else []), of or rows, cols)
        is_vector = shape == (1, cols) and self.has(name) and len(self.file.tensors[name].shape) == 1
        type = self.check(name, (cols,) if is_vector else shape)
        scale = f"{tensor}.scale"
        format = FORMATS.get(read_as(type))
        of_floats = type in FLOATS and self.has(scale) and self.file.tensors[scale].shape == (experts,)
        is_scaled = of_floats or (format and not format.exponent and self.has(scale))
        if is_scaled and (experts == 1 or read_as(type) == WIDENED_NVFP4):
            self.check(scale, (experts,))
        else:
            scale = ""
        return Weight(name, rows, cols, read_as(type), first, order, experts, every, run, scale=scale)

    def vector(
        self,
        tensor: str,
        size: int,
        order: HeadOrder | None = None,
        first: int = 0,
        of: int = 0,
        experts: int = 1,
    ) -> Vector | None:
        """A vector, or None if the file does not have it. With `experts`, as many of this size."""
        if not self.has(tensor):
            return None
        self.check(tensor, (*([experts] if experts > 1 else []), of or size))
        return Vector(tensor, size * experts, first, order)

    def required(self, tensor: str, *shape: int) -> Vector:
        """A vector that the file must have: the elements of a tensor of this shape."""
        self.check(tensor, shape)
        return Vector(tensor, math.prod(shape))
