"""How the attention of a step of several sequences is divided among thread blocks: the longer a sequence is, the more
parts it has.

A block goes through its part in rounds of a number of tokens. There are as few rounds as let all sequences together
have no more parts than there are blocks. A kernel at the beginning of a step finds that number, since the positions
are in device memory only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinygrad import UOp

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.attention.kv_cache import Heads
from engine.targets.nvidia.kernels.uops import (
    I32,
    INDEX,
    chain,
    finish,
    load_index,
    load_run,
    maximum,
    shared,
    store,
)

_NUMBERS = 4  # of a part
_TRIED = 32  # numbers of rounds
_NO_PART = 1 << 16  # beyond all parts of any sequence


@dataclass(frozen=True)
class RowParts:
    """`parts` parts of the `tokens` rows of a step, of which a row may have up to `most`. `round`: tokens of a round of
    one part. Rows are of `heads`."""

    heads: Heads
    tokens: int
    parts: int
    most: int
    round: int

    def __post_init__(self) -> None:
        assert self.tokens < self.parts <= 1024

    @property
    def size(self) -> int:
        """Numbers in the buffer of `divide_rows`."""
        return _NUMBERS * self.parts + 2 * self.tokens


@dataclass(frozen=True)
class Part:
    """A part of a row: it is number `part` of `parts`, and takes so many `rounds`. What is no part has a number that is
    larger than that of any token."""

    token: UOp
    part: UOp
    parts: UOp
    rounds: UOp

    @classmethod
    def of(cls, shares: UOp, number: UOp, tokens: int) -> Part:
        """The part of a number, from the buffer of `divide_rows`."""
        limits = (0, tokens - 1), (0, _NO_PART), (1, _NO_PART), (0, _NO_PART)
        loads = zip(load_run(shares, number * _NUMBERS, _NUMBERS), limits, strict=True)
        return cls(*(x.maximum(low).minimum(high).cast(INDEX) for x, (low, high) in loads))


def parts_of_row(shares: UOp, token: UOp, parts: int) -> tuple[UOp, UOp]:
    """The number of a row's first part, and how many it has."""
    first, count = load_run(shares, parts * _NUMBERS + token * 2, 2)
    return first.maximum(0).minimum(parts - 1).cast(INDEX), count.cast(INDEX)


@functools.cache
def divide_rows(rows: RowParts) -> Kernel:
    """Divides the rows. Buffers: shares, int32 (`RowParts.size`,): `Part` of each number, then for each row the number
    of its first part, and how many it has; state, int32 (4, tokens), that of the step."""
    n, heads = rows.tokens, rows.heads
    threads = -(-max(rows.parts, _TRIED) // 32) * 32

    def kernel(shares: UOp, state: UOp) -> UOp:
        thread = UOp.special(threads, "lidx0")
        positions = (load_index(state, n + i, heads.length) for i in range(n))
        rounds = [_divided(heads.seen(position)[1], rows.round) for position in positions]  # if of one part
        total, longest = chain(rounds), maximum(rounds)
        least = _divided(total, rows.parts).maximum(_divided(longest, rows.most)).maximum(1)
        enough = _divided(total, rows.parts - n).maximum(least)
        own = least + _divided((enough - least) * (thread % _TRIED), _TRIED - 1)
        needed = chain(_divided(x, own).maximum(1) for x in rounds)
        fewest = (needed <= rows.parts).where(own, enough)
        tried = shared(_TRIED, 0, I32)
        tried = tried.after(store(tried, thread, fewest.cast(I32), thread < _TRIED))
        most_rounds = load_run(tried, 0, _TRIED)
        chosen = functools.reduce(lambda a, b: a.minimum(b), most_rounds).maximum(1).cast(INDEX)
        counts = [_divided(x, chosen).maximum(1) for x in rounds]
        numbers = [UOp.const(0), UOp.const(_NO_PART), UOp.const(1), UOp.const(0)]
        before, stores = UOp.const(0), []
        for i, (count, x) in enumerate(zip(counts, rounds, strict=True)):
            is_own = (thread >= before) & (thread < before + count)
            own_numbers = UOp.const(i), thread - before, count, _divided(x, count)
            numbers = [is_own.where(a, b) for a, b in zip(own_numbers, numbers, strict=True)]
            place = rows.parts * _NUMBERS + 2 * i
            stores += [
                store(shares, place + k, y.cast(I32), thread.eq(0)) for k, y in enumerate((before, count))
            ]
            before = before + count
        is_part = thread < rows.parts
        stores += [store(shares, thread * _NUMBERS + k, y.cast(I32), is_part) for k, y in enumerate(numbers)]
        return finish(f"divide_rows_{n}_{rows.parts}_{rows.most}_{rows.round}_{heads.name}", stores)

    return Kernel(kernel, ("shares",), ("state",))


def _divided(x: UOp, by: int | UOp) -> UOp:
    """x / `by`, rounded up, of numbers that are not negative."""
    return (x + by - 1) // by
