"""The parts that both kernels of decode attention share: the tokens that a block attends to, the new token's rotated
queries and key, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.gpu.kv_cache import CACHE_SLACK, Heads
from engine.kernels.gpu.uops import (
    F16,
    F32,
    at,
    chain,
    f32,
    inverse_rms,
    load,
    load_index,
    rotated,
    shared,
    tree,
)
from engine.kernels.gpu.weight_layout import permuted


@dataclass(frozen=True)
class CacheRange:
    """The cached tokens that a block attends to: `count` tokens from `start` on, one of `splits` equal parts of the
    tokens before `position`. The first part also handles the new token."""

    part: UOp
    position: UOp
    start: UOp
    count: UOp

    @classmethod
    def of_block(cls, heads: Heads, state: UOp, splits: int) -> CacheRange:
        """`state`: int32 (2,), the step's token and position. The part is the block's second index."""
        part = UOp.special(splits, "gidx1") if splits > 1 else UOp.const(0)
        position = load_index(state, 1, heads.length - CACHE_SLACK)
        if splits == 1:
            return cls(part, position, UOp.const(0), position)
        each = (position + splits * 4 - 1) // (splits * 4) * 4
        start = part * each
        return cls(part, position, start, (position - start).maximum(0).minimum(each))

    @property
    def is_first(self) -> UOp:
        return self.part.eq(0)


@dataclass(frozen=True)
class NewToken:
    """The part of the step's token that a block works on: `group` query heads from `first_head` on, and their key head
    `kv`, at the token's `position`."""

    heads: Heads
    thread: UOp
    n_threads: int
    kv: UOp
    first_head: UOp
    group: int
    position: UOp

    @property
    def size(self) -> int:
        """Elements of the rotated queries and the key, rounded up to whole elements for each thread."""
        return -(-(self.group + 1) * self.heads.dim // self.n_threads) * self.n_threads

    def rotate(
        self, rows: UOp, angles: UOp, norms: UOp | None, before: Sequence[UOp]
    ) -> tuple[list[tuple[UOp, UOp]], list[tuple[UOp, UOp, UOp]]]:
        """Rotates (and norms, if the model does) this thread's elements of the queries and the key. `before`: effects
        that happen before the norm.

        Returns the elements as (index in (group + 1, dim), float32): the queries scaled, and the key rounded as the
        cache holds it. And the key's elements for the cache, as (index, whether it is an element of the key,
        float16)."""
        h, dim, half = self.heads, self.heads.dim, self.heads.dim // 2
        elements = (self.group + 1) * dim

        def first_row(head: UOp) -> UOp:
            """The first of a head's rows; head `group` is the key."""
            return head.eq(self.group).where((h.query + self.kv) * dim, (self.first_head + head) * dim)

        indices = [self.thread + i * self.n_threads for i in range(self.size // self.n_threads)]
        heads = [(e // dim).minimum(self.group) for e in indices]
        partners = [(e % dim < half).where(e % dim + half, e % dim - half) for e in indices]
        own = [load(rows, first_row(head) + e % dim) for head, e in zip(heads, indices, strict=True)]
        others = [load(rows, first_row(head) + p) for head, p in zip(heads, partners, strict=True)]
        if norms is not None:  # sums of squares of a few elements each
            few = next(n for n in (16, 8) if dim % n == 0)
            sums, has_sum = shared(elements // few, slot=4), self.thread < elements // few
            assert elements // few <= self.n_threads
            first = first_row(self.thread // (dim // few)) + self.thread % (dim // few) * few
            squares = chain(x * x for x in (load(rows, first + j, has_sum) for j in range(few)))
            sums = sums.after(UOp.group(at(sums, self.thread, has_sum).store(squares), *before))
            for i, (head, e) in enumerate(zip(heads, indices, strict=True)):
                total = tree([load(sums, head * (dim // few) + j) for j in range(dim // few)])
                norm = inverse_rms(total, dim, h.norm_eps or 0.0)
                weight = head.eq(self.group).where(UOp.const(dim), UOp.const(0))
                own[i] = own[i] * load(norms, weight + e % dim) * norm
                others[i] = others[i] * load(norms, weight + partners[i]) * norm
        values, cached = [], []
        for e, x, other in zip(indices, own, others, strict=True):
            d = e % dim
            z = rotated(x, other, d < half, load(angles, d % half), load(angles, d % half + half))
            is_key, as_key = e >= self.group * dim, z.cast(F16)
            values.append((e, is_key.where(as_key.cast(F32), z * f32(h.query_scale))))
            cached.append((h.key_index(self.kv, self.position, d), is_key & (e < elements), as_key))
        return values, cached

    def partial_scores(self, rotated_rows: UOp, slot: int) -> tuple[UOp, UOp]:
        """The new key's scores as sums of eight products each: shared memory (group, dim / 8), and the store to it."""
        eighths = self.heads.dim // 8
        sums, has_sum = shared(self.group * eighths, slot), self.thread < self.group * eighths
        key = self.group * self.heads.dim + self.thread % eighths * 8
        pairs = [
            (load(rotated_rows, self.thread * 8 + k, has_sum), load(rotated_rows, key + k, has_sum))
            for k in range(8)
        ]
        return sums, at(sums, self.thread, has_sum).store(chain(a * b for a, b in pairs))


@dataclass(frozen=True)
class AttentionResult:
    """The output buffers of decode attention. With one split: the output, float32, permuted and prescaled for the next
    product. With several: weighted sums of values (splits, query heads * dim), and for each split and query head the
    largest score and the sum of weights (splits, query heads, 2), for `combine`."""

    outs: Sequence[UOp]
    heads: Heads
    part: UOp

    def store(
        self,
        first_head: UOp,
        head: UOp,
        element: UOp,
        value_sum: UOp,
        weight_sum: UOp,
        top: UOp,
        prescale: UOp | None,
        is_first_of_head: UOp,
        valid: UOp | None = None,
    ) -> list[UOp]:
        """Stores an element of (query heads * dim), which belongs to head `first_head + head`. `prescale` is set if
        there is one split; otherwise the thread with the first element of a head also stores its largest score `top`
        and its sum of weights."""
        n = self.heads.query * self.heads.dim
        if prescale is not None:
            return [at(self.outs[0], permuted(element, n), valid).store(value_sum / weight_sum * prescale)]
        index = (self.part * self.heads.query + first_head + head) * 2
        is_one = is_first_of_head if valid is None else valid & is_first_of_head
        return [
            at(self.outs[0], self.part * n + element, valid).store(value_sum),
            at(self.outs[1], index, is_one).store(top),
            at(self.outs[1], index + 1, is_one).store(weight_sum),
        ]
