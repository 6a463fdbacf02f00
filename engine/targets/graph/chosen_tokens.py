"""Attention to chosen tokens (`Indexer` in `engine.description.sublayers`) as tensor graphs."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from tinygrad import Tensor, dtypes

from engine.description.attention import Indexer
from engine.description.spec import ModelSpec
from engine.targets.graph.cached import stored_in
from engine.targets.graph.parts import Parts, Run


def index_caches(spec: ModelSpec, places: int) -> list[Tensor]:
    """For each indexer the keys of tokens, neither normed nor rotated, at their places: (1, 1, places, size), zeros."""
    type = dtypes.float32 if spec.is_float32 else dtypes.float16
    indexers = (attend.indexer for attend in spec.attention if attend.indexer)
    return [Tensor.zeros(1, 1, places, i.size, dtype=type).contiguous().realize() for i in indexers]


class ChosenTokens(Parts):
    """Which tokens attention does not read. All blocks that a context may have are judged, however short a text is, so
    that shapes do not depend on its length."""

    def _unchosen(self, indexer: Indexer, x: Tensor, run: Run, context: int) -> Tensor | None:
        """-inf where a query of x (n, dim), which is normed, does not read a token: (n, position + n). None if all are
        read in a `context` of so many tokens."""
        cache, step, of = next(run.index_caches), run.step, indexer
        if context <= of.top:
            return None
        n, position = cast(int, x.shape[0]), step.position
        new = self._product(of.k, x).reshape(1, 1, n, of.size)
        cache = stored_in(cache, new.cast(cache.dtype), step)
        blocks = context // of.block
        keys = cache[0, 0][step.places[: blocks * of.block]].cast(dtypes.float32)
        keys = self._norm(keys.reshape(blocks, of.block, of.size).mean(1), of.k_norm)
        firsts = np.arange(blocks, dtype=np.int32) * of.block
        cos, sin = self._ropes[of.rope]
        keys = _turned(keys, cos[Tensor(firsts)], sin[Tensor(firsts)])
        q = self._norm(self._product(of.q, x).reshape(n, of.heads, of.size), of.q_norm)
        if step.cos is not None and step.sin is not None:
            cos, sin = step.cos.unsqueeze(1), step.sin.unsqueeze(1)
        else:
            cos, sin = (table[position : position + n].unsqueeze(1) for table in (cos, sin))
        q = _turned(q, cos, sin)
        scores = (q.reshape(n * of.heads, of.size) @ keys.T).relu().reshape(n, of.heads, blocks).sum(1)
        own = Tensor(np.arange(n, dtype=np.int32)).reshape(n, 1) + position
        whole = (own + 1) // of.block
        numbers = Tensor(np.arange(blocks, dtype=np.int32))
        scores = (numbers.reshape(1, -1) < whole).where(scores, -1.0).contiguous()
        mine, others = scores.unsqueeze(2), scores.unsqueeze(1)
        is_earlier = numbers.reshape(1, 1, -1) < numbers.reshape(1, -1, 1)
        better = ((others > mine) | ((others == mine) & is_earlier)).cast(dtypes.int32).sum(-1)
        unread = (better >= of.top // of.block) & (numbers.reshape(1, -1) < whole)
        hidden = unread.where(-math.inf, 0.0).contiguous().repeat_interleave(of.block, dim=1)
        room = cast(int, step.places.shape[0]) - blocks * of.block
        return hidden.pad((None, (0, room))).contiguous()[:, : position + n]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)
