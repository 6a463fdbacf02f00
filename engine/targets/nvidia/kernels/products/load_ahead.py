"""Weights that a loop loads one step before it takes them.

A step of a product that begins with loads waits for memory before it can convert anything. The compiler does not move
loads to the step before, so the loop keeps what it loaded for the next step in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import UOp

from engine.fixes import warpgroup_products
from engine.targets.nvidia.kernels.half_words import halves, word_of
from engine.targets.nvidia.kernels.uops import U32, load_run, registers, store_run


class LoadedAhead:
    """Lists of uint32 and float16, `first` those of the first step. Registers hold them as words, two float16 in one.
    `slot`: that of their array."""

    def __init__(self, first: Sequence[Sequence[UOp]], slot: int) -> None:
        words = _words(first)
        self._like, self._n, array = first, len(words), registers(len(words), slot, U32)
        self._array = array.after(UOp.group(*store_run(array, 0, words)))

    def of(self, step: UOp) -> list[list[UOp]]:
        """What was loaded for the current step of a loop."""
        words = iter(load_run(self._array.after(step), 0, self._n))
        results = []
        for like in self._like:
            values: list[UOp] = []
            while len(values) < len(like):
                word = next(words)
                values += [word] if like[len(values)].dtype == U32 else halves(word)
            results.append(values[: len(like)])
        return results

    def keep(self, following: Sequence[Sequence[UOp]], done: UOp) -> UOp:
        """Keeps those of the next step, after what is `done` with those of this one."""
        return UOp.group(*store_run(self._array.after(done), 0, _words(following)))

    def keep_after(self, following: Sequence[Sequence[UOp]], effect: UOp) -> UOp:
        """Keeps those of the next step, after an effect that is no store and follows all loads of this one."""
        words = [warpgroup_products.after(word, effect) for word in _words(following)]
        return UOp.group(*store_run(self._array, 0, words))


def _words(lists: Sequence[Sequence[UOp]]) -> list[UOp]:
    words = []
    for values in lists:
        rest = list(values)
        while rest:
            value = rest.pop(0)
            words.append(value if value.dtype == U32 else word_of(value, rest.pop(0) if rest else value))
    return words
