"""Time mixing (RWKV 7): shares of the token before, and a recurrence with a matrix for each head.

    norm · shift · products · time_mix · product

Steps have rows and slots as those of delta nets (`kernels.delta_net`). The state of a head, a matrix (keys, values),
stays in the L1 cache over all tokens of a chunk: each token reads it twice and writes it once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sigmoid
from engine.targets.cpu.kernels.kernel_builder import F32, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.step_state import runs_of


@dataclass(frozen=True)
class MixHeads:
    """`heads` heads of `size` elements, a multiple of `lanes`. Of each sequence a layer keeps the states, float32
    (heads, size, size), and the last token's rows, float32 (heads * size,). Without heads, rows of `size` elements
    alone, of channel mixing."""

    heads: int
    size: int
    lanes: int
    eps: float = 0.0
    """Of the norm of results."""

    @property
    def width(self) -> int:
        return max(self.heads, 1) * self.size

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return (self.heads * self.size**2, self.width) if self.heads else (self.width,)


@functools.cache
def shift(width: int, parts_of: int, lanes: int, tile: int, rows: bool = False) -> KernelFunction:
    """x + share * (x of the token before - x), with some shares. Buffers: as many outputs as `parts_of`, float32
    (tokens, width) each; the last token's x that is kept, float32 (width,) a slot; the state if tile is more than 1;
    the slots; x, float32 (tokens, width); the shares, float32 (parts_of, width)."""

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        outs, (kept, *step_state, slots, x, shares) = buffers[:parts_of], buffers[parts_of:]
        k = KernelBuilder(lanes)
        for buffer in (*outs, kept):
            k.scratch(buffer)
        runs, run_tokens = runs_of(k, step_state, rows)
        first, count = even_share(width // lanes, part, parts)
        window = k.registers(2 * lanes)  # a ring of the last two
        with k.loop(count) as i, k.loop(runs) as run:
            channel = (first + i) * lanes
            before, after = (k.index(slots, run * 2 + j) * width + channel for j in range(2))
            k.store(window, 0, k.vector(kept, before))
            with k.loop(run_tokens) as t:
                at = (run + t) * width + channel
                k.store(window, (t + 1) % 2 * lanes, k.vector(x, at))
                last, new = (k.vector(window, (t + j) % 2 * lanes) for j in range(2))
                for j, out in enumerate(outs):
                    share = k.vector(shares, j * width + channel)
                    k.store(out, at, new + (last - new) * share)
            k.store(kept, after, k.vector(window, run_tokens % 2 * lanes))
        return k.finish(f"shift_{width}_{parts_of}_{tile}")

    return kernel


@functools.cache
def time_mix(
    net: MixHeads, mixes: bool, gated: bool, normed: bool, tile: int, rows: bool = False
) -> KernelFunction:
    """All between the products of `engine.description.time_mixing.TimeMix`. Buffers: out, float32 (tokens, width); the
    layer's states; the state if tile is more than 1; the slots; the products of r, k, v, the decays and the rates,
    float32 (tokens, width) each; with `mixes` the products of the mix and the values of the first layer, likewise; if
    it is `gated` the gates, likewise; removed, replaced and bonus, float32 (width,) each; if it is `normed` the norm's
    weights and its biases, likewise. Biases of products are already added."""
    size, lanes, width = net.size, net.lanes, net.width
    vectors = size // lanes
    slowest = -math.exp(-0.5)

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        out, states, *step_state, slots = buffers[: 3 + (tile > 1)]
        of_tokens = list(buffers[3 + (tile > 1) :])
        r, key, value, decay, rate = (of_tokens.pop(0) for _ in range(5))
        mix, of_first = (of_tokens.pop(0) for _ in range(2)) if mixes else (value, value)
        gate = of_tokens.pop(0) if gated else value
        removed, replaced, bonus, *norm = of_tokens
        k = KernelBuilder(lanes)
        for buffer in (out, states):
            k.scratch(buffer)
        runs, run_tokens = runs_of(k, step_state, rows)
        first, count = even_share(net.heads, part, parts)
        names = "reads", "takes", "adds", "decays", "values", "y"
        reads, takes, adds, decays, values, y = (k.registers(size) for _ in names)
        squares, extra = k.registers(lanes), k.registers(lanes)
        factor, share = k.registers(1), k.registers(1)
        with k.loop(count) as i, k.loop(runs) as run:
            head = first + i
            before, after = (
                (k.index(slots, run * 2 + j) * net.heads + head) * (size * size) for j in range(2)
            )
            with k.loop(run_tokens) as t:
                at, of_head = (run + t) * width + head * size, head * size
                for sums in (squares, extra):
                    k.fill(sums, 0, UOp.const(0.0, F32))
                with k.loop(vectors) as j:
                    here, there = at + j * lanes, of_head + j * lanes
                    of_key, of_rate = k.vector(key, here), sigmoid(k, k.vector(rate, here))
                    read = of_key * k.vector(removed, there)
                    added = of_key * ((of_rate - 1.0) * k.vector(replaced, there) + 1.0)
                    v = k.vector(value, here)
                    if mixes:
                        v = v + (k.vector(of_first, here) - v) * sigmoid(k, k.vector(mix, here))
                    k.store(reads, j * lanes, read)
                    k.store(takes, j * lanes, read * of_rate)
                    k.store(adds, j * lanes, added)
                    k.store(values, j * lanes, v)
                    k.store(decays, j * lanes, k.exp(sigmoid(k, k.vector(decay, here)) * slowest))
                    k.store(squares, 0, k.vector(squares, 0) + read * read)
                    k.store(extra, 0, k.vector(extra, 0) + k.vector(r, here) * added * k.vector(bonus, there))
                total = k.across(k.vector(squares, 0), Ops.ADD)
                k.store(factor, 0, total.maximum(UOp.const(1e-24, F32)).sqrt().reciprocal())
                k.store(share, 0, k.across(k.vector(extra, 0), Ops.ADD))
                sums = [k.zeros() for _ in range(vectors)]
                with k.loop(size) as row:
                    read = k.load(reads, row) * k.load(factor, 0)
                    for v_at, s in enumerate(sums):
                        old = k.vector(states, before + row * size + v_at * lanes)
                        k.store(s, 0, k.vector(s, 0) + old * read)
                for v_at in range(vectors):
                    k.fill(y, v_at * lanes, UOp.const(0.0, F32))
                with k.loop(size) as row:
                    taken = k.load(takes, row) * k.load(factor, 0)
                    query = k.load(r, at + row)
                    for v_at, s in enumerate(sums):
                        place = row * size + v_at * lanes
                        changed = (
                            k.vector(states, before + place) * k.load(decays, row)
                            - k.vector(s, 0) * taken
                            + k.vector(values, v_at * lanes) * k.load(adds, row)
                        )
                        k.store(states, after + place, changed)
                        k.store(y, v_at * lanes, k.vector(y, v_at * lanes) + changed * query)
                parts_of_y = [k.vector(y, v_at * lanes) for v_at in range(vectors)]
                mean = k.across(add(parts_of_y), Ops.ADD) * (1 / size)
                of_norm = UOp.const(1.0, F32)
                if normed:
                    apart = [one - mean for one in parts_of_y]
                    variance = k.across(add(one * one for one in apart), Ops.ADD) * (1 / size)
                    of_norm = (variance + net.eps).sqrt().reciprocal()
                for v_at, one in enumerate(parts_of_y):
                    here, there = at + v_at * lanes, of_head + v_at * lanes
                    if normed:
                        weight, bias = (k.vector(of, there) for of in norm)
                        one = (one - mean) * of_norm * weight + bias
                    one = one + k.vector(values, v_at * lanes) * k.load(share, 0)
                    k.store(out, here, one * k.vector(gate, here) if gated else one)
        return k.finish(f"time_mix_{net.heads}_{size}_{tile}")

    assert vectors * lanes == size, "heads that are no whole vectors"
    return kernel
