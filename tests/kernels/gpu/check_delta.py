"""Gated delta nets of one token, of several sequences and of a prompt."""

import numpy as np
from tinygrad import Device, dtypes

from engine.targets.nvidia.kernels.products.matmul import fragment_index, fragments_size
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.products.small_batch import column_index, columns_size
from engine.targets.nvidia.kernels.recurrent.delta_decode import delta_decode
from engine.targets.nvidia.kernels.recurrent.delta_net import DeltaHeads
from engine.targets.nvidia.kernels.recurrent.delta_prefill import (
    coefficients_size,
    delta_inputs,
    delta_scan,
    gated_norm,
    vectors_size,
)
from engine.targets.nvidia.kernels.recurrent.state_memory import copy_state
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from tests.kernels.gpu.buffers import buffer, close, places, prompt_index, prompt_state, rng, run, zeros


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Net:
    """The vectors of a delta net, random, and what it does."""

    def __init__(self, heads):
        h = self.heads = heads
        self.conv = rng.standard_normal((h.channels, h.taps)).astype(np.float32)
        self.decay = -rng.uniform(0.1, 2, h.value).astype(np.float32)
        self.bias, self.norm = (rng.standard_normal(n).astype(np.float32) for n in (h.value, h.size))

    @property
    def buffers(self):
        return [buffer(x) for x in (self.conv, self.decay, self.bias, self.norm)]

    def random_state(self):
        h = self.heads
        matrices = rng.standard_normal((h.value, h.size, h.size)).astype(np.float32)
        return matrices, rng.standard_normal((h.taps - 1, h.channels)).astype(np.float32)

    def result(self, rows, state):
        """float64 (tokens, width) and the state after them, of rows (tokens, rows)."""
        h, (matrices, past), results = self.heads, state, []
        matrices, past = matrices.astype(np.float64), past.astype(np.float64)
        for row in rows.astype(np.float64):
            inputs, z, beta, alpha = np.split(row, np.cumsum([h.channels, h.width, h.value]))
            past = np.concatenate([past, inputs[None]])
            x = (past * self.conv.T).sum(0)
            q, k, v = np.split((x * sigmoid(x)).reshape(-1, h.size), [h.key, 2 * h.key])
            q, k = (
                np.tile(y / np.sqrt((y * y).sum(-1, keepdims=True) + h.eps), (h.value // h.key, 1))
                for y in (q, k)
            )
            decay = np.exp(self.decay * np.logaddexp(0, alpha + self.bias))
            matrices = matrices * decay[:, None, None]
            d = (v - np.einsum("hkv,hk->hv", matrices, k)) * sigmoid(beta)[:, None]
            matrices = matrices + k[:, :, None] * d[:, None]
            y = np.einsum("hkv,hk->hv", matrices, q) * h.size**-0.5
            y = y / np.sqrt((y * y).mean(-1, keepdims=True) + h.eps) * self.norm
            z = z.reshape(h.value, h.size)
            results.append((y * z * sigmoid(z)).reshape(-1))
            past = past[1:]
        return np.stack(results), (matrices, past)


def flat(state):
    return np.concatenate([x.reshape(-1) for x in state])


def rows_of(heads, tokens):
    return rng.standard_normal((tokens, heads.rows)).astype(np.float32)


def one_token(net, rows, position, memory, parts=1):
    """The result of a decode step with `rows` (1, rows): float32 (1, width)."""
    heads, out = net.heads, zeros(permuted_size(net.heads.width))
    state, ones = buffer(np.array([7, position], np.int32)), buffer(np.ones(UNIT, np.float32))
    squares = [zeros(heads.value * parts)] if parts > 1 else []
    run(delta_decode(heads, 0, parts), out, *squares, memory, buffer(rows), *net.buffers, state, ones)
    got = out.numpy()[places(heads.width)]
    for parts_of_heads in squares:  # the next product norms it
        total = parts_of_heads.numpy().reshape(-1, parts).sum(1)
        got = got / np.sqrt(np.repeat(total, heads.size) / heads.size + heads.eps)
    return got[None]


def check_delta_nets_of_one_token() -> None:
    """At the beginning, where the memory holds something else, and later: more heads of values than of keys, a head to
    a block and to several."""
    for heads, parts in (
        (DeltaHeads(2, 4, 16, 4, 1e-6), 1),
        (DeltaHeads(1, 1, 64, 3, 1e-6), 1),
        (DeltaHeads(1, 2, 64, 4, 1e-6), 4),
    ):
        net = Net(heads)
        halves = [net.random_state() for _ in range(2)]
        memory = buffer(np.concatenate([flat(state) for state in halves]))
        before = [np.zeros_like(x) for x in halves[0]]
        for position in (0, 1, 2):
            rows = rows_of(heads, 1)
            got = one_token(net, rows, position, memory, parts)
            wanted, after = net.result(rows, before)
            close(got, wanted, 1e-5)
            held = memory.numpy().reshape(2, -1)
            close(held[(position + 1) % 2], flat(after), 1e-5)
            if position:
                close(held[position % 2], flat(before), 1e-5)
            before = after


def check_delta_nets_of_several_sequences() -> None:
    """Sequences at even and odd positions and at the beginning; a row without a token."""
    heads = DeltaHeads(2, 4, 16, 4, 1e-6, sequences=3)
    net, tokens = Net(heads), 4
    halves = [[net.random_state() for _ in range(2)] for _ in range(3)]
    memory = buffer(np.concatenate([flat(state) for two in halves for state in two]))
    held = memory.numpy().reshape(3, 2, -1).copy()
    sequences, positions, used = [2, 0, 1, 0], [5, 0, 8, 0], [1, 1, 1, 0]
    rows, out = rows_of(heads, tokens), zeros(columns_size(tokens, heads.width), dtypes.float16)
    state = buffer(np.array([[9] * 4, positions, sequences, used], np.int32))
    run(delta_decode(heads, tokens), out, memory, buffer(rows), *net.buffers, state)
    got = out.numpy()[prompt_index(lambda m, e: column_index(m, e, heads.width), tokens, heads.width)]
    for i in range(3):
        before = (
            halves[sequences[i]][positions[i] % 2]
            if positions[i]
            else [np.zeros_like(x) for x in halves[0][0]]
        )
        wanted, after = net.result(rows[i : i + 1], before)
        close(got[i], wanted[0], 1e-3)
        held[sequences[i], (positions[i] + 1) % 2] = flat(after)
    close(memory.numpy().reshape(3, 2, -1), held, 1e-5)


def check_checkpoints_of_states() -> None:
    """A state is copied to a checkpoint and back, of the slot that its number of tokens says."""
    heads = DeltaHeads(1, 2, 16, 4, 1e-6, sequences=2)
    size, slots = heads.state_size, 3
    values, kept = rng.standard_normal(4 * size).astype(np.float32), np.zeros(slots * size, np.float32)
    memory, checkpoints = buffer(values), buffer(kept)
    run(copy_state(heads, slots, True), checkpoints, memory, buffer(np.array([5, 2, 1], np.int32)))
    kept[2 * size :] = values[3 * size :]
    assert np.array_equal(checkpoints.numpy(), kept)
    run(copy_state(heads, slots, False), memory, checkpoints, buffer(np.array([4, 2, 1], np.int32)))
    values[2 * size : 3 * size] = values[3 * size :]
    assert np.array_equal(memory.numpy(), values)


def prompt(net, rows, position, memory, tokens, cut=None, sequence=0):
    """A piece of rows in a step of `tokens` tokens; its results, float16 (rows, width)."""
    return prompts(net, [(0, position, rows, sequence)], memory, tokens, cut)[0]


def prompts(net, pieces, memory, tokens, cut=None):
    """The results of each of several pieces: (first row, position, rows, sequence)."""
    h, cut = net.heads, cut or (net.heads.rows,)
    padded = np.full((tokens, h.rows), np.nan, np.float32)  # what lies after the prompts' ends
    for first, _, rows, _ in pieces:
        padded[first : first + len(rows)] = rows
    runs, counts = [], []
    for i, run_rows in enumerate(np.split(padded, np.cumsum(cut[:-1]), 1)):
        counts.append(1 + i % 2)
        runs.append(buffer(np.stack([run_rows / counts[-1]] * counts[-1])))
    all_runs = Runs(tokens, tuple(counts), tuple(cut))
    end = h.channels + h.width
    ranges = [range(h.channels)], [range(h.channels, end)], [range(h.channels), range(end, h.rows)]
    (channels, gate, both), of = zip(*(all_runs.within(*own) for own in ranges), strict=True)
    of_channels, of_gate, of_both = ([runs[i] for i in own] for own in of)
    place = prompt_state(tokens, *((first, at, len(rows), sequence) for first, at, rows, sequence in pieces))
    vectors, coefficients = zeros(vectors_size(h, tokens)), zeros(coefficients_size(h, tokens))
    products = zeros(tokens * h.width)
    conv, decay, bias, norm = net.buffers
    run(delta_inputs(h, both), vectors, coefficients, memory, *of_both, place, conv, decay, bias)
    scan = delta_scan(h, channels, len(pieces) > 1)
    run(scan, products, memory, vectors, coefficients, *of_channels, place, conv)
    out = zeros(fragments_size(tokens, h.width), dtypes.float16)
    run(gated_norm(h, gate), out, products, norm, *of_gate)
    got = out.numpy()[prompt_index(lambda m, e: fragment_index(m, e, h.width), tokens, h.width)]
    return [got[first : first + len(rows)] for first, _, rows, _ in pieces]


def check_delta_nets_of_several_prompts() -> None:
    """Pieces of two prompts in a step, one of more rows than a unit, one at its beginning, and a unit without one."""
    heads = DeltaHeads(1, 2, 16, 4, 1e-6, sequences=3)
    net = Net(heads)
    states = [net.random_state() for _ in range(6)]
    memory = buffer(np.concatenate([flat(state) for state in states]))
    rows = rows_of(heads, 38), rows_of(heads, 5)
    got = prompts(net, [(32, 7, rows[0], 1), (96, 0, rows[1], 2)], memory, 128)
    nothing = [np.zeros_like(x) for x in states[0]]
    results = [net.result(*of) for of in ((rows[0], states[3]), (rows[1], nothing))]
    for ours, (wanted, _) in zip(got, results, strict=True):
        close(ours, wanted, 1e-3)
    states[3], states[5] = (after for _, after in results)
    close(memory.numpy().reshape(6, -1), np.stack([flat(state) for state in states]), 1e-5)


def check_delta_nets_of_prompts() -> None:
    """Chunks of many sizes one after the other: fewer tokens than taps, a part of a group, all of a step."""
    heads = DeltaHeads(2, 4, 16, 4, 1e-6)
    net, tokens = Net(heads), 16
    memory = buffer(np.concatenate([flat(net.random_state()) for _ in range(2)]))
    position, state = 0, [np.zeros_like(x) for x in net.random_state()]
    for n in (1, 2, 16, 5, 2, 1, 12):
        rows = rows_of(heads, n)
        got = prompt(
            net, rows, position, memory, tokens, (heads.channels, heads.width + heads.value, heads.value)
        )
        wanted, state = net.result(rows, state)
        close(got, wanted, 1e-3)
        position += n
        close(memory.numpy().reshape(2, -1)[position % 2], flat(state), 1e-5)


def check_chunks_leave_the_same_state() -> None:
    """512 tokens one by one, and in chunks of 7, 64 and 512: the state is the same, to 1e-4. On CUDA, the heads are
    those of Qwen3.5 4B."""
    heads = DeltaHeads(16, 32, 128, 4, 1e-6) if Device.DEFAULT == "CUDA" else DeltaHeads(1, 1, 16, 4, 1e-6)
    net, tokens = Net(heads), 512
    rows, nothing = rows_of(heads, tokens), [np.zeros_like(x) for x in net.random_state()]
    wanted, after = net.result(rows, nothing)
    for size in (1, 7, 64, tokens):
        memory = zeros(heads.memory_size)
        for start in range(0, tokens, size):
            chunk = rows[start : start + size]
            if size == 1:
                got = one_token(net, chunk, start, memory)
            else:
                got = prompt(net, chunk, start, memory, -(-size // 16) * 16)
        close(got[-1], wanted[-1], 1e-3)
        close(memory.numpy().reshape(2, -1)[tokens % 2], flat(after), 1e-4)


def check_delta_nets_of_prompts_of_several_sequences() -> None:
    """A prompt of one of several sequences, with heads of a size that several blocks share."""
    heads = DeltaHeads(1, 2, 64, 4, 1e-6, sequences=2)
    net = Net(heads)
    states = [net.random_state() for _ in range(4)]
    memory, rows = buffer(np.concatenate([flat(state) for state in states])), rows_of(heads, 10)
    got = prompt(net, rows, 7, memory, 16, sequence=1)
    wanted, after = net.result(rows, states[3])
    close(got, wanted, 1e-3)
    held = memory.numpy().reshape(4, -1)
    for i, state in enumerate((*states[:3], after)):
        close(held[i], flat(state), 1e-5)
