"""Products of a few tokens at once beside decode's product of one, and beside a copy:

    python -m tools.measure small_batch_rates [--backend cuda] [--models llama-1b,qwen3-8b] [--tokens 2,8] [--all]

For each matrix and number of tokens: microseconds of a kernel in a chain of dependent ones, and the rate at which it
reads its weights, whose copies exceed the caches. The first column is decode's product of one token; the next is
small_batch_product with the tiles that a model would get, and the last the best of other tiles (`--all` prints each).
What is printed is Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tools.measure.engine_process import numbers, set_up

if TYPE_CHECKING:
    from tinygrad import Tensor

    from engine.kernels.kernel import Kernel
    from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
    from engine.targets.nvidia.kernels.products.small_batch import SmallBatchTiles

CACHED_BYTES, ROUNDS, CALLS = 192 << 20, 5, 16  # more bytes than caches hold; of a timing


@dataclass(frozen=True)
class Shape:
    name: str
    ggml_type: int
    rows: int
    cols: int


def model(type: int, wider: int, dim: int, qkv: int, heads: int, ffn: int, vocab: int) -> tuple[Shape, ...]:
    """The products of a model: `type` is that of most matrices, `wider` that of some."""
    return (
        Shape("qkv", type, qkv, dim),
        Shape("o", type, dim, heads),
        Shape("gate+up", type, 2 * ffn, dim),
        Shape("down", wider, dim, ffn),
        Shape("head", wider, vocab, dim),
    )


Q8_0, Q4_K, Q6_K = 8, 12, 14
MODELS = {
    "llama-1b": model(Q6_K, Q6_K, 2048, 3072, 2048, 8192, 128256),
    "qwen3-0.6b": model(Q8_0, Q8_0, 1024, 4096, 2048, 3072, 151936),
    "qwen3-1.7b": model(Q4_K, Q6_K, 2048, 4096, 2048, 6144, 151936),
    "qwen3-4b": model(Q4_K, Q6_K, 2560, 6144, 4096, 9728, 151936),
    "qwen3-8b": model(Q4_K, Q6_K, 4096, 6144, 4096, 12288, 151936),
}


def other_tiles(cols: int) -> Iterator[SmallBatchTiles]:
    from engine.targets.nvidia.kernels.products.small_batch import SmallBatchTiles, steps_of

    for rows, across, parts in (
        (1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 1, 12), (1, 1, 16), (1, 2, 4), (1, 2, 8), (2, 1, 4), (2, 1, 8),
    ):  # fmt: skip
        if parts <= steps_of(cols):
            yield SmallBatchTiles(rows, across, parts)


class Timing:
    """Times kernels on copies of a matrix."""

    def __init__(self, shape: Shape) -> None:
        from engine.kernels.device_memory import to_device
        from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

        self.shape, self.layout = shape, WeightLayout(shape.ggml_type)
        self.n_bytes = self.layout.n_bytes(shape.rows, shape.cols)
        bits = np.random.default_rng(0)
        planes = self.layout.shapes(shape.rows, shape.cols)
        raw = [
            np.frombuffer(bits.bytes(n * dtype.itemsize), np.uint8).view(f"u{dtype.itemsize}")
            for n, dtype in planes
        ]
        copies = -(-CACHED_BYTES // self.n_bytes)
        self.copies = [
            [to_device(part, dtype) for part, (_, dtype) in zip(raw, planes, strict=True)]
            for _ in range(copies)
        ]

    def sequence(self, kernel: Kernel, out: Tensor, x: Sequence[Tensor] | Tensor) -> KernelSequence:
        """Calls of a kernel, each with the next copy."""
        from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence

        sequence = KernelSequence()
        for i in range(-(-CALLS // len(self.copies)) * len(self.copies)):
            sequence.add(kernel, out=out, x=x, planes=self.copies[i % len(self.copies)])
        return sequence

    def microseconds(self, sequence: KernelSequence) -> float:
        """Of one kernel of the sequence: the best of several rounds."""
        from tinygrad import Device

        run, best, calls = sequence.capture(), float("inf"), len(sequence)
        device = Device[Device.DEFAULT]
        for _ in range(ROUNDS):
            device.synchronize()
            started = time.perf_counter()
            run()
            run()
            device.synchronize()
            best = min(best, (time.perf_counter() - started) / (2 * calls))
        return best * 1e6

    def one(self) -> KernelSequence:
        """Decode's product."""
        from engine.kernels.device_memory import device_zeros
        from engine.targets.nvidia.kernels.products.epilogues import STORE
        from engine.targets.nvidia.kernels.products.matvec import matvec
        from engine.targets.nvidia.kernels.products.schedules import best_schedule
        from engine.targets.nvidia.kernels.products.stacked_matrices import StackedMatrices
        from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size

        stack = StackedMatrices.single(self.layout, self.shape.rows, self.shape.cols)
        kernel = matvec(stack, best_schedule(stack), STORE, "one")
        x = device_zeros(permuted_size(self.shape.cols))
        return self.sequence(kernel, device_zeros(self.shape.rows), [x])

    def few(self, tokens: int, tiles: SmallBatchTiles) -> KernelSequence:
        """The product of `tokens` tokens."""
        from tinygrad import dtypes

        from engine.kernels.device_memory import device_zeros
        from engine.targets.nvidia.kernels.products.small_batch import (
            columns_size,
            small_batch_product,
            stored,
        )

        rows, cols = self.shape.rows, self.shape.cols
        kernel = small_batch_product(self.layout, tokens, rows, cols, tiles, stored(rows), "few")
        x = device_zeros(columns_size(tokens, cols), dtypes.float16)
        return self.sequence(kernel, device_zeros(tokens * rows), x)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--models", default=",".join(MODELS), type=lambda text: text.split(","))
    parser.add_argument("--tokens", default="2,4,8,16", type=numbers)
    parser.add_argument("--searched", default="8,16", type=numbers)
    parser.add_argument("--all", action="store_true", help="print the time of all tiles that are tried")


def run(given: argparse.Namespace) -> None:
    set_up(given.backend)
    import os

    from tinygrad import Device

    from engine.fixes import launch_bounds
    from engine.kernels.compilation import compile_all
    from engine.measure.bandwidth import copy_gbps
    from engine.targets.nvidia.kernels.device import capability, chip, multiprocessors
    from engine.targets.nvidia.kernels.products.small_batch import small_batch_tiles

    launch_bounds.apply()
    os.environ.setdefault("ALLOW_HALF8", "1")
    copy = copy_gbps(Device.DEFAULT)
    print(f"{Device.DEFAULT} {capability()}, {multiprocessors()} multiprocessors, a copy: {copy:,.0f} GB/s\n")
    print("| | MB | one token | " + " | ".join(f"{n} tokens | best" for n in given.tokens) + " |")
    print("|---" * (3 + 2 * len(given.tokens)) + "|", flush=True)
    for name in given.models:
        for shape in MODELS[name]:
            timing = Timing(shape)

            def cell(us: float, timing: Timing = timing) -> str:
                gbps = timing.n_bytes / us / 1e3
                return f"{us:.2f} µs {gbps:,.0f} ({gbps / copy:.0%})"

            own = small_batch_tiles(timing.layout, 8, shape.rows, shape.cols, chip())
            tiles = list(dict.fromkeys([own, *other_tiles(shape.cols)]))
            one = timing.one()
            few = {
                (n, t): timing.few(n, t)
                for n in given.tokens
                for t in (tiles if n in given.searched else tiles[:1])
            }
            compile_all([sequence.linear for sequence in (one, *few.values())])
            cells, notes = [f"{timing.n_bytes / 1e6:.1f}", cell(timing.microseconds(one))], []
            for tokens in given.tokens:
                times = {t: timing.microseconds(s) for (n, t), s in few.items() if n == tokens}
                best = min(times, key=lambda t: times[t])
                notes.append((tokens, times))
                label = f"{best.rows},{best.across},{best.parts}: {cell(times[best])}"
                cells += [cell(times[own]), label if tokens in given.searched else ""]
            layout = timing.layout.name
            print(f"| {name} {shape.name} {layout} {shape.rows}x{shape.cols} | {' | '.join(cells)} |")
            for tokens, times in notes if given.all else []:
                row = ", ".join(
                    f"{t.rows},{t.across},{t.parts} {us:.2f}"
                    for t, us in sorted(times.items(), key=lambda p: p[1])
                )
                print(f"<!-- {tokens} tokens: {row} -->", flush=True)
