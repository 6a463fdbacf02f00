"""What a request changes of its logits before a token is drawn from them, in this order, as `engine.runtime.sampling`:

    copied or allowed . add_bias . penalize

They work on a copy: the logits themselves stay as they are. Rows that are not sampled (`StepRows`) are only copied.
"""

from __future__ import annotations

import functools

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.sampling.sampling import SETTINGS, StepRows
from engine.targets.nvidia.kernels.uops import (
    I32,
    INDEX,
    LOWEST,
    U32,
    after_store,
    all_of,
    f32,
    finish,
    load,
    load_run,
    mask,
    shared,
    shift_right,
    store,
    u32,
)

MAX_BIASES = 320
"""Tokens that a request may have a bias for; OpenAI's interface allows 300."""
MAX_REPEAT_LAST_N = 1024
"""Tokens that penalties may look back."""
_THREADS = 256
_ONE = StepRows()


@functools.cache
def copied(vocab: int, rows: StepRows = _ONE) -> Kernel:
    """Buffers: out and logits, float32 (rows, vocab)."""

    def kernel(out: UOp, logits: UOp) -> UOp:
        token = UOp.special(-(-vocab // _THREADS), "gidx0") * _THREADS + UOp.special(_THREADS, "lidx0")
        inside, place = token < vocab, rows.number(1) * vocab + token
        return finish(
            f"copied_{vocab}_{rows.count}", [store(out, place, load(logits, place, inside), inside)]
        )

    return Kernel(kernel, ("out",), ("logits",))


def n_words(vocab: int) -> int:
    """Words of a mask, which has a bit for each token."""
    return -(-vocab // 32)


@functools.cache
def allowed(vocab: int, rows: StepRows = _ONE) -> Kernel:
    """As `copied`, except that tokens which may not be drawn get the lowest logit. Buffers: out; logits; words, a mask
    of each sequence, uint32 (sequences, n_words); state (`StepRows`), if rows `differ`. Memory of the host may hold the
    words: each is read once."""
    of_sequence, width = n_words(vocab), 32 * _THREADS

    def kernel(out: UOp, logits: UOp, words: UOp, state: UOp | None) -> UOp:
        block, i, row = (
            UOp.special(-(-vocab // width), "gidx0"),
            UOp.special(_THREADS, "lidx0"),
            rows.number(1),
        )
        number = block * _THREADS + i
        ok = all_of(number < of_sequence, is_sampled := rows.is_sampled(state, row))
        word = load(words, rows.sequence(state, row) * of_sequence + number, ok)
        all_words, stores = after_store(shared(_THREADS, 0, U32), i, word), []
        for j in range(32):
            token = block * width + j * _THREADS + i
            bit = mask(shift_right(load(all_words, j * (_THREADS // 32) + i // 32), (i % 32).cast(I32)), 1)
            may = bit.ne(u32(0)) if is_sampled is None else bit.ne(u32(0)) | is_sampled.logical_not()
            inside, place = token < vocab, row * vocab + token
            stores.append(store(out, place, may.where(load(logits, place, inside), f32(LOWEST)), inside))
        return finish(f"allowed_{vocab}_{rows.count}", stores)

    return Kernel(kernel, ("out",), ("logits", "words", rows.differ and "state"))


@functools.cache
def add_bias(vocab: int, rows: StepRows) -> Kernel:
    """Buffers: logits, float32 (rows, vocab); of each sequence ids, different tokens, int32 (MAX_BIASES,), -1 for none,
    and biases, what is added to their logits, float32 (MAX_BIASES,); state (`StepRows`), if rows `differ`."""

    def kernel(logits: UOp, ids: UOp, biases: UOp, state: UOp | None) -> UOp:
        i, row = UOp.special(MAX_BIASES, "lidx0"), rows.number(0)
        entry = rows.sequence(state, row) * MAX_BIASES + i
        token = load(ids, entry)
        place = row * vocab + token.maximum(0).minimum(vocab - 1).cast(INDEX)
        biased = load(logits, place) + load(biases, entry)
        ok = all_of(token >= 0, rows.is_sampled(state, row))
        return finish(f"add_bias_{vocab}_{rows.count}", [store(logits, place, biased, ok)])

    return Kernel(kernel, ("logits",), ("ids", "biases", rows.differ and "state"))


@functools.cache
def penalize(vocab: int, context: int, recent: int = MAX_REPEAT_LAST_N, rows: StepRows = _ONE) -> Kernel:
    """Lowers the logits of recent tokens: divides positive ones by the repetition penalty and multiplies negative ones,
    then subtracts the frequency penalty for each occurrence and the presence penalty once. Buffers: logits, float32
    (rows, vocab); settings (`settings_of`) of each sequence; state (`StepRows`); so_far, the tokens so far of each
    sequence, int32 (sequences, context + 1), negative ones of pictures."""

    def kernel(logits: UOp, settings: UOp, state: UOp, so_far: UOp) -> UOp:
        i, row = UOp.special(recent, "lidx0"), rows.number(0)
        sequence = rows.sequence(state, row)
        first = sequence * (context + 1)
        factor, last_n, frequency, presence = load_run(settings, sequence * SETTINGS + 4, 4)
        penalizes = factor.ne(f32(1)) | frequency.ne(f32(0)) | presence.ne(f32(0))
        if (is_sampled := rows.is_sampled(state, row)) is not None:
            penalizes = penalizes & is_sampled
        seen = rows.position(state, row, context) + 1
        n = penalizes.where(seen.minimum(last_n.cast(I32).cast(INDEX)), UOp.const(0))
        token_i = load(so_far, first + (seen - n + i).minimum(context))

        def occurrences(begin: UOp | int, count: UOp, axis: int) -> UOp:
            """How many of `count` recent tokens are the thread's."""
            loop = UOp.range(count, axis, AxisType.REDUCE)
            is_same = load(so_far, first + (seen - n + begin + loop)).eq(token_i)
            return is_same.where(f32(1), f32(0)).reduce(loop, arg=Ops.ADD)

        # a token that occurs several times is penalized once, by the thread of its last occurrence
        later, earlier = occurrences(i + 1, (n - i - 1).maximum(0), 0), occurrences(0, i.minimum(n), 1)
        counts = after_store(shared(recent, slot=0), i, (i < n).where(later, f32(1)))
        is_last = load(counts, i) < f32(0.5)
        place = token_i.maximum(0).minimum(vocab - 1).cast(INDEX) + row * vocab
        x = load(logits, place)
        smaller = (x > f32(0)).where(x / factor, x * factor) - (earlier + f32(1)) * frequency - presence
        return finish(
            f"penalize_{vocab}_{rows.count}", [store(logits, place, smaller, is_last & (token_i >= 0))]
        )

    return Kernel(kernel, ("logits",), ("settings", "state", "so_far"))
