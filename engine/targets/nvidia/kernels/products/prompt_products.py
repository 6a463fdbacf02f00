"""Products of many tokens: those of warpgroups where the GPU has them (`warpgroup_matmul`), else those of warps
(`matmul`)."""

from __future__ import annotations

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.device import Chip
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.matmul import Tiles, matmul, tiles_for
from engine.targets.nvidia.kernels.products.warpgroup_matmul import (
    LEAST_TOKENS,
    WarpgroupTiles,
    warpgroup_matmul,
    warpgroup_tiles,
)
from engine.targets.nvidia.kernels.uops import Activation
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

PromptTiles = Tiles | WarpgroupTiles


def prompt_order(tokens: int, chip: Chip) -> Order:
    """The order of activations for products of so many tokens."""
    return "eights" if chip.has_warpgroups and tokens % LEAST_TOKENS == 0 else "fragments"


def prompt_tiles(
    layout: WeightLayout, tokens: int, rows: int, cols: int, chip: Chip, paired: bool
) -> PromptTiles:
    """The tiles of a product."""
    if prompt_order(tokens, chip) == "eights":
        return warpgroup_tiles(layout, tokens, rows, cols, chip, paired)
    return tiles_for(layout, tokens, rows, cols, chip, paired)


def prompt_product(
    layout: WeightLayout, tokens: int, rows: int, cols: int, tiles: PromptTiles, paired: bool, name: str,
    activation: Activation = "silu",
) -> Kernel:  # fmt: skip
    """activations @ matrix.T, of activations in the order of the tiles (`prompt_order`)."""
    make = warpgroup_matmul if isinstance(tiles, WarpgroupTiles) else matmul
    return make(layout, tokens, rows, cols, tiles, paired, name, activation)
