"""Products of a prompt's tokens: those of warpgroups where the GPU has them and they take less time
(`warpgroup_matmul`), else those of warps (`small_batch` up to 64 tokens, `matmul`)."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.copied_matmul import (
    ROWS,
    CopiedTiles,
    copied_matmul,
    copied_tiles,
)
from engine.targets.nvidia.kernels.products.matmul import Tiles, matmul, tiles_for
from engine.targets.nvidia.kernels.products.small_batch import MAX_TOKENS
from engine.targets.nvidia.kernels.products.warpgroup_matmul import (
    LEAST_TOKENS,
    WarpgroupTiles,
    warpgroup_matmul,
    warpgroup_tiles,
)
from engine.targets.nvidia.kernels.uops import Activation
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

PromptTiles = Tiles | WarpgroupTiles
Shape = tuple[WeightLayout, int, int]
"""A matrix: its layout, rows and columns."""

_FEW_US = {16: (1.04, 0.65), 8: (0.67, 0.52), 6: (0.66, 0.59), 5: (0.72, 0.58)}
"""By the bits of a weight: the microseconds that `MAX_TOKENS` tokens take an H200 with a million of them, by warps and
by warpgroups."""
_OTHERS_US = 0.51, 0.49
_FLOAT16 = 1  # GGML's number
_SURE = 1.1  # how much more time products of warps must take


def prompt_order(matrices: Iterable[Shape], tokens: int, chip: Chip, are_all: bool = True) -> Order:
    """The order of activations for a step of so many tokens, all of whose products have one: that in which they take
    least time. `are_all`: whether these are all of its matrices, since "halves" is an order for float16 only. Products
    of more than `MAX_TOKENS` take less time by warpgroups with all types, those of fewer than `LEAST_TOKENS` more."""
    fits = chip.has_warpgroups and tokens % LEAST_TOKENS == 0
    matrices = [*matrices]
    if (
        fits
        and are_all
        and all(layout.ggml_type == _FLOAT16 and rows % ROWS == 0 for layout, rows, _ in matrices)
    ):
        return "halves"
    if tokens > MAX_TOKENS:
        return "eights" if fits else "fragments"
    by_warps = by_groups = 0.0
    for layout, rows, cols in matrices if fits else ():
        of_warps, of_groups = _FEW_US.get(layout.bits, _OTHERS_US)
        by_warps, by_groups = by_warps + of_warps * rows * cols, by_groups + of_groups * rows * cols
    return "eights" if by_warps > _SURE * by_groups else "columns"


def prompt_tiles(
    layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, paired: bool, order: Order
) -> PromptTiles:
    """The tiles of a product of activations in an order."""
    if order == "halves":
        return copied_tiles(tokens, rows, cols, chip, paired)
    make = warpgroup_tiles if order == "eights" else tiles_for
    return make(layout, tokens, rows, cols, chip, paired)


def prompt_product(
    layout: WeightLayout, tokens: int, rows: int, cols: int, tiles: PromptTiles, paired: bool, name: str,
    activation: Activation = "silu",
) -> list[tuple[Kernel, PromptTiles]]:  # fmt: skip
    """activations @ matrix.T, of activations in the order of the tiles (`prompt_order`): kernels of the same buffers,
    each of which makes some rows, with its tiles. With `CopiedTiles`, a kernel has maps of these."""
    shape = layout, tokens, rows, cols
    if not isinstance(tiles, WarpgroupTiles):
        return [(matmul(*shape, tiles, paired, name, activation), tiles)]
    kernels: list[tuple[Kernel, PromptTiles]] = []
    for own, span in tiles.launches(rows):
        if isinstance(own, CopiedTiles):
            kernels.append((copied_matmul(*shape, own, paired, name, activation, span), own))
        else:
            kernels.append((warpgroup_matmul(*shape, own, paired, name, activation, span), own))
    return kernels
