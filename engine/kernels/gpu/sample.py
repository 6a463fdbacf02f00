"""Drawing a token on the device, so that sampled decode can run a step ahead as greedy decode does.

    [penalize] . leaders . ranked (three times) . draw

All that a sampler keeps is a head of the tokens sorted by their logits, so it is enough to know the `Shortlist` of
the largest, in order. They are found without sorting the vocabulary: the k largest lie in the k groups whose
largest members are the largest. `leaders` finds each group's largest, `ranked` counts for each group how many lead
it; one with a rank that is low enough puts its subgroups' largest in the place of that rank, and so on down to
single tokens, which end up sorted. Of equal logits the lower id comes first, as in `engine.model.sampling`, whose
steps `draw` takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.events import Sampling
from engine.kernels.gpu.uops import (
    F32,
    I32,
    INDEX,
    at,
    chain,
    f32,
    finish,
    load,
    load_index,
    maximum,
    shared,
    tree,
)

Kernel = Callable[..., UOp]
RECENT = 1024  # the largest repeat_last_n
_LANES = 32  # threads that rank a group
_RUN = 16  # numbers that a thread adds up for a prefix sum
_NOTHING = -3e38
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Shortlist:
    """The `length` largest of `vocab` logits, found by way of groups of `spans` tokens, level by level."""

    vocab: int
    length: int = 256
    spans: tuple[int, ...] = (64, 8, 1)

    def __post_init__(self) -> None:
        assert self.spans[-1] == 1 and self.length % _RUN == 0
        assert all(self.entries(level) % _LANES == 0 for level in range(len(self.spans)))

    def entries(self, level: int) -> int:
        """Groups that are ranked at a level, after the last level tokens of the list. A multiple of the lanes;
        what is beyond the vocabulary is below any logit."""
        if not level:
            return -(-self.vocab // (self.spans[0] * _LANES)) * _LANES
        return min(self.length, self.entries(level - 1)) * self.parts(level - 1)

    def parts(self, level: int) -> int:
        """Subgroups of a group."""
        return self.spans[level] // self.spans[level + 1] if level + 1 < len(self.spans) else 1

    def suffices(self, sampling: Sampling) -> bool:
        """Whether the tokens that `sampling` keeps are sure to be in the list."""
        few = sampling.temperature == 0 or 0 < sampling.top_k <= self.length
        return few and (sampling.repeat_penalty == 1 or sampling.repeat_last_n <= RECENT)


def settings_of(sampling: Sampling) -> NDArray[np.float32]:
    """What `draw` and `penalize` want to know, float32 (6,): how many tokens are kept at most, their share of the
    probability, log2 of the least probability against the most probable token's, log2(e) / temperature, the
    penalty and how many tokens it looks back."""
    s, greedy = sampling, sampling.temperature == 0
    kept = 1 if greedy else s.top_k
    least = np.log2(s.min_p) if s.min_p > 0 else _NOTHING
    slope = 1.0 if greedy else _LOG2_E / s.temperature
    return np.asarray([kept, s.top_p, least, slope, s.repeat_penalty, s.repeat_last_n], np.float32)


@functools.cache
def penalize(vocab: int, context: int, recent: int = RECENT) -> Kernel:
    """Makes the logits of recent tokens smaller: divided by the penalty if positive, else multiplied. Buffers: the
    logits, float32 (vocab,); the settings; the state (token, position); the tokens so far, int32 (context + 1,)."""

    def kernel(logits: UOp, settings: UOp, state: UOp, tokens: UOp) -> UOp:
        i = UOp.special(recent, "lidx0")
        seen = load_index(state, 1, context) + 1
        n = seen.minimum(load(settings, 5).cast(I32).cast(INDEX))
        own = load(tokens, (seen - n + i).minimum(context))
        # of several places of a token the last one acts
        later = UOp.range((n - i - 1).maximum(0), 0, AxisType.REDUCE)
        again = (
            load(tokens, seen - n + i + 1 + later).eq(own).where(f32(1), f32(0)).reduce(later, arg=Ops.ADD)
        )
        skips = shared(recent, slot=0)
        skips = skips.after(at(skips, i).store((i < n).where(again, f32(1))))
        acts = load(skips, i) < f32(0.5)
        token = own.maximum(0).minimum(vocab - 1).cast(INDEX)
        x, penalty = load(logits, token), load(settings, 4)
        smaller = (x > f32(0)).where(x / penalty, x * penalty)
        return finish(f"penalize_{vocab}", [at(logits, token, acts).store(smaller)])

    return kernel


@functools.cache
def leaders(shortlist: Shortlist) -> Kernel:
    """The largest logit of each group. Buffers: they, float32 (entries(0),); the logits, float32 (vocab,)."""

    def kernel(out: UOp, logits: UOp) -> UOp:
        blocks = shortlist.entries(0) // _LANES
        group = UOp.special(blocks, "gidx0") * _LANES + UOp.special(_LANES, "lidx0")
        span = shortlist.spans[0]
        largest = _largest(logits, group * span, span, shortlist.vocab)
        return finish(f"leaders_{shortlist.vocab}", [at(out, group).store(largest)])

    return kernel


@functools.cache
def ranked(shortlist: Shortlist, level: int, items: int = 8) -> Kernel:
    """Of the groups of a level those that lead, in order; of each the largest logit of its subgroups of the next
    level. Buffers: these, float32 (entries(level + 1),); the subgroups, int32, or at the last level the tokens; the
    groups' largest logits; the groups, except at level 0, where they are all there are; the logits, except at the
    last level."""
    first, last = level == 0, level == len(shortlist.spans) - 1
    n, parts = shortlist.entries(level), shortlist.parts(level)
    span = shortlist.spans[level] // parts

    def kernel(out: UOp, out_ids: UOp, values: UOp, *rest: UOp) -> UOp:
        ids, logits = None if first else rest[0], None if last else rest[-1]
        lane, slot = UOp.special(_LANES, "lidx0"), UOp.special(items, "lidx1")

        def entry(i: UOp) -> tuple[UOp, UOp]:
            return load(values, i), i.cast(I32) if ids is None else load(ids, i)

        mine, my_id = entry(UOp.special(n // items, "gidx0") * items + slot)
        loop = UOp.range(n // _LANES, 0, AxisType.REDUCE)
        value, id_ = entry(loop * _LANES + lane)
        leads = (value > mine) | (value.eq(mine) & (id_ < my_id))
        counts = shared(items * _LANES, slot=0)
        count = leads.where(f32(1), f32(0)).reduce(loop, arg=Ops.ADD)
        counts = counts.after(at(counts, slot * _LANES + lane).store(count))
        rank = tree([load(counts, slot * _LANES + k) for k in range(_LANES)]).cast(I32).cast(INDEX)
        part = lane % parts  # lanes beyond the parts write what others write
        id_ = my_id.cast(INDEX) * parts + part
        value = mine if logits is None else _largest(logits, id_ * span, span, shortlist.vocab)
        place, ok = rank * parts + part, rank < shortlist.length
        stores = [at(out, place, ok).store(value), at(out_ids, place, ok).store(id_.cast(I32))]
        return finish(f"ranked_{level}_{shortlist.vocab}", stores)

    return kernel


@functools.cache
def draw(shortlist: Shortlist, context: int) -> Kernel:
    """Keeps of the sorted tokens what the settings say and draws one. Buffers: the state (token, position), which
    moves on by one; the tokens that came after each position, int32 (context,); the tokens so far, int32
    (context + 1,); the sorted logits and tokens; the settings; a number in [0, 1) for each position, float32
    (context,)."""
    n = shortlist.entries(len(shortlist.spans))

    def kernel(
        state: UOp, history: UOp, tokens: UOp, values: UOp, ids: UOp, settings: UOp, numbers: UOp
    ) -> UOp:
        i = UOp.special(n, "lidx0")
        down = load(values, i) - load(values, 0)  # how far below the most probable, logarithmically
        limit, share, least, slope = (load(settings, k) for k in range(4))
        # read by all before one of them moves the state on
        number = shared(1, slot=0)
        number = number.after(
            at(number, 0, i.eq(0)).store(load(numbers, load_index(state, 1, context), i.eq(0)))
        )
        counts = i.cast(F32) < limit
        up_to, total = _prefix_sums(counts.where((down * f32(_LOG2_E)).exp2(), f32(0)), i, n, 1)
        before = i.eq(0).where(f32(0), load(up_to, (i - 1).maximum(0)))
        kept = counts & ((before < share * total) | (share >= f32(1))) & (down * f32(_LOG2_E) >= least)
        up_to, total = _prefix_sums(kept.where((down * slope).exp2(), f32(0)), i, n, 4)
        goal = load(number, 0) * total
        chosen = (i.eq(0) | (load(up_to, (i - 1).maximum(0)) <= goal)) & (goal < load(up_to, i))
        token, position = load(ids, i), load_index(state, 1, context)
        stores = [
            at(tokens, position + 1, chosen).store(token),
            at(history, position, chosen).store(token),
            at(state, 0, chosen).store(token),
            at(state, 1, chosen).store((position + 1).cast(I32)),
        ]
        return finish(f"draw_{n}", stores)

    return kernel


def _largest(logits: UOp, start: UOp, count: int, vocab: int) -> UOp:
    there = [start + j < vocab for j in range(count)]
    return maximum([ok.where(load(logits, start + j, ok), f32(_NOTHING)) for j, ok in enumerate(there)])


def _prefix_sums(value: UOp, i: UOp, n: int, slot: int) -> tuple[UOp, UOp]:
    """For n threads, what the first i + 1 of them hold, in shared memory, and what all hold. Never less for a later
    thread, whatever the rounding."""
    own, sums, result = (shared(n, slot + k) for k in range(3))
    own = own.after(at(own, i).store(value))
    run = i // _RUN
    within = chain(
        (i % _RUN >= k).where(load(own, run * _RUN + k), f32(0)) if k else load(own, run * _RUN)
        for k in range(_RUN)
    )
    sums = sums.after(at(sums, i).store(within))
    offset, so_far = f32(0), load(sums, _RUN - 1)
    for k in range(1, n // _RUN):
        offset = run.eq(k).where(so_far, offset)
        so_far = so_far + load(sums, k * _RUN + _RUN - 1)
    return result.after(at(result, i).store(offset + within)), so_far
