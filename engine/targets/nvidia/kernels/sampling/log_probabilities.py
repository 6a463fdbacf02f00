"""Log-probabilities of a token that was chosen, and of the most probable ones, for the host:

    leaders . ranked (three times) . exp_sums . [those that choose] . told

The host reads them while the next step runs, so it never needs the logits themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.sampling.sampling import Shortlist, StepRows
from engine.targets.nvidia.kernels.uops import (
    I32,
    INDEX,
    LOG2_E,
    after_store,
    all_of,
    f32,
    finish,
    load,
    load_run,
    shared,
    store,
    tree,
)

TOP = 20
"""Most probable tokens that are told."""
NUMBERS = 1 + 2 * TOP
"""The numbers that are told: the bits of a log-probability, tokens, and the bits of theirs."""
_THREADS = 256
_EACH = 8  # tokens that a thread adds
_RUN = 16  # numbers that a thread adds of other threads


def n_sums(vocab: int) -> int:
    """The sums of a row."""
    return -(-vocab // (_THREADS * _EACH))


@functools.cache
def exp_sums(shortlist: Shortlist, rows: int) -> Kernel:
    """Adds e^(logit - largest logit). Buffers: out, a sum for each block of tokens, float32 (rows, n_sums); logits,
    float32 (rows, vocab); values, the sorted logits of each row, float32."""
    vocab, n = shortlist.vocab, shortlist.entries(len(shortlist.spans))
    blocks = n_sums(vocab)

    def kernel(out: UOp, logits: UOp, values: UOp) -> UOp:
        block, i, row = UOp.special(blocks, "gidx0"), UOp.special(_THREADS, "lidx0"), StepRows(rows).number(1)
        largest = load(values, row * n)

        def masses() -> Iterator[UOp]:
            for j in range(_EACH):
                token = (block * _EACH + j) * _THREADS + i
                ok = token < vocab
                log_ratio = load(logits, row * vocab + token, ok) - largest
                yield ok.where((log_ratio * f32(LOG2_E)).exp2(), f32(0))

        total = _sum_of_all(tree(list(masses())), i)
        return finish(f"exp_sums_{vocab}_{rows}", [store(out, row * blocks + block, total, i.eq(0))])

    return Kernel(kernel, ("out",), ("logits", "values"))


@functools.cache
def told(shortlist: Shortlist, context: int, rows: StepRows) -> Kernel:
    """What the host reads of each row that is used. Buffers: out, int32 (2, sequences, NUMBERS), the first half is for
    tokens after even positions, so that a step leaves those of the step before; sums, of `exp_sums`; logits, float32
    (rows, vocab); values, their sorted ones, float32, and ids, the tokens of these, int32; state (`StepRows`) after the
    choice."""
    vocab, n = shortlist.vocab, shortlist.entries(len(shortlist.spans))
    blocks = n_sums(vocab)
    assert n >= TOP

    def kernel(out: UOp, sums: UOp, logits: UOp, values: UOp, ids: UOp, state: UOp) -> UOp:
        i, row = UOp.special(_THREADS, "lidx0"), rows.number(0)
        is_used = rows.is_used(state, row)
        own = [
            load(sums, row * blocks + k, k < blocks)
            for k in (i + first for first in range(0, blocks, _THREADS))
        ]
        log_total = _sum_of_all(tree(own), i).log2() * f32(1 / LOG2_E) + load(values, row * n)
        half = (rows.position(state, row, context + 1) + 1) % 2
        place = (half * rows.sequences + rows.sequence(state, row)) * NUMBERS
        token = load(state, row).maximum(0).minimum(vocab - 1).cast(INDEX)

        def bits(logit: UOp) -> UOp:
            return (logit - log_total).bitcast(I32)

        first, listed = all_of(i.eq(0), is_used), all_of(i < TOP, is_used)
        stores = [
            store(out, place, bits(load(logits, row * vocab + token)), first),
            store(out, place + 1 + i, load(ids, row * n + i, listed), listed),
            store(out, place + 1 + TOP + i, bits(load(values, row * n + i, listed)), listed),
        ]
        return finish(f"told_{vocab}_{rows.count}", stores)

    return Kernel(kernel, ("out",), ("sums", "logits", "values", "ids", "state"))


def _sum_of_all(value: UOp, i: UOp) -> UOp:
    """The sum of the values of all threads, in each of them."""
    values = after_store(shared(_THREADS, slot=0), i, value)
    sums = after_store(shared(_THREADS, slot=1), i, tree(load_run(values, i // _RUN * _RUN, _RUN)))
    return tree([load(sums, k * _RUN) for k in range(_THREADS // _RUN)])
