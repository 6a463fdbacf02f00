"""How causal attention of prompts is divided into blocks and warps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.kernels.launch_hints import STATIC_SHARED
from engine.targets.nvidia.kernels.attention.kv_cache import Heads
from engine.targets.nvidia.kernels.device import spills_early
from engine.targets.nvidia.kernels.pieces import PIECE_ROWS
from engine.targets.nvidia.kernels.products.eights import RUN, SPREAD, Gathered

_MAX_SPLITS = 32
_SPLIT_COST = 0.02  # what adding a split's sums takes, as a part of the time
_MOST_SHARED = 99 << 10  # bytes of shared memory of a block that gathers its results


@dataclass(frozen=True)
class PromptTiling:
    """How prefill attention is divided. A warp has 16 * `rows` queries of a head; a block has `warps` warps, which read
    the same keys, 16 * `steps` at a time; `splits` blocks share the keys of the same queries. Queries are in registers,
    or if they are `shared`, in shared memory. `across` warps have the same queries, and each a part of the values'
    dimensions. Shared memory has the keys and values of `held` steps, two or one."""

    rows: int
    warps: int
    steps: int
    splits: int
    shared: bool = False
    across: int = 1
    held: int = 2

    @property
    def units(self) -> int:
        """Warps of a block that have queries of their own."""
        return self.warps // self.across

    def span(self, heads: Heads) -> int:
        """The tokens whose queries a block has; 0 if blocks begin at other places than multiples of a number."""
        if self.units % heads.shared_by and heads.shared_by % self.units:
            return 0
        return 16 * self.rows * max(1, self.units // heads.shared_by)

    def narrowed(self, heads: Heads) -> PromptTiling:
        """The tiling with as many warps as have queries of at most `PIECE_ROWS` tokens; the more parts of keys each
        then has to copy, the smaller the steps."""
        fewer = (replace(self, warps=n * self.across) for n in range(self.units, 0, -1))
        narrow = next(t for t in fewer if 0 < t.span(heads) <= PIECE_ROWS)
        steps = max(1, self.steps * narrow.warps // self.warps)
        return replace(narrow, steps=1 << (steps.bit_length() - 1))

    def shared_bytes(self, dim: int) -> int:
        """Shared memory of a block: keys, values and queries."""
        return (2 * self.held * self.steps + self.shared * self.units * self.rows) * 16 * dim * 2

    def block_heads(self, heads: Heads) -> int:
        """The heads of a block's queries, if the warps that have some are a multiple of the heads that share keys, or
        the other way round."""
        return min(heads.shared_by, self.units)

    def gathered(self, heads: Heads, tokens: int, slot: int) -> Gathered | None:
        """How a block gathers results by eight tokens, if it has whole runs of these, and room."""
        own, units = self.block_heads(heads), heads.shared_by * (tokens // (16 * self.rows))
        is_whole = units % self.units == 0 and max(heads.shared_by, self.units) % own == 0
        if self.splits > 1 or not is_whole or own * heads.dim % SPREAD:
            return None
        gathered = Gathered(self.units // own * (16 * self.rows), own * heads.dim // RUN, slot)
        return gathered if self.shared_bytes(heads.dim) + gathered.n_bytes <= _MOST_SHARED else None

    def sums_size(self, heads: Heads, tokens: int) -> int:
        """The size of the sums of all splits, float32."""
        return self.splits * heads.query * tokens * (heads.dim + 8)


def prompt_tiling(
    heads: Heads, tokens: int, multiprocessors: int, limit: int = STATIC_SHARED, is_narrow: bool = False
) -> PromptTiling:
    """The tiling for a step of `tokens` tokens, with up to `limit` bytes of shared memory for a block, for pieces that
    begin at any multiple of `PIECE_ROWS` if it `is_narrow`, else at those of its span. A warp loads operands from
    shared memory for all its queries, so it gets as many as its registers hold. Sums are scaled down and the block's
    warps wait for each other once a step, so steps are as large as fits. The fewest splits that give the
    multiprocessors blocks evenly."""
    dim, is_large = heads.dim, heads.dim > 128
    rows = 2 if dim <= 64 and heads.shared_by * tokens >= 512 else 1
    units = heads.shared_by * tokens // (16 * rows)
    fits_two = dim <= 64 or not spills_early()
    small = [(8, 4)] * (units >= 8) + [(8, 2)] * fits_two + [(8, 1)]
    shapes = [(8, 1), (4, 1), (2, 1)] if is_large else small
    # More dimensions than these have more sums than a warp's registers hold.
    across = 2 if dim > (128 if spills_early() else 256) else 1
    tilings = [
        PromptTiling(rows, min(units * across, warps), steps, 1, is_large, across, held)
        for held in (2, 1)
        for warps, steps in shapes
    ]
    if is_narrow:
        tilings = [tiling.narrowed(heads) for tiling in tilings]
    tiling = next((t for t in tilings if t.shared_bytes(dim) <= limit), tilings[-1])
    blocks = heads.kv * -(-units // tiling.units)

    def cost(splits: int) -> float:
        """The time of the blocks, if one at a time runs on a multiprocessor, over what it is if none is idle."""
        rounds = -(-blocks * splits // multiprocessors)
        return rounds * multiprocessors / (blocks * splits) + splits * _SPLIT_COST

    return replace(tiling, splits=min(range(1, _MAX_SPLITS + 1), key=cost))
