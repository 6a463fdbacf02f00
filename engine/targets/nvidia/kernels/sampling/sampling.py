"""The last kernels of a decode step: they choose the next token on the device, so that the next step can start before
the host has seen it.

    greedy:   next_token
    sampled:  [`logit_changes`] . leaders . ranked (three times) . draw

A sampler keeps only the most probable tokens, so the `Shortlist` of the largest logits, in order, is enough. It is
found without sorting the vocabulary: the k largest logits are in the k groups whose largest logits are the largest.
`leaders` finds the largest logit of each group. `ranked` counts for each group how many groups come before it; a group
with a low enough rank stores the largest logits of its subgroups at the place of that rank. The subgroups of the last
level are single tokens, which end up sorted. Of equal logits the lower token comes first, as in
`engine.runtime.sampling`, whose steps `draw` takes.

A step of several rows (`StepRows`) chooses the token of each one with the settings of its own sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.protocol.events import Sampling
from engine.targets.nvidia.kernels.device import spills_early
from engine.targets.nvidia.kernels.products.epilogues import LOWEST_LOGIT, argmax, comparable, is_finite
from engine.targets.nvidia.kernels.uops import (
    F32,
    I32,
    INDEX,
    LOG2_E,
    after_store,
    all_of,
    chain,
    f32,
    finish,
    load,
    load_index,
    load_run,
    maximum,
    shared,
    store,
    tree,
)

NOT_FINITE = -2
"""In place of a next token, where logits are no finite numbers. The next step goes on with token 0."""
SETTINGS = 8  # numbers of `settings_of`
_LANES = 32  # threads that rank a group
_RUN = 16  # numbers that a thread adds for a prefix sum


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, of `sequences` in all, and its state: of one row, int32 (3,), its token, position, and
    sequence if there are several; of `count` rows, int32 (4, count), the same of each, and what it is (`USED`)."""

    count: int = 1
    sequences: int = 1

    USED: ClassVar[int] = 1  # a row whose next token is the most probable one; 0: there is none
    SAMPLED: ClassVar[int] = 2  # a row whose next token is drawn

    @property
    def differ(self) -> bool:
        """Whether it depends on the state of which sequence a row is, and whether it is drawn."""
        return self.count > 1 or self.sequences > 1

    def number(self, axis: int) -> UOp:
        """The number of the row that a block works on, along an axis of the grid."""
        return UOp.special(self.count, f"gidx{axis}") if self.count > 1 else UOp.const(0)

    def position(self, state: UOp, row: UOp, context: int) -> UOp:
        return load_index(state, row + self.count, context)

    def sequence(self, state: UOp | None, row: UOp) -> UOp:
        if self.sequences == 1:
            return UOp.const(0)
        assert state is not None
        return load(state, row + 2 * self.count).cast(INDEX)

    def is_used(self, state: UOp, row: UOp) -> UOp | None:
        """None: every row is."""
        return load(state, row + 3 * self.count).ne(0) if self.count > 1 else None

    def is_sampled(self, state: UOp | None, row: UOp) -> UOp | None:
        """None: every row is."""
        if self.count == 1:
            return None
        assert state is not None
        return load(state, row + 3 * self.count).eq(self.SAMPLED)

    def token_slot(self, row: UOp, position: UOp) -> UOp:
        """Where the next token goes: that of one row to its position; those of several to int32 (2, count), the first
        row of which is for even positions, so that a step leaves those of the step before."""
        return position % 2 * self.count + row if self.count > 1 else position


_ONE = StepRows()


@functools.cache
def next_token(n_blocks: int, context: int, threads: int = 0) -> Kernel:
    """The most probable token, from the outs of `epilogues.as_logits`. Buffers: state, int32 (2,):
    token and position, which advances by one; tokens, that after each position, int32 (context,); largest, the largest
    logit of each block, float32 (n_blocks,), and largest_rows, its row, int32 (n_blocks,)."""
    threads = threads or _threads()

    def kernel(state: UOp, tokens: UOp, largest: UOp, largest_rows: UOp) -> UOp:
        thread = UOp.special(threads, "lidx0")
        row, told = _most_probable(largest, largest_rows, n_blocks, thread, threads, lambda block: block)
        first = thread.eq(0)
        position = load(state, 1)
        stores = [store(state, 0, row, first), store(state, 1, position + UOp.const(1, I32), first)]
        stores.append(store(tokens, load_index(state, 1, context), told, first))
        return finish("next_token", stores)

    return Kernel(kernel, ("state", "tokens"), ("largest", "largest_rows"))


@functools.cache
def next_tokens(n_blocks: int, count: int) -> Kernel:
    """As `next_token`, for a step of several sequences, from the outs of `small_batch.as_logits`. Buffers: state
    (`StepRows`), in which tokens that are used become the next ones and positions advance; tokens, the next ones
    (`StepRows.token_slot`); largest, the largest logit of each token and block, float32 (count, n_blocks), and
    largest_rows, its row, int32 (count, n_blocks)."""
    rows, threads = StepRows(count), _threads()

    def kernel(state: UOp, tokens: UOp, largest: UOp, largest_rows: UOp) -> UOp:
        thread, token = UOp.special(threads, "lidx0"), UOp.special(count, "gidx0")
        place = lambda block: token * n_blocks + block
        row, told = _most_probable(largest, largest_rows, n_blocks, thread, threads, place)
        used, position = all_of(thread.eq(0), rows.is_used(state, token)), load(state, token + count)
        stores = [
            store(tokens, rows.token_slot(token, position.cast(INDEX)), told, used),
            store(state, token, row, used),
            store(state, token + count, position + UOp.const(1, I32), used),
        ]
        return finish(f"next_tokens_{count}", stores)

    return Kernel(kernel, ("state", "tokens"), ("largest", "largest_rows"))


def _threads() -> int:
    """The threads of a block that finds the largest of many logits. More share the work, but have fewer registers."""
    return 512 if spills_early() else 1024


def _most_probable(
    block_max: UOp, block_row: UOp, n_blocks: int, thread: UOp, threads: int, place: Callable[[UOp], UOp]
) -> tuple[UOp, UOp]:
    """The row of the largest logit, int32, from that of each block, which is at a `place` in two arrays, and what the
    host is told (`NOT_FINITE`). `thread`: the number of the current one of `threads`, which all find it."""
    each, warps, pairs = -(-n_blocks // threads), threads // 32, []
    for j in range(each):
        k = thread * each + j
        ok = k < n_blocks
        largest = ok.where(load(block_max, place(k), ok), f32(LOWEST_LOGIT))
        pairs.append((largest, load(block_row, place(k), ok)))
    value, row = argmax(pairs)
    for slot, width in ((0, threads), (2, 32)):
        values, rows = shared(width, slot), shared(width, slot + 1, I32)
        ok = thread < width
        stores = UOp.group(store(values, thread, value, ok), store(rows, thread, row, ok))
        values, rows = values.after(stores), rows.after(stores)
        if slot == 0:
            ok = thread < 32
            pairs = [
                (load(values, thread * warps + k, ok), load(rows, thread * warps + k, ok))
                for k in range(warps)
            ]
        else:
            pairs = [(load(values, k), load(rows, k)) for k in range(32)]
        value, row = argmax(pairs)
    return _or_not_finite(row, is_finite(value))


def _or_not_finite(token: UOp, ok: UOp) -> tuple[UOp, UOp]:
    """The next token for the next step, and for the host. `ok`: whether it was chosen among finite logits."""
    return ok.where(token, UOp.const(0, I32)), ok.where(token, UOp.const(NOT_FINITE, I32))


@dataclass(frozen=True)
class Shortlist:
    """The `length` largest of `vocab` logits. Level i of the search has groups of `spans[i]` tokens."""

    vocab: int
    length: int = 256
    spans: tuple[int, ...] = (64, 8, 1)

    def __post_init__(self) -> None:
        assert self.spans[-1] == 1 and self.length % _RUN == 0
        assert all(self.entries(level) % _LANES == 0 for level in range(len(self.spans)))

    def entries(self, level: int) -> int:
        """Groups to rank at a level; after the last level, tokens of the list. A multiple of 32, so some groups may be
        beyond the vocabulary; their logits count as the lowest."""
        if not level:
            return -(-self.vocab // (self.spans[0] * _LANES)) * _LANES
        return min(self.length, self.entries(level - 1)) * self.parts(level - 1)

    def parts(self, level: int) -> int:
        """Subgroups of a group at a level."""
        return self.spans[level] // self.spans[level + 1] if level + 1 < len(self.spans) else 1

    def suffices(self, sampling: Sampling) -> bool:
        """Whether the list is certain to contain all tokens that `sampling` keeps."""
        return sampling.temperature == 0 or 0 < sampling.top_k <= self.length


def settings_of(sampling: Sampling) -> NDArray[np.float32]:
    """The settings that `draw` and `penalize` read, float32 (SETTINGS,): top_k, top_p, log2(min_p), log2(e) /
    temperature, and those of penalties, repeat_penalty, repeat_last_n, frequency_penalty and presence_penalty. Greedy
    sampling is a top_k of 1."""
    s, greedy = sampling, sampling.temperature == 0
    top_k = 1 if greedy else s.top_k
    log_min_p = np.log2(s.min_p) if s.min_p > 0 else LOWEST_LOGIT
    slope = 1.0 if greedy else LOG2_E / s.temperature
    penalties = s.repeat_penalty, s.repeat_last_n, s.frequency_penalty, s.presence_penalty
    return np.asarray([top_k, s.top_p, log_min_p, slope, *penalties], np.float32)


@functools.cache
def leaders(shortlist: Shortlist, rows: int = 1) -> Kernel:
    """The largest logit of each group of the first level. Buffers: out, these, float32 (rows, entries(0)); logits,
    float32 (rows, vocab)."""

    def kernel(out: UOp, logits: UOp) -> UOp:
        blocks = shortlist.entries(0) // _LANES
        group = UOp.special(blocks, "gidx0") * _LANES + UOp.special(_LANES, "lidx0")
        span, row = shortlist.spans[0], StepRows(rows).number(1)
        largest = _largest(logits, group * span, span, shortlist.vocab, row)
        place = row * shortlist.entries(0) + group
        return finish(f"leaders_{shortlist.vocab}_{rows}", [store(out, place, largest)])

    return Kernel(kernel, ("out",), ("logits",))


@functools.cache
def ranked(shortlist: Shortlist, level: int, items: int = 8, rows: int = 1) -> Kernel:
    """Sorts the groups of a level by their largest logits, and finds the largest logit of each subgroup of the first
    ones. Buffers, for each of `rows`: out, these logits, float32 (entries(level + 1),); out_ids, the numbers of the
    subgroups, int32 (the same size), which at the last level are tokens; values, the groups' largest logits, float32
    (entries(level),); ids, the groups' numbers, int32, except at level 0, whose groups are all groups in order; logits,
    float32 (vocab,), except at the last level."""
    first, last = level == 0, level == len(shortlist.spans) - 1
    n, parts = shortlist.entries(level), shortlist.parts(level)
    span = shortlist.spans[level] // parts

    def kernel(out: UOp, out_ids: UOp, values: UOp, ids: UOp | None, logits: UOp | None) -> UOp:
        lane, slot = UOp.special(_LANES, "lidx0"), UOp.special(items, "lidx1")
        row = StepRows(rows).number(1)

        def entry(i: UOp) -> tuple[UOp, UOp]:
            place = row * n + i
            return load(values, place), i.cast(I32) if ids is None else load(ids, place)

        own, own_id = entry(UOp.special(n // items, "gidx0") * items + slot)
        loop = UOp.range(n // _LANES, 0, AxisType.REDUCE)
        value, id_ = entry(loop * _LANES + lane)
        precedes = (value > own) | (value.eq(own) & (id_ < own_id))
        count = precedes.where(f32(1), f32(0)).reduce(loop, arg=Ops.ADD)
        counts = after_store(shared(items * _LANES, slot=0), slot * _LANES + lane, count)
        rank = tree(load_run(counts, slot * _LANES, _LANES)).cast(I32).cast(INDEX)
        part = lane % parts  # lanes beyond the parts store the same values again
        id_ = own_id.cast(INDEX) * parts + part
        value = own if logits is None else _largest(logits, id_ * span, span, shortlist.vocab, row)
        index = row * shortlist.entries(level + 1) + rank * parts + part
        ok = rank < shortlist.length
        stores = [store(out, index, value, ok), store(out_ids, index, id_.cast(I32), ok)]
        return finish(f"ranked_{level}_{shortlist.vocab}_{rows}", stores)

    return Kernel(kernel, ("out", "out_ids"), ("values", not first and "ids", not last and "logits"))


@functools.cache
def draw(shortlist: Shortlist, context: int, rows: StepRows = _ONE) -> Kernel:
    """Filters the sorted tokens by the settings and draws one; takes the first for a row that is not sampled. Buffers:
    state (`StepRows`), in which it becomes the token and the position advances; tokens, the next ones
    (`StepRows.token_slot`); so_far, the tokens so far of each sequence, int32 (sequences, context + 1); values, the
    sorted logits of each row, float32, and ids, their tokens, int32; of each sequence settings (`settings_of`), and
    uniforms, a uniform random number in [0, 1) for each position, float32 (sequences, context)."""
    n = shortlist.entries(len(shortlist.spans))

    def kernel(
        state: UOp, tokens: UOp, so_far: UOp, values: UOp, ids: UOp, settings: UOp, uniforms: UOp
    ) -> UOp:
        i, row = UOp.special(n, "lidx0"), rows.number(0)
        sequence, position = rows.sequence(state, row), rows.position(state, row, context)
        # the natural logarithm of the probability, relative to the most probable token's
        largest = load(values, row * n)
        log_ratio = load(values, row * n + i) - largest
        top_k, top_p, log_min_p, slope = load_run(settings, sequence * SETTINGS, 4)
        # all threads read the position through this number before one of them advances the state
        first = i.eq(0)
        number = load(uniforms, sequence * context + position, first)
        uniform = after_store(shared(1, slot=0), 0, number, first)
        in_top_k = i.cast(F32) < top_k
        up_to, total = _prefix_sums(in_top_k.where((log_ratio * f32(LOG2_E)).exp2(), f32(0)), i, n, 1)
        before = first.where(f32(0), load(up_to, (i - 1).maximum(0)))
        in_top_p = (before < top_p * total) | (top_p >= f32(1))
        kept = in_top_k & in_top_p & (log_ratio * f32(LOG2_E) >= log_min_p)
        if (is_sampled := rows.is_sampled(state, row)) is not None:
            kept = is_sampled.where(kept, first)
        up_to, total = _prefix_sums(kept.where((log_ratio * slope).exp2(), f32(0)), i, n, 4)
        goal = load(uniform, 0) * total
        chosen = (first | (load(up_to, (i - 1).maximum(0)) <= goal)) & (goal < load(up_to, i))
        finite = is_finite(largest)
        chosen = finite.where(chosen, first)
        if (is_used := rows.is_used(state, row)) is not None:
            chosen = chosen & is_used
        token, told = _or_not_finite(load(ids, row * n + i), finite)
        stores = [
            store(so_far, sequence * (context + 1) + position + 1, token, chosen),
            store(tokens, rows.token_slot(row, position), told, chosen),
            store(state, row, token, chosen),
            store(state, row + rows.count, (position + 1).cast(I32), chosen),
        ]
        return finish(f"draw_{n}_{rows.count}", stores)

    return Kernel(kernel, ("state", "tokens", "so_far"), ("values", "ids", "settings", "uniforms"))


def _largest(logits: UOp, start: UOp, count: int, vocab: int, row: UOp) -> UOp:
    """The largest of `count` logits of a row from `start` on; the lowest value if all are beyond the vocabulary."""
    inside = [start + j < vocab for j in range(count)]
    values = (
        ok.where(comparable(load(logits, row * vocab + start + j, ok)), f32(LOWEST_LOGIT))
        for j, ok in enumerate(inside)
    )
    return maximum(list(values))


def _prefix_sums(value: UOp, i: UOp, n: int, slot: int) -> tuple[UOp, UOp]:
    """The sums of the values of the first i + 1 of n threads, in shared memory, and the sum of all. Rounding does not
    make them decrease. Uses the slots `slot` to `slot + 2`."""
    values = after_store(shared(n, slot), i, value)
    run = i // _RUN
    in_run = chain(
        (i % _RUN >= k).where(load(values, run * _RUN + k), f32(0)) if k else load(values, run * _RUN)
        for k in range(_RUN)
    )
    sums = after_store(shared(n, slot + 1), i, in_run)
    offset, so_far = f32(0), load(sums, _RUN - 1)
    for k in range(1, n // _RUN):
        offset = run.eq(k).where(so_far, offset)
        so_far = so_far + load(sums, k * _RUN + _RUN - 1)
    return after_store(shared(n, slot + 2), i, offset + in_run), so_far
