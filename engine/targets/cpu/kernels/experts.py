"""Mixtures of experts: the products with their matrices, and the sum of their results.

    router's product · choose · [group] · quantize · gate+up · quantize · down · add

In decode each chosen expert is a tile of one token. In prefill the pairs of a token and an expert that it takes are
ordered by expert, in tiles of which each has one expert; the last tile of an expert is filled up. So a product knows
nothing of tokens: it multiplies each tile by the matrix of the tile's expert.

The experts' matrices lie one after the other in a stream, as if they were one; their rows are a multiple of `lanes`.
"""

from __future__ import annotations

import functools

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import Activations, buffer_names, sigmoid
from engine.targets.cpu.kernels.kernel_builder import I32, Index, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.product import (
    GroupOfRows,
    products_of_a_token,
    products_of_few,
    products_of_floats,
    products_of_tiles,
)
from engine.targets.cpu.kernels.step_state import TILES, TOKENS
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.kernels.weight_layout import LaneLayout

_FEW = 8  # tokens of an expert, on average
_FEW_TILE = 4  # tokens of a tile of experts that have few


def few_tokens(used: int, experts: int) -> int:
    """The most tokens of a step in which experts have few each."""
    return _FEW * experts // used


def tile_of_experts(tokens: int, used: int, experts: int, tile: int) -> int:
    """The tokens of a tile of experts, in a step of so many tokens in tiles of `tile`. If experts have few, most of a
    large tile would be padding; if they have many, small tiles would unpack their weights too often."""
    return min(tile, _FEW_TILE) if tokens <= few_tokens(used, experts) else tile


def expert_shape(rows: int, cols: int, layout: LaneLayout, biased: bool) -> list[int]:
    """The sizes that `expert_product` reads, int32 (4,): groups of rows of one expert; blocks in a row; groups that are
    multiplied together; elements of an expert's bias, or 0 if there is none."""
    assert rows % layout.lanes == 0
    groups = rows // layout.lanes
    # Their weights stay in the core's cache, for the expert's next tile.
    together = max(n for n in range(1, 9) if groups % n == 0)
    return [groups, cols // layout.block, together, rows * biased]


def max_tiles(tokens: int, used: int, experts: int, tile: int) -> int:
    """The largest number of tiles of pairs of a token and an expert: experts without tokens have none."""
    pairs = tokens * used
    return (pairs + min(experts, pairs) * (tile - 1)) // tile


@functools.cache
def group_experts(experts: int, used: int, tile: int) -> KernelFunction:
    """Orders the pairs of a token and an expert that it takes by expert, in one part: an expert's pairs are
    neighbouring places, from a multiple of `tile` on. Buffers, n being `max_tiles`: the expert of each tile, int32
    (n,); the token at each place, int32 (n * tile,), 0 where there is none; the place of each pair, int32 (tokens,
    used); a state with the number of tiles; how often each expert was chosen, int32 (experts,), to which the pairs are
    added; the state of the step; the experts that `choose_experts` has chosen."""

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        tile_experts, sources, places, tiles, choices, state, chosen = buffers
        k = KernelBuilder(tile)
        first, pairs = even_share(k.index(state, TOKENS) * used, part, parts)
        counts, following = k.zeros(experts, I32), k.registers(experts, I32)
        n_tiles = k.zeros(1, I32)
        with k.loop(pairs) as pair:
            expert = k.index(chosen, first + pair)
            k.store(counts, expert, k.load(counts, expert) + 1)
        k.scratch(choices)
        with k.loop(experts) as expert:
            k.store(choices, expert, k.load(choices, expert) + k.load(counts, expert))
            k.store(following, expert, k.load(n_tiles, 0) * tile)
            k.store(n_tiles, 0, k.load(n_tiles, 0) + (k.load(counts, expert) + (tile - 1)) // tile)
        k.store(tiles, TILES, k.load(n_tiles, 0))
        k.scratch(sources)
        with k.loop(k.index(n_tiles, 0)) as t:
            k.fill(sources, t * tile, UOp.const(0, I32), tile)
        with k.loop(pairs) as i:
            pair = first + i
            expert = k.index(chosen, pair)
            place = k.index(following, expert)
            k.store(places, pair, place.cast(I32))
            k.store(sources, place, (pair // used).cast(I32))
            k.store(tile_experts, place // tile, expert.cast(I32))
            k.store(following, expert, place.cast(I32) + 1)
        return k.finish(f"group_experts_{experts}_{used}_{tile}")

    return kernel


@functools.cache
def expert_product(layout: LaneLayout, tile: int, span: int, shared: bool = False) -> KernelFunction:
    """out = activations of each tile @ the matrix of its expert.T + the expert's bias. Buffers: out, float32 (tiles,
    tile, rows); the sizes (`expert_shape`); a state with the number of tiles; the expert of each tile, int32 (tiles,);
    the activations (`buffer_names`), of the first tile alone if all `shared` them; the biases, float32 (experts, rows),
    or zeros (rows,); the stream of all experts. `span`: as in `product`."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, state: UOp, experts: UOp, *buffers: UOp) -> UOp:
        k, rest = KernelBuilder(layout.lanes), list(buffers)
        groups, blocks, together, bias_rows = (k.index(shape, i) for i in range(4))
        inputs = {name: rest.pop(0) for name in buffer_names([layout], tile)}
        x = Activations(tile, blocks * layout.block, **inputs)
        bias, stream = rest
        tiles, rows = k.index(state, TILES), groups * layout.lanes
        # One token: expert by expert. Tiles: some groups of rows of all experts, then the next ones, so that the
        # weights of an expert with several tiles are read from memory once.
        steps: Index = groups if tile == 1 else groups // together
        first, count = even_share(tiles * steps, part, parts)
        with k.loop(count) as i:
            step = first + i
            tile_number, start = (
                (step // groups, step % groups) if tile == 1 else (step % tiles, step // tiles * together)
            )
            expert = k.index(experts, tile_number)
            of_x: Index = 0 if shared else tile_number
            with k.loop(1 if tile == 1 else together) as j:
                group = start + j
                row = group * layout.lanes
                a = GroupOfRows(k, layout, stream, expert * groups + group, blocks, x)
                added = k.vector(bias, expert * bias_rows + row)
                to = tile_number * tile * rows + row
                if layout.format is None:
                    for t, total in enumerate(products_of_floats(a, of_x)):
                        k.store(out, to + t * rows, total + added)
                elif tile == 1:
                    k.store(out, to, products_of_a_token(a, of_x) + added)
                elif tile < layout.lanes:
                    for t, total in enumerate(products_of_few(a, of_x)):
                        k.store(out, to + t * rows, total + added)
                else:
                    totals = products_of_tiles(a, 1, span, of_x)
                    with k.loop(tile) as t:
                        k.store(out, to + t * rows, k.vector(totals, t * layout.lanes) + added)
        return k.finish(f"expert_product_{layout.name}_{tile}")

    return kernel


@functools.cache
def add_experts(
    used: int, added: bool, lanes: int, tile: int, shared: bool = False, gated: bool = True
) -> KernelFunction:
    """out = the sum of the results of a token's experts, each times its probability. With `added` it is added to what
    out holds. Buffers: out, float32 (tokens, cols); the number of units in a row, int32 (1,); if tile is more than 1
    the state of the step and the place of each result, int32 (tokens, used); the probabilities, float32 (tokens, used);
    the results, float32 (places, cols). With a `shared` layer, which all tokens take: if it is `gated`, its gate,
    float32 (tokens, lanes) of which the first one counts, and its results, float32 (tokens, cols); these are added
    times sigmoid(gate)."""

    def kernel(part: UOp, parts: UOp, out: UOp, shape: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        k.scratch(out)
        lists, rest = buffers[: 2 * (tile > 1)], buffers[2 * (tile > 1) :]
        weights, results, *of_all = rest
        units = k.index(shape, 0)
        cols = units * UNIT
        first, count = even_share(units, part, parts)
        factor = k.registers(1)
        with k.loop(k.index(lists[0], TOKENS) if lists else 1) as token:
            pairs = [token * used + rank for rank in range(used)]
            places = [k.index(lists[1], pair) for pair in pairs] if lists else pairs
            if shared and gated:
                k.store(factor, 0, sigmoid(k, k.load(of_all[0], token * lanes)))
            with k.loop(count) as i, k.loop(UNIT // lanes) as j:
                column = (first + i) * UNIT + j * lanes
                total = add(
                    k.vector(results, place * cols + column) * k.load(weights, pair)
                    for place, pair in zip(places, pairs, strict=True)
                )
                at = token * cols + column
                if shared:
                    result = k.vector(of_all[-1], at)
                    total = total + (result * k.load(factor, 0) if gated else result)
                k.store(out, at, k.vector(out, at) + total if added else total)
        assert len(of_all) == shared * (1 + gated)
        return k.finish(f"add_experts_{used}_{tile}")

    return kernel
