"""Products of prompts with matrices of every type on a GPU, beside those of Q4_K:

    python -m tools.measure product_rates [--backend cuda] [--models qwen3-8b] [--types Q4_K,Q5_K] [--tokens 64,512]

For each type and number of tokens: the rate of all products of a layer, one after the other, and its share of Q4_K's.
All matrices are of the type; weights and activations are random. Kernels and tiles are those that a model would get.
`--all` also prints each product's time with them and with the fastest of other tiles. What is printed is Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.formats.quantization import FLOATS, QUANTIZED
from tools.measure.engine_process import numbers, set_up

if TYPE_CHECKING:
    from tinygrad import Tensor
    from tinygrad.dtype import DType

    from engine.kernels.kernel import Kernel
    from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
    from engine.targets.nvidia.kernels.products.prompt_products import PromptTiles
    from engine.targets.nvidia.kernels.products.small_batch import SmallBatchTiles
    from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

    AnyTiles = PromptTiles | SmallBatchTiles

REFERENCE = 12  # Q4_K
WEIGHTS_BYTES, ROUNDS = 512 << 20, 5  # read in a timing; timings, of which the median counts
_DRAWN = 1 << 22  # random numbers; more repeat them
_OTHERS = (  # cols, across, deep
    (4, 2, 1), (4, 4, 1), (4, 1, 2), (4, 2, 2), (4, 4, 2), (4, 1, 4), (4, 2, 4), (2, 4, 2), (2, 2, 4), (2, 4, 4),
)  # fmt: skip
_FEW = (  # rows, across, parts
    (2, 1, 4), (2, 2, 2), (2, 2, 4), (2, 4, 1), (2, 4, 2), (4, 1, 4), (4, 2, 2), (4, 1, 2), (1, 1, 8), (1, 2, 8),
)  # fmt: skip
_BEST = 8  # of other tiles, those that are printed


@dataclass(frozen=True)
class Shape:
    name: str
    rows: int
    cols: int


def layer(dim: int, qkv: int, heads: int, ffn: int) -> tuple[Shape, ...]:
    """The products of a layer."""
    return (
        Shape("qkv", qkv, dim),
        Shape("o", dim, heads),
        Shape("gate+up", 2 * ffn, dim),
        Shape("down", dim, ffn),
    )


MODELS = {
    "llama-1b": layer(2048, 3072, 2048, 8192),
    "qwen3-0.6b": layer(1024, 4096, 2048, 3072),
    "qwen3-1.7b": layer(2048, 4096, 2048, 6144),
    "qwen3-4b": layer(2560, 6144, 4096, 9728),
    "qwen3-8b": layer(4096, 6144, 4096, 12288),
}


class Matrix:
    """A random matrix of a layer."""

    def __init__(self, layout: WeightLayout, shape: Shape) -> None:
        self.layout, self.rows, self.cols = layout, shape.rows, shape.cols
        self.name, self.is_gate = shape.name, shape.name == "gate+up"
        self.n_bytes = layout.n_bytes(shape.rows, shape.cols)
        self.planes = [_random(n, dtype) for n, dtype in layout.shapes(shape.rows, shape.cols)]

    def tiles(self, tokens: int) -> AnyTiles:
        """The tiles that a model would have."""
        from engine.targets.nvidia.kernels.device import chip
        from engine.targets.nvidia.kernels.products.prompt_products import prompt_order, prompt_tiles
        from engine.targets.nvidia.kernels.products.small_batch import small_batch_tiles

        shape, gpu = (self.rows, self.cols), chip()
        order = prompt_order([(self.layout, *shape)], tokens, gpu)
        if order == "columns":
            return small_batch_tiles(self.layout, tokens, *shape, gpu, not self.is_gate)
        return prompt_tiles(self.layout, tokens, *shape, gpu, self.is_gate, order)

    def other_tiles(self, tokens: int) -> list[AnyTiles]:
        from engine.targets.nvidia.kernels.products.matmul import Tiles
        from engine.targets.nvidia.kernels.products.small_batch import MAX_TOKENS, SmallBatchTiles, steps_of
        from engine.targets.nvidia.kernels.weights.matrix_bytes import units_of

        parts = (1,) if self.is_gate else (1, 2, 4)
        tiles: list[AnyTiles] = [
            tile
            for cols, across, deep in _OTHERS
            for n in parts
            if tokens >= 16
            and tokens % (tile := Tiles(min(8, tokens // 16), cols, across, n, deep)).tokens == 0
            and tile.shares <= min(8, units_of(self.cols))
        ]
        if tokens <= MAX_TOKENS:
            tiles += [
                SmallBatchTiles(*t, splits=n) for t in _FEW for n in parts if t[2] * n <= steps_of(self.cols)
            ]
        return tiles

    def add(self, sequence: KernelSequence, tokens: int, tiles: AnyTiles) -> None:
        """Adds the product with the activations of so many tokens to a sequence."""
        from tinygrad import dtypes

        from engine.targets.nvidia.kernels.products.copied_matmul import CopiedTiles
        from engine.targets.nvidia.kernels.products.matmul import fragments_size
        from engine.targets.nvidia.kernels.products.prompt_products import prompt_product
        from engine.targets.nvidia.kernels.products.small_batch import (
            SmallBatchTiles,
            activated,
            columns_size,
            small_batch_product,
            stored,
        )
        from engine.targets.nvidia.kernels.products.tensor_maps import on_device, operand_maps

        shape, is_gate = (self.layout, tokens, self.rows, self.cols), self.is_gate
        is_few = isinstance(tiles, SmallBatchTiles)
        kernels: list[tuple[Kernel, AnyTiles]]
        if isinstance(tiles, SmallBatchTiles):
            epilogue = activated("silu") if is_gate else stored(self.rows)
            kernels = [(small_batch_product(*shape, tiles, epilogue, "t"), tiles)]
            size, parts = columns_size, tiles.splits
        else:
            kernels, size = [*prompt_product(*shape, tiles, is_gate, "t")], fragments_size
            parts = tiles.parts
        x = _scratch(size(tokens, self.cols), dtypes.float16)
        buffers: dict[str, Tensor | list[Tensor]] = {"x": x, "planes": self.planes}
        if not is_few:
            buffers["prompt"] = _state(tokens)
        halves = size(tokens, self.rows // 2)
        out = (halves, dtypes.float16) if is_gate else (parts * tokens * self.rows, dtypes.float32)
        for kernel, own in kernels:
            maps = None
            if isinstance(own, CopiedTiles):
                tile = own.width, own.tokens
                maps = operand_maps(self.planes[0], self.rows, x, tokens, self.cols, tile)
            out_of = _scratch(*out, is_out=True)
            sequence.add(kernel, out=out_of, maps=maps and on_device(maps), **buffers)


_kept: dict[object, Tensor] = {}


def _scratch(n: int, dtype: DType, is_out: bool = False) -> Tensor:
    """Activations, or memory for results, that products share."""
    from engine.kernels.device_memory import device_zeros

    key = n, dtype, is_out
    if key not in _kept:
        _kept[key] = device_zeros(n, dtype) if is_out else _random(n, dtype)
    return _kept[key]


def _state(tokens: int) -> Tensor:
    """The state of a step of a piece of so many tokens."""
    from tinygrad import dtypes

    from engine.kernels.device_memory import to_device
    from engine.targets.nvidia.kernels.pieces import state_of

    if tokens not in _kept:
        _kept[tokens] = to_device(state_of(tokens, [(0, 0, tokens, 0)]), dtypes.int32)
    return _kept[tokens]


def _random(n: int, dtype: DType) -> Tensor:
    """Floats near one hundredth, or bits. As float16, bfloat16 or float32, as scales or exponents, none is infinite."""
    from tinygrad import dtypes

    from engine.kernels.device_memory import to_device

    draw, some = np.random.default_rng(n), min(n, _DRAWN)
    if dtype == dtypes.float16:
        return to_device(
            np.resize((draw.standard_normal(some, np.float32) * 0.01).astype(np.float16), n), dtype
        )
    bits = np.frombuffer(draw.bytes(some * dtype.itemsize), f"u{dtype.itemsize}")
    finite = bits & bits.dtype.type(0xBFFFBFFF if dtype == dtypes.uint32 else 0x7F7F)
    return to_device(np.resize(finite, n), dtype)


class Timing:
    """Products of so many tokens, in turn, until they have read more than caches hold."""

    def __init__(self, products: Sequence[tuple[Matrix, AnyTiles]], tokens: int) -> None:
        from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence

        self.times = max(2, WEIGHTS_BYTES // sum(matrix.n_bytes for matrix, _ in products))
        self.operations = 2 * tokens * sum(matrix.rows * matrix.cols for matrix, _ in products)
        self.sequence = KernelSequence()
        for _ in range(self.times):
            for matrix, tiles in products:
                matrix.add(self.sequence, tokens, tiles)

    def seconds(self) -> float:
        """Of all products once."""
        from tinygrad import Device

        run, device, taken = self.sequence.capture(), Device[Device.DEFAULT], []
        for i in range(ROUNDS + 1):  # the first one warms up
            device.synchronize()
            started = time.perf_counter()
            run()
            device.synchronize()
            taken += [time.perf_counter() - started] if i else []
        return statistics.median(taken) / self.times

    def tflops(self) -> float:
        return self.operations / self.seconds() / 1e12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from engine.formats.ggml_types import GGML_TYPES

    names = {GGML_TYPES[number].name: number for number in (*FLOATS, *QUANTIZED)}
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--models", default="qwen3-8b", type=lambda text: text.split(","))
    parser.add_argument(
        "--types", default=[*names.values()], type=lambda text: [names[name] for name in text.split(",")]
    )
    parser.add_argument("--tokens", default="32,64,128,256,512", type=numbers)
    parser.add_argument("--all", action="store_true", help="print the time of all tiles that are tried")


def run(given: argparse.Namespace) -> None:
    set_up(given.backend)
    from tinygrad import Device

    from engine.fixes import dynamic_shared, launch_bounds
    from engine.formats.ggml_types import GGML_TYPES
    from engine.kernels.compilation import compile_all
    from engine.targets.nvidia.kernels.device import capability, multiprocessors
    from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

    launch_bounds.apply()
    dynamic_shared.apply()
    os.environ.setdefault("ALLOW_HALF8", "1")
    print(f"{Device.DEFAULT} {capability()}, {multiprocessors()} multiprocessors; teraflops, share of Q4_K's")
    types = [REFERENCE, *(type for type in given.types if type != REFERENCE)]
    for model in given.models:
        print(f"\n| {model} | " + " | ".join(f"{n} tokens" for n in given.tokens) + " |")
        print("|---" * (1 + len(given.tokens)) + "|", flush=True)
        reference: list[float] = []
        for type in types:
            layout = WeightLayout(type)
            matrices = [Matrix(layout, shape) for shape in MODELS[model]]
            layers = [Timing([(m, m.tiles(n)) for m in matrices], n) for n in given.tokens]
            compile_all([layer.sequence.linear for layer in layers])
            rates = [layer.tflops() for layer in layers]
            reference = reference or rates
            cells = (f"{rate:.0f}, {rate / of:.0%}" for rate, of in zip(rates, reference, strict=True))
            print(f"| {GGML_TYPES[type].name} | " + " | ".join(cells) + " |", flush=True)
            if given.all:
                for n in given.tokens:
                    _compare(matrices, n)


def _compare(matrices: Sequence[Matrix], tokens: int) -> None:
    """Prints the time of each product with a model's tiles, the first, and with others."""
    from engine.kernels.compilation import compile_all

    tried = {m: list(dict.fromkeys([m.tiles(tokens), *m.other_tiles(tokens)])) for m in matrices}
    timings = {(m, tiles): Timing([(m, tiles)], tokens) for m in matrices for tiles in tried[m]}
    compile_all([timing.sequence.linear for timing in timings.values()])
    for matrix in matrices:
        times = {tiles: timings[matrix, tiles].seconds() for tiles in tried[matrix]}
        own, *others = times
        shown = [own, *sorted(others, key=times.__getitem__)[:_BEST]]
        cells = [
            f"{type(tiles).__name__} {','.join(map(str, vars(tiles).values()))} {times[tiles] * 1e6:.1f}"
            for tiles in shown
        ]
        print(f"<!-- {tokens} {matrix.name}, µs: {'; '.join(cells)} -->", flush=True)
