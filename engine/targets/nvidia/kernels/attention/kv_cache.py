"""The layout of the KV cache on GPUs.

Sixteen tokens are a tile: the keys of a tile are neighbours, and so are its values. The cache consists of words of 32
bits in the order in which the threads of a warp load them, sixteen bytes each, so that every load of a warp is of
neighbouring bytes. `cache_tiles` says which elements a word holds.

The cache is a pool of blocks, and "token" above is a place in the pool. A table holds the block of each `block` tokens
of a sequence (`Pages`): token t is at place table[t // block] * block + t % block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from engine.formats.kv_format import KVFormat
from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.uops import (
    F16,
    INDEX,
    LOG2_E,
    all_of,
    finish,
    load,
    load_index,
    load_run,
    sigmoid,
    soft_capped,
    softplus,
    store_run,
)

Gating = Literal["sigmoid", "softplus"]
Stored = Literal["keys and values", "keys", "nothing"]
"""What a layer computes of a token for the cache. "keys": before norm and rotation they are the values too. "nothing":
the cache is another layer's, which has stored the token before."""

LENGTH_UNIT = 1024
"""Of `Heads.length`: tinygrad would not place loops of one round at most before what follows them."""
TILE = 16  # tokens


@dataclass(frozen=True)
class Pages:
    """The blocks of a sequence in a kernel: those of `heads.pool` in `table`, int32, from index `first` on."""

    heads: Heads
    table: UOp
    first: UOp

    @staticmethod
    def of(heads: Heads, table: UOp, sequences: UOp, index: UOp | int) -> Pages:
        """The pages of the sequence that int32 `sequences` has at an index. It is not read where there is only one:
        loads of blocks need not wait for it."""
        if table.max_numel() == heads.table_size:
            return Pages(heads, table, UOp.const(0))
        return Pages(heads, table, load(sequences, index).cast(INDEX) * heads.table_size)

    def block(self, tile: UOp) -> UOp:
        """The block of the sequence's tile of this number."""
        number = tile // (self.heads.block // TILE)
        return load_index(self.table, self.first + number.minimum(self.heads.table_size - 1), self.heads.pool)

    def tile(self, kv: UOp, tile: UOp) -> UOp:
        """Where a key head has the sequence's tile of this number (`Heads.tile`)."""
        return self.heads.tile(kv, self.block(tile), tile)


@dataclass(frozen=True)
class Heads:
    """The attention heads of a layer: `query` heads share `kv` heads of keys and values, of `dim` elements each.
    Positions are below `length`. `norm_eps` is set if queries and keys are RMS-normed; if it `rotates_first`, the
    weights of these norms are of rotated elements. Scores are multiplied by `scale`, and with a `temperature` by a
    factor for the query's position, which is data. The cache is a `pool` of so many blocks of `block` tokens, a
    multiple of 16. With a `window`, a query sees the last `window` tokens, its own included. `kv_format`: how the cache
    holds keys and values. With `normed_values`, values are RMS-normed over a head, with `norm_eps`. With `gates` of
    each head, one or as many as it has elements, the rows of the QKV product begin with them, and the result is
    multiplied by their sigmoids, or by another function (`gating`). If windows are `chunked`, a query sees the tokens
    from the last multiple of the window on. If heads are `sloped`, a number of each, which is data, times the distance
    of two tokens is taken off their score. If norms are `centred`, they take the mean off each head, and each head has
    weights of its own. With a `limit`, queries, keys and values are cut to -limit to limit. If a token `is_stored`,
    another kernel has put its key and value into the cache before attention begins. If they look `ahead`, a token of a
    prompt may see some after its own. With a `softcap`, scores are softcap * tanh(scores / softcap). With `latent`, the
    result of a token in decode has only so many elements of each head, a vector for each
    (`engine.targets.nvidia.kernels.latent_attention`): both halves of a head without their first elements, which are
    rotated."""

    query: int
    kv: int
    dim: int
    length: int
    norm_eps: float | None
    scale: float
    block: int
    pool: int
    window: int = 0
    temperature: bool = False
    kv_format: KVFormat = KVFormat.F16
    stored: Stored = "keys and values"
    normed_values: bool = False
    gates: int = 0
    gating: Gating = "sigmoid"
    limit: float = 0.0
    chunked: bool = False
    sloped: bool = False
    centred: bool = False
    is_stored: bool = False
    ahead: bool = False
    softcap: float = 0.0
    rotates_first: bool = False
    latent: int = 0

    def __post_init__(self) -> None:
        assert self.block % TILE == 0 and self.kv_format.fits(self.dim)
        assert not self.normed_values or self.norm_eps is not None

    @property
    def shared_by(self) -> int:
        """Query heads that share a key head."""
        return self.query // self.kv

    @property
    def gated(self) -> bool:
        return self.gates > 0

    @property
    def first_row(self) -> int:
        """The row of the QKV product with which the queries begin, after the gates."""
        return self.query * self.gates

    def gate_row(self, element: UOp) -> UOp:
        """The row of the gate of an element of the result (query * dim)."""
        return element if self.gates == self.dim else element // self.dim

    def opened(self, gate: UOp) -> UOp:
        """What a gate multiplies a result by."""
        return softplus(gate) if self.gating == "softplus" else sigmoid(gate)

    @property
    def rows(self) -> int:
        """Elements of a token's gates, queries, keys and values, as far as the layer computes them."""
        heads_of_kv = {"keys and values": 2, "keys": 1, "nothing": 0}[self.stored]
        return self.first_row + (self.query + self.kv * heads_of_kv) * self.dim

    @property
    def has_new(self) -> bool:
        """Whether attention has to store the keys and values of the tokens that it is of."""
        return self.stored != "nothing" and not self.is_stored

    @property
    def slots(self) -> int:
        """Tokens for which the cache has room."""
        return self.block * self.pool

    @property
    def table_size(self) -> int:
        """Blocks in the table of a sequence."""
        return -(-self.length // self.block)

    @property
    def cache_size(self) -> int:
        """Elements of the keys of a layer; its values have as many."""
        return self.kv * self.slots * self.chunks * 16

    @property
    def chunks(self) -> int:
        """Groups of sixteen dimensions; the last may have fewer."""
        return -(-self.dim // 16)

    @property
    def cache_planes(self) -> tuple[tuple[int, DType], ...]:
        """The buffers of a layer's cache, keys before values: numbers and type. If it is quantized, those of scales
        come after those of the words."""
        words = self.cache_size * self.kv_format.bits // 32
        scales = self.kv_format.scales(self.cache_size)
        return ((words, dtypes.uint32),) * 2 + ((scales, F16),) * (2 if scales else 0)

    @property
    def query_scale(self) -> float:
        """The factor of queries: `scale`, and log2(e) because the softmax uses exp2."""
        return float(self.scale * LOG2_E)

    def capped(self, score: UOp) -> UOp:
        """A score of queries that `query_scale` has scaled."""
        return soft_capped(score, self.softcap * LOG2_E)

    @property
    def cache_name(self) -> str:
        """The part of kernels' names that tells apart layers whose caches differ, or how much of them is seen."""
        window = f"_window_{self.window}" if self.window else ""
        kv_format = f"_{self.kv_format.value}" if self.kv_format.is_quantized else ""
        cap = f"_cap_{self.softcap:g}" if self.softcap else ""
        cap += "_chunked" * self.chunked + "_sloped" * self.sloped
        return f"{self.query}_{self.kv}_{self.dim}{window}_pool_{self.pool}{kv_format}{'_ahead' * self.ahead}{cap}"

    @property
    def name(self) -> str:
        """The part of kernels' names that tells layers of a model apart."""
        stored = {"keys and values": "", "keys": "_keys", "nothing": "_shared"}[self.stored]
        values = "_normed" * self.normed_values
        return f"{self.cache_name}{stored}{values}{self.gate_name}{'_stored' * self.is_stored}"

    @property
    def gate_name(self) -> str:
        """The part of kernels' names that tells kinds of gates apart."""
        of_heads = "_of_heads" * (self.gates == 1)
        return f"_gated{of_heads}{'_softplus' * (self.gating == 'softplus')}" if self.gated else ""

    def cached(self, limit: int) -> int:
        """The largest number of cached tokens that a query before position `limit` reads, in whole tiles."""
        limit, own = min(limit, self.length), not self.has_new
        return min(limit, self.window + TILE - 2 + own) if self.window else limit

    def first_seen(self, position: UOp) -> UOp:
        """The first token that a query sees."""
        if self.chunked and self.window:
            return position // self.window * self.window
        return (position - (self.window - 1)).maximum(0) if self.window else UOp.const(0)

    def norm_place(self, row: UOp, is_key: UOp, d: UOp) -> UOp:
        """Where the weight of a norm of heads is, for element `d` of the head that begins at a row of those of queries,
        keys and values."""
        return row + d if self.centred else is_key.where(UOp.const(self.dim), UOp.const(0)) + d

    def tile(self, kv: UOp, block: UOp, tile: UOp) -> UOp:
        """Where a key head has the tile of this number, which is in a `block` of the pool: in tiles."""
        tiles = self.block // TILE
        return kv * (self.pool * tiles) + block * tiles + tile % tiles


@functools.cache
def copy_block(heads: Heads) -> Kernel:
    """Copies a block of a layer's pool to another. Buffers: cache (`Heads.cache_planes`); blocks, int32 (2,): source,
    or -1 for zeros, and target."""
    h, threads = heads, 64

    def kernel(cache: Sequence[UOp], blocks: UOp) -> UOp:
        thread, kv = UOp.special(threads, "lidx0"), UOp.special(h.kv, "gidx0")
        source, target = (load_index(blocks, i, h.pool) for i in (0, 1))
        is_there = load(blocks, 0) >= 0
        stores = []
        for plane, (size, _) in zip(cache, h.cache_planes, strict=True):
            n = size // (h.kv * h.pool)  # neighbouring numbers of a key head
            for first in range(0, n, threads * 4):
                place = thread * 4 + first
                ok = None if first + threads * 4 <= n else place < n
                from_, to = ((kv * h.pool + block) * n + place for block in (source, target))
                stores += store_run(plane, to, load_run(plane, from_, 4, all_of(is_there, ok)), ok)
        return finish(f"copy_block_{h.name}", stores)

    return Kernel(kernel, (("cache", len(h.cache_planes)),), ("blocks",))
