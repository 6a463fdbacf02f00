"""How kernels store and load elements of the KV cache, in any format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tinygrad import UOp

from engine.formats.kv_format import KVFormat
from engine.targets.nvidia.kernels.attention import half_cache, quantized_cache
from engine.targets.nvidia.kernels.attention.kv_cache import Heads
from engine.targets.nvidia.kernels.uops import load_run


class Storage(Protocol):
    """A format: the functions of its module. `cache`: the buffers (`Heads.cache_planes`), keys if `which` is 0, values
    if it is 1. A `tile` is `Heads.tile`."""

    def store_quad(
        self, heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp,
        block: Sequence[UOp], own: Sequence[UOp], valid: UOp | None,
    ) -> list[UOp]:  # fmt: skip
        """Stores a quad of dimensions of a token, its `own` elements, float32, of those of its `block`, if the format
        has blocks."""
        ...

    def load_quad(
        self, heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp
    ) -> list[UOp]:
        """A quad of dimensions of a token, float32."""
        ...

    def eight_keys(
        self, heads: Heads, cache: Sequence[UOp], tile: UOp, chunk: UOp, t: UOp, g: UOp
    ) -> list[UOp]:
        """Eight float16: the dimensions 16 * chunk + 4t to 4t + 3 of the tokens 2g and 2g + 1 of a tile."""
        ...

    def eight_values(
        self, heads: Heads, cache: Sequence[UOp], tile: UOp, chunk: UOp, t: UOp, g: UOp
    ) -> list[UOp]:
        """Eight float16: of the tokens 4t to 4t + 3 of a tile the dimension 16 * chunk + 2g, then the one after it."""
        ...


STORAGES: dict[KVFormat, Storage] = {KVFormat.F16: half_cache, KVFormat.Q8_0: quantized_cache}


def store_quad(
    heads: Heads, cache: Sequence[UOp], which: int, tile: UOp, token: UOp, quad: UOp, row: UOp, first: UOp,
    valid: UOp,
) -> list[UOp]:  # fmt: skip
    """Stores a quad of dimensions of a token's key (`which` is 0) or value (1), whose elements are in `row`, float32,
    from `first` on. The token is in a `tile` (`Heads.tile`)."""
    own, block, n = load_run(row, first + quad * 4, 4), list[UOp](), heads.kv_format.block
    if n:
        block = load_run(row, first + quad // (n // 4) * n, n)
    storage = STORAGES[heads.kv_format]
    return storage.store_quad(heads, cache, which, tile, token, quad, block, own, valid)
