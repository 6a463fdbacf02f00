"""The choice of experts for the tokens of a prompt, on the device: the router's product, the most probable experts of
each token, and the assignments of tokens to experts, sorted by expert, for `matmul`.

    router_logits . choose_experts . count_assignments . sort_assignments . matmul (gate and up) . matmul (down)

The router's product is in float32: half precision would make other choices. An expert's place among the tiles follows
from how many tokens the experts before it have. So each expert is counted by a block of its own, and then each block
has its place and stores its assignments in order, without atomics.
"""

from __future__ import annotations

import functools

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels.pieces import is_used, used_rows
from engine.targets.nvidia.kernels.products.activation_order import PLACES, Order
from engine.targets.nvidia.kernels.products.expert_choice import BY_LOGITS, ExpertChoice, Scores
from engine.targets.nvidia.kernels.products.matmul import ExpertTiles, as_half, fragment_index
from engine.targets.nvidia.kernels.uops import (
    F32,
    I32,
    INDEX,
    Activation,
    after_store,
    all_of,
    chain,
    f32,
    finish,
    gated,
    inverse_rms,
    load,
    load_index,
    load_run,
    shared,
    sigmoid,
    store,
    store_run,
    tree,
    zeroed_registers,
)

_TOKENS, _EXPERTS, _WARPS = 4, 4, 8  # the router: tokens of a block, experts of a warp, warps of a block
_THREADS = 256  # that look for an expert's assignments


@functools.cache
def router_logits(tokens: int, cols: int, n: int, eps: float, has_bias: bool) -> Kernel:
    """The product of the normed stream and the router. Buffers: logits, float32 (tokens, n); stream, float32 (tokens,
    cols); norm, its weight, float32 (cols,); prompt, the step's state (`pieces`); router, float32 (n, cols); bias,
    float32 (n,), if it `has_bias`. `cols` is a multiple of four."""
    # At least two: tinygrad removes a loop of one step, and with it that rows which are not `live` have none.
    steps, across = max(-(-cols // 128), 2), _EXPERTS * _WARPS
    assert cols % 4 == 0 and tokens % _TOKENS == 0
    n_acc = _TOKENS * (_EXPERTS + 1)  # a thread's parts of products, and of the sums of squares

    def kernel(logits: UOp, stream: UOp, norm: UOp, prompt: UOp, router: UOp, bias: UOp | None) -> UOp:
        lane, warp = UOp.special(32, "lidx0"), UOp.special(_WARPS, "lidx1")
        group, block = UOp.special(tokens // _TOKENS, "gidx0"), UOp.special(-(-n // across), "gidx1")
        live = group * _TOKENS < used_rows(prompt, tokens)
        step = UOp.range(live.where(UOp.const(steps), 0), 0, AxisType.REDUCE)
        column = (step * 32 + lane) * 4
        ok = None if cols == 128 * steps else column < cols
        acc = zeroed_registers(n_acc, 0)
        sums = load_run(acc.after(step), 0, n_acc)
        factors = load_run(norm, column, 4, ok)
        first = block * across + warp * _EXPERTS
        experts = [first + e if n % across == 0 else (first + e).minimum(n - 1) for e in range(_EXPERTS)]
        rows = [load_run(router, expert * cols + column, 4, ok) for expert in experts]
        for t in range(_TOKENS):
            xs = load_run(stream, (group * _TOKENS + t) * cols + column, 4, ok)
            for i, (x, factor) in enumerate(zip(xs, factors, strict=True)):
                k = t * (_EXPERTS + 1)
                sums[k + _EXPERTS] = sums[k + _EXPERTS] + x * x
                for e in range(_EXPERTS):
                    sums[k + e] = sums[k + e] + x * factor * rows[e][i]
        acc = acc.after(UOp.group(*store_run(acc, 0, sums)).end(step))
        lanes = shared(_WARPS * n_acc * 32, slot=1)
        results = store_run(lanes, warp * (n_acc * 32) + lane, load_run(acc, 0, n_acc), stride=32)
        lanes = lanes.after(UOp.group(*results))
        # a thread for each token and expert of the block adds the parts of a warp's lanes
        own = warp * 32 + lane
        t, e = own % _TOKENS, own // _TOKENS % across
        place = (e // _EXPERTS * _TOKENS + t) * (_EXPERTS + 1)
        product, squares = (
            tree(load_run(lanes, (place + k) * 32, 32)) for k in (e % _EXPERTS, UOp.const(_EXPERTS))
        )
        expert = block * across + e
        ok = all_of(live, own < _TOKENS * across, None if n % across == 0 else expert < n)
        logit = product * inverse_rms(squares, cols, eps)
        if bias is not None:
            logit = logit + load(bias, expert, ok)
        result = store(logits, (group * _TOKENS + t) * n + expert, logit, ok)
        return finish(f"prefill_router_{tokens}_{n}x{cols}", [result], n * cols * 4, 2 * tokens * n * cols)

    return Kernel(kernel, ("logits",), ("stream", "norm", "prompt", "router", has_bias and "bias"))


@functools.cache
def choose_experts(
    tokens: int,
    used: int,
    n: int,
    least_sum: float | None,
    stride: int = 0,
    scaled: bool = False,
    scores: Scores = BY_LOGITS,
) -> Kernel:
    """The `used` best experts of each token by their `scores`, the best first; of equal ones the first. Buffers:
    chosen, the experts, int32 (tokens, used), -1 for rows without a token; their probabilities, float32 (tokens, used);
    logits, the router's, float32 (tokens, stride), the first n of each token (if `stride` is 0, that is n); prompt, the
    step's state (`pieces`); if they are `scaled`, scales, what each expert's probability is multiplied by, float32
    (n,); if scores are biased, choice_bias, float32 (n,). The probabilities are divided by their sum, or by `least_sum`
    if it is larger, unless that is None."""
    threads = -(-n // 32) * 32

    def kernel(
        chosen: UOp, probabilities: UOp, logits: UOp, prompt: UOp, scales: UOp | None, choice_bias: UOp | None
    ) -> UOp:
        thread, token = UOp.special(threads, "lidx0"), UOp.special(tokens, "gidx0")
        first = token * (stride or n)
        choice = ExpertChoice.of(logits, first, used, n, thread, threads, scores, choice_bias)
        powers, total = choice.powers(thread % 32, 32), None
        if powers is not None:
            sums = after_store(shared(32, slot=0), thread, powers, thread < 32)
            total = tree(load_run(sums, 0, 32))
        slot, ok = thread.minimum(used - 1), thread < used
        probability = choice.probability(slot, total, least_sum)
        if scales is not None:
            probability = probability * load(scales, load_index(choice.ids, slot, n))
        expert = is_used(prompt, token, tokens).where(load(choice.ids, slot), UOp.const(-1, I32))
        stores = [
            store(chosen, token * used + thread, expert, ok),
            store(probabilities, token * used + thread, probability, ok),
        ]
        return finish(f"prefill_choose_{tokens}_{used}_{n}" + f"_{stride}" * (stride > 0), stores)

    inputs = "logits", "prompt", scaled and "scales", scores.biased and "choice_bias"
    return Kernel(kernel, ("chosen", "probabilities"), inputs)


@functools.cache
def weigh_rows(tokens: int, cols: int, order: Order) -> Kernel:
    """Multiplies activations by a number for each token. Buffers: x, float16 (tokens, cols) in an `Order`; factors,
    float32 (tokens,)."""
    threads = 256

    def kernel(x: UOp, factors: UOp) -> UOp:
        column = UOp.special(-(-cols // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        token, ok = UOp.special(tokens, "gidx1"), None if cols % threads == 0 else column < cols
        place = PLACES[order](token, column, cols)
        value = as_half(load(x, place, ok).cast(F32) * load(factors, token))
        return finish(f"prefill_weigh_{tokens}_{cols}_{order}", [store(x, place, value, ok)])

    return Kernel(kernel, ("x",), ("factors",))


def _own_assignments(chosen: UOp, experts: ExpertTiles, thread: UOp, expert: UOp) -> list[UOp]:
    """Whether each of a thread's assignments, which are neighbours, is to `expert`: float32 ones and zeros."""
    each = -(-experts.assignments // _THREADS)
    places = [thread * each + i for i in range(each)]
    end = experts.assignments
    return [((p < end) & load(chosen, p, p < end).eq(expert.cast(I32))).where(f32(1), f32(0)) for p in places]


@functools.cache
def count_assignments(experts: ExpertTiles) -> Kernel:
    """The number of tokens of each expert. Buffers: counts, the numbers, int32 (n,); choices, how often each expert was
    chosen, int32 (n,), to which they are added; chosen, the experts of each token (`choose_experts`)."""

    def kernel(counts: UOp, choices: UOp, chosen: UOp) -> UOp:
        thread, expert = UOp.special(_THREADS, "lidx0"), UOp.special(experts.n, "gidx0")
        own = chain(_own_assignments(chosen, experts, thread, expert))
        sums = after_store(shared(_THREADS, slot=0), thread, own)
        k = UOp.range(_THREADS // 32, 0, AxisType.REDUCE)
        total = tree(load_run(sums, k * 32, 32)).reduce(k, arg=Ops.ADD).cast(I32)
        is_first = thread.eq(0)
        stores = [
            store(counts, expert, total, is_first),
            store(choices, expert, load(choices, expert) + total, is_first),
        ]
        return finish(f"prefill_count_{experts.tokens}_{experts.used}_{experts.n}", stores)

    return Kernel(kernel, ("counts", "choices"), ("chosen",))


@functools.cache
def sort_assignments(experts: ExpertTiles) -> Kernel:
    """Sorts assignments by expert, in tiles (`ExpertTiles`). Buffers: assignments, int32 (experts.size,), token *
    used + slot, of which those of tiles without an expert are not written; tile_experts, the expert of each tile, int32
    (experts.count,), -1 where there is none; counts, the number of tokens of each expert, int32 (n,); chosen, the
    experts of each token (`choose_experts`)."""
    tile, n = experts.tile, experts.n
    assert tile <= _THREADS

    def kernel(assignments: UOp, tile_experts: UOp, counts: UOp, chosen: UOp) -> UOp:
        thread, expert = UOp.special(_THREADS, "lidx0"), UOp.special(n, "gidx0")
        count = load_index(counts, expert, experts.assignments + 1)
        j, k = UOp.range(n, 0, AxisType.REDUCE), UOp.range(_THREADS, 1, AxisType.REDUCE)
        tiles = (load_index(counts, j, experts.assignments + 1) + (tile - 1)) // tile
        first = (j < expert).where(tiles.cast(I32), 0).reduce(j, arg=Ops.ADD).cast(INDEX)
        stop = first + (count + (tile - 1)) // tile
        own = _own_assignments(chosen, experts, thread, expert)
        sums = after_store(shared(_THREADS, slot=0), thread, chain(own))
        before = (k < thread).where(load(sums, k), f32(0)).reduce(k, arg=Ops.ADD)
        stores = []
        for i, is_own in enumerate(own):
            place = first * tile + before.cast(I32).cast(INDEX)
            ok = (is_own > 0) & (place < experts.size)
            stores.append(store(assignments, place, (thread * len(own) + i).cast(I32), ok))
            before = before + is_own
        rest, end = first * tile + count + thread, (stop * tile).minimum(experts.size)
        stores.append(store(assignments, rest, UOp.const(-1, I32), rest < end))
        until = expert.eq(n - 1).where(UOp.const(experts.count), stop.minimum(experts.count))
        for start in range(0, experts.count, _THREADS):
            t = first + start + thread
            owner = (t < stop).where(expert.cast(I32), UOp.const(-1, I32))
            stores.append(store(tile_experts, t, owner, t < until))
        return finish(f"prefill_sort_{experts.tokens}_{experts.used}_{n}_{tile}", stores)

    return Kernel(kernel, ("assignments", "tile_experts"), ("counts", "chosen"))


@functools.cache
def activate_assignments(experts: ExpertTiles, width: int, activation: Activation) -> Kernel:
    """activation(gate) * up of each assignment, if the two are separate products. Buffers: out, fragments, float16
    (fragments_size(experts.size, width),); gate and up, float32 (experts.size, width); assignments and tile_experts
    (`sort_assignments`)."""
    threads = 256

    def kernel(out: UOp, gate: UOp, up: UOp, assignments: UOp, tile_experts: UOp) -> UOp:
        column = UOp.special(-(-width // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        place = UOp.special(experts.size, "gidx1")
        live = load(tile_experts, place // experts.tile) >= 0
        ok = live & (load(assignments, place, live) >= 0) & (column < width)
        a, b = (load(rows, place * width + column, ok) for rows in (gate, up))
        result = store(out, fragment_index(place, column, width), as_half(gated(a, b, activation)), ok)
        return finish(f"prefill_activate_{experts.size}_{width}", [result])

    return Kernel(kernel, ("out",), ("gate", "up", "assignments", "tile_experts"))


@functools.cache
def add_shared(tokens: int, cols: int, parts: int, stride: int) -> Kernel:
    """Adds the result of a shared expert, times the sigmoid of its gate, to the residual stream. Buffers: stream,
    float32 (tokens, cols); sums, partial ones of the result, float32 (parts, tokens, cols); logits, the router's,
    float32 (tokens, stride), of which each token's last is the gate's: without them, if stride is 0, there is no
    gate."""
    threads = 256

    def kernel(stream: UOp, sums: UOp, logits: UOp | None) -> UOp:
        column = UOp.special(-(-cols // threads), "gidx0") * threads + UOp.special(threads, "lidx0")
        token, ok = UOp.special(tokens, "gidx1"), None if cols % threads == 0 else column < cols
        index = token * cols + column
        value = chain(load(sums, index + p * tokens * cols, ok) for p in range(parts))
        if logits is not None:
            value = value * sigmoid(load(logits, token * stride + (stride - 1)))
        value = load(stream, index, ok) + value
        return finish(f"prefill_add_shared_{tokens}_{cols}_{parts}", [store(stream, index, value, ok)])

    return Kernel(kernel, ("stream",), ("sums", stride > 0 and "logits"))
