"""Streams beside the residual one, which a layer mixes as it begins and as it ends (`engine.description.altup`).

The threads share the tokens. `count` streams, the residual one first, are buffers of their own, float32 (tokens, cols)
each. Buffers that all kernels take after these: the number of units in a row, int32 (1,); the state if tile is more
than 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels.activations import sigmoid, sum_of_squares
from engine.targets.cpu.kernels.kernel_builder import Index, KernelBuilder, add, even_share
from engine.targets.cpu.kernels.step_state import n_tokens
from engine.targets.cpu.kernels.stream_size import UNIT


@functools.cache
def predict(count: int, lanes: int, tile: int) -> KernelFunction:
    """s += M s. Buffers: the streams, and one more for the first of the results; after the shape and the state, what
    the router gives a token, float32 (tokens, lanes) of which the first `count` elements are its product; the
    coefficients, float32 (count * count, count)."""

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        streams, copy, rest = buffers[:count], buffers[count], buffers[count + 1 :]
        for stream in streams:
            k.scratch(stream)
        shape, *state, routed, coefficients = rest
        cols = k.index(shape, 0) * UNIT
        first, n = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        mixed, old = k.registers(count * count), [k.registers(lanes) for _ in range(count)]
        modes = k.registers(count)
        with k.loop(n) as i:
            token = first + i
            _store_modes(k, modes, routed, token, count)
            with k.loop(count * count) as row:
                k.store(mixed, row, _product(k, coefficients, row, modes, count))
            with k.loop(cols // lanes) as j:
                at = token * cols + j * lanes
                for before, stream in zip(old, streams, strict=True):
                    k.store(before, 0, k.vector(stream, at))
                for number, stream in enumerate(streams):
                    mix = (k.vector(o, 0) * k.load(mixed, number * count + by) for by, o in enumerate(old))
                    total = k.vector(old[number], 0) + add(mix)
                    k.store(stream, at, total)
                    if not number:
                        k.store(copy, at, total)
        return k.finish(f"predict_streams_{count}_{tile}")

    return kernel


@functools.cache
def correct(count: int, lanes: int, tile: int) -> KernelFunction:
    """s_i = p_i + (1 + c_i) (x - p_0), with x the first stream and p the others and p_0. Buffers: the streams; the
    first one times a scale, float32 (tokens, cols), which is written; after the shape and the state, p_0; the router's
    products as of `predict`; the coefficients, float32 (count, count); the scale, float32 (cols,)."""

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        streams, scaled, rest = buffers[:count], buffers[count], buffers[count + 1 :]
        for stream in streams:
            k.scratch(stream)
        shape, *state, predicted, routed, coefficients, scale = rest
        cols = k.index(shape, 0) * UNIT
        first, n = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        modes, factors, change = k.registers(count), k.registers(count), k.registers(lanes)
        with k.loop(n) as i:
            token = first + i
            _store_modes(k, modes, routed, token, count)
            with k.loop(count) as row:
                k.store(factors, row, _product(k, coefficients, row, modes, count) + 1.0)
            with k.loop(cols // lanes) as j:
                at = token * cols + j * lanes
                k.store(change, 0, k.vector(streams[0], at) - k.vector(predicted, at))
                for number, stream in enumerate(streams):
                    before = k.vector(stream, at) if number else k.vector(predicted, at)
                    total = before + k.vector(change, 0) * k.load(factors, number)
                    k.store(stream, at, total)
                    if not number:
                        k.store(scaled, at, total * k.vector(scale, j * lanes))
        return k.finish(f"correct_streams_{count}_{tile}")

    return kernel


@functools.cache
def lengthen(count: int, lanes: int, tile: int) -> KernelFunction:
    """Makes rows as long as those of the residual stream. Buffers: `count` rows, float32 (tokens, cols) each; after the
    shape and the state, the stream."""

    def kernel(part: UOp, parts: UOp, *buffers: UOp) -> UOp:
        k = KernelBuilder(lanes)
        others, (shape, *state, x) = buffers[:count], buffers[count:]
        for rows in others:
            k.scratch(rows)
        cols = k.index(shape, 0) * UNIT
        first, n = even_share(n_tokens(k, state[0], tile) if state else 1, part, parts)
        squares, factors = k.registers(1), [k.registers(1) for _ in others]
        with k.loop(n) as i:
            at = (first + i) * cols
            k.store(squares, 0, sum_of_squares(k, x, at, cols))
            for rows, factor in zip(others, factors, strict=True):
                own = sum_of_squares(k, rows, at, cols)
                k.store(factor, 0, (k.load(squares, 0) * own.reciprocal()).sqrt())
                with k.loop(cols // lanes) as j:
                    k.store(rows, at + j * lanes, k.vector(rows, at + j * lanes) * k.load(factor, 0))
        return k.finish(f"lengthen_{count}_{tile}")

    return kernel


def _store_modes(k: KernelBuilder, modes: UOp, routed: UOp, token: Index, count: int) -> None:
    """The tanh of a token's products."""
    for i in range(count):
        k.store(modes, i, sigmoid(k, k.load(routed, token * k.lanes + i) * 2.0) * 2.0 - 1.0)


def _product(k: KernelBuilder, coefficients: UOp, row: Index, modes: UOp, count: int) -> UOp:
    terms: Sequence[UOp] = [k.load(coefficients, row * count + i) * k.load(modes, i) for i in range(count)]
    return add(terms)
