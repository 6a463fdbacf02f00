"""The fused path for NVIDIA GPUs: quantized products as kernels of our own, a decode step of five a layer.

    embed · (qkv · attention · o · gate+up · down) for each layer · head · next token

All that changes from token to token (the token, its position, keys and values) lies in device memory, so that a
step is one graph launch; the token also arrives in host memory, where it is read without stopping the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType

from engine.errors import UsageError
from engine.events import Step
from engine.fixes import launch_bounds, program_cache
from engine.kernels.attention import SLACK, Heads, Split, attention, combine
from engine.kernels.gpu import capability, multiprocessors
from engine.kernels.launch import Launches
from engine.kernels.mailbox import Mailbox, send
from engine.kernels.matmul import fragments_size, matmul, tiles_for
from engine.kernels.matvec import Best, Epilogue, GateUp, Residual, Store, activate, matvec
from engine.kernels.packing import QUARTER, UNIT, Packing, permuted_size, prescale
from engine.kernels.prompt import activate_prompt, attend_prompt, embed_prompt, norm_prompt, rotate_prompt
from engine.kernels.repack import Rows, forget_plans, repack
from engine.kernels.schedules import matvec_schedule
from engine.kernels.token import embed, next_token
from engine.measure.profile import Replay, Use
from engine.model.sampling import Logits
from engine.model.weights import Weights

Floats = NDArray[np.float32]
_CHUNKS = (64, 512)  # prompts are done in pieces of up to these sizes
_FEW = 8  # tokens that are done one by one
_SCORES_BYTES = 36 << 10  # of a block's shared memory
_SHORT, _MEDIUM = 256, 8192  # tokens that a block a head, and blocks for each multiprocessor, attend to


@dataclass
class Product:
    """A packed matrix and the schedule of its products. `row` is its first in the projection it is part of;
    `name` that of its first tensor."""

    name: str
    packing: Packing
    rows: int
    cols: int
    planes: list[Tensor]
    row: int = 0

    def __post_init__(self) -> None:
        self.schedule = matvec_schedule(self.packing, self.rows, self.cols, capability(), multiprocessors())

    @property
    def n_blocks(self) -> int:
        return -(-self.rows // self.schedule.block_rows)


@dataclass
class Layer:
    qkv: list[Product]
    bias: Tensor | None
    head_norms: Tensor | None
    o: Product
    gate_up: list[Product]  # one where both have a type, rows in turn
    down: Product
    norms: tuple[Floats, Floats]  # attention's, feed-forward's
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)

    @property
    def values_apart(self) -> bool:
        """Whether values come from a product of their own, which then runs beside that of queries and keys."""
        return len(self.qkv) > 1 and self.qkv[-1].name == "attn_v"


@dataclass
class Stream:
    """The residual stream as a producer leaves it: see `Residual`. `inputs` are by the scaling they are for."""

    h: Tensor
    parts: Tensor
    n_parts: int
    inputs: dict[int, Tensor]


class FusedSteps:
    """Decode and prefill of a model on an NVIDIA GPU (the protocol `Steps`)."""

    def __init__(self, weights: Weights, context_length: int) -> None:
        launch_bounds.apply()
        program_cache.apply()
        os.environ.setdefault("ALLOW_HALF8", "1")  # loads of 16 bytes of half-precision numbers
        config = self._config = weights.config
        self.chunk = _CHUNKS[-1]
        self._context = context_length
        self._load(weights)
        length = -(-context_length // SLACK) * SLACK + SLACK
        self._heads = Heads(
            config.heads,
            config.kv_heads,
            config.head_dim,
            length,
            config.norm_eps if self._layers[0].head_norms is not None else None,
        )
        for layer in self._layers:
            layer.keys, layer.values = (_zeros(self._heads.cache_size, dtypes.float16) for _ in range(2))
        angles = np.arange(context_length)[:, None] * config.rope_frequencies
        self._cos, self._sin = (_tensor(f(angles).reshape(-1)) for f in (np.cos, np.sin))
        self._allocate()
        self._graphs: dict[int, Callable[[], None]] = {}
        self._prefills: dict[int, Callable[[], None]] = {}
        self._tensor_cores = int(capability()[3:]) >= 80 and config.head_dim % 16 == 0
        self._prompt, self._ids = _zeros(2, dtypes.int32), _zeros(_CHUNKS[-1], dtypes.int32)
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._expected = (-1, -1)  # token and position on the device
        self._ahead = -1  # position of a step that runs already

    # ---- the protocol ----

    @property
    def chunks(self) -> tuple[int, ...]:
        return tuple(size for size in _CHUNKS if size <= self._context)

    @property
    def depths(self) -> tuple[int, ...]:
        return (0, *(limit for limit in self._limits if limit < self._context))

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        if len(tokens) <= _FEW or not self._tensor_cores:
            for i, token in enumerate(tokens):
                self.decode(token, position + i)
            return
        self._settle()
        size = next(size for size in _CHUNKS if len(tokens) <= size)
        send(self._prompt, np.asarray([position, len(tokens)], np.int32))
        send(self._ids, np.asarray([*tokens, *[0] * (_CHUNKS[-1] - len(tokens))], np.int32))
        self._launch_prefill(size)

    def decode(self, token: int, position: int, ahead: bool = False) -> int:
        """As `Steps.decode`. With `ahead`, the step after it is launched too, for a caller who is going to ask
        for it with the token that this one returns; logits are then that step's."""
        if self._ahead == position and self._expected == (token, position):
            self._ahead = -1
        else:
            self._settle()
            if self._expected != (token, position):
                send(self._state, np.asarray([token, position], np.int32))
            self._launch(position)
        if ahead and position + 1 < self._context:
            self._launch(position + 1)
            self._ahead = position + 1
        best = self._mailbox.take(position)
        self._expected = (best, position + 1)
        return best

    def _launch_prefill(self, size: int) -> None:
        if size not in self._prefills:
            self._prefills[size] = self._prefill_step(size).captured()
        self._prefills[size]()

    def _settle(self) -> None:
        """Waits for a step that ran ahead and is not wanted, or it would answer for one launched later."""
        if self._ahead >= 0:
            Device[Device.DEFAULT].synchronize()
            self._ahead, self._expected = -1, (-1, -1)

    def logits(self) -> Logits:
        return np.asarray(self._logits.numpy(), np.float32)

    def replay(self, step: Step, position: int) -> Replay:
        self._ahead, self._expected = -1, (-1, -1)
        if step == "prefill":
            return self._replay_prefill(position)

        def reset() -> None:
            Device[Device.DEFAULT].synchronize()
            send(self._state, np.asarray([0, position], np.int32))

        launches = self._decode_step(self._split(self._limit(position)))
        return Replay(launches.compiled().src, self._uses(), 1, lambda: self._launch(position), reset=reset)

    def _replay_prefill(self, position: int) -> Replay:
        if not self._tensor_cores:
            raise UsageError("This GPU takes prompts token by token: its steps are those of decode.")
        size, count = self.chunk, min(self.chunk, self._context - position)

        def reset() -> None:
            Device[Device.DEFAULT].synchronize()
            send(self._prompt, np.asarray([position, count], np.int32))
            send(self._ids, np.zeros(size, np.int32))

        calls = self._prefill_step(size).compiled().src
        return Replay(calls, self._uses(), count, lambda: self._launch_prefill(size), reset=reset)

    def _uses(self) -> dict[UOp, Use]:
        """What the buffers of the weights and the cache are for."""
        uses: dict[UOp, Use] = {}

        def note(use: Use, *tensors: Tensor | None) -> None:
            uses.update((tensor.uop.base, use) for tensor in tensors if tensor is not None)

        vocab = self._config.vocab
        note(Use("output head"), *self._head.planes)
        note(Use("embedding", "token", vocab), *self._embedding.planes)
        note(Use("attention", "token", self._context), self._cos, self._sin)
        note(Use("attention"), *self._partial)
        note(Use("norm"), *self._scaled.values())
        for layer in self._layers:
            note(Use("QKV projection"), layer.bias, *(plane for part in layer.qkv for plane in part.planes))
            note(Use("attention", "context", self._heads.length), layer.keys, layer.values)
            note(Use("attention output"), *layer.o.planes)
            note(Use("FFN gate+up"), *(plane for part in layer.gate_up for plane in part.planes))
            note(Use("FFN down"), *layer.down.planes)
            note(Use("norm"), layer.head_norms)
        return uses

    def _limit(self, position: int) -> int:
        return next(limit for limit in self._limits if position < limit)

    def _launch(self, position: int) -> None:
        self._mailbox.expect(position)
        limit = self._limit(position)
        if limit not in self._graphs:
            self._graphs[limit] = self._decode_step(self._split(limit)).captured()
        self._graphs[limit]()

    # ---- weights ----

    def _load(self, weights: Weights) -> None:
        config = self._config
        dim, ffn = config.dim, config.ffn
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def product(
            names: Sequence[tuple[str, int]], cols: int, row: int = 0, in_turn: bool = False
        ) -> Product:
            sources, kinds = [], []
            for name, rows in names:
                data, ggml_type, interleaved = weights.stored_bytes(name, rows, cols)
                sources.append(data)
                kinds.append(Rows(rows, config.head_dim if interleaved else 0))
            packing, rows = Packing(ggml_type), sum(n for _, n in names)
            planes = repack(packing, sources, tuple(kinds), cols, in_turn)
            Device[Device.DEFAULT].synchronize()  # so that the host's copies are freed
            return Product(names[0][0].split(".")[-2], packing, rows, cols, planes, row)

        def joined(names: Sequence[tuple[str, int]], missing: float) -> Tensor | None:
            """Vectors one after the other; None where there is none of them."""
            if not any(name in weights.file.tensors for name, _ in names):
                return None
            there = weights.file.tensors
            return _tensor(
                np.concatenate(
                    [weights.floats(name, n) if name in there else np.full(n, missing) for name, n in names]
                )
            )

        def projection(names: Sequence[tuple[str, int]], cols: int) -> list[Product]:
            """Matrices of one input as few products: neighbours of a type become one."""
            products, row = [], 0
            for _, run in groupby(names, key=lambda item: weights.type_of(item[0])):
                products.append(product(list(run), cols, row))
                row += products[-1].rows
            return products

        self._layers = []
        for i in range(config.layers):
            name = f"blk.{i}.{{}}.weight".format
            qkv = [(name("attn_q"), q_rows), (name("attn_k"), kv_rows), (name("attn_v"), kv_rows)]
            biases = [(f"blk.{i}.attn_{x}.bias", rows) for x, (_, rows) in zip("qkv", qkv, strict=True)]
            head_norms = [(name(f"attn_{x}_norm"), config.head_dim) for x in "qk"]
            gate_up = [(name("ffn_gate"), ffn), (name("ffn_up"), ffn)]
            same = weights.type_of(gate_up[0][0]) == weights.type_of(gate_up[1][0])
            layer = Layer(
                qkv=projection(qkv, dim),
                bias=joined(biases, 0.0),
                head_norms=joined(head_norms, 1.0),
                o=product([(name("attn_output"), dim)], q_rows),
                gate_up=[product(gate_up, dim, in_turn=True)] if same else projection(gate_up, dim),
                down=product([(name("ffn_down"), dim)], ffn),
                norms=(weights.floats(name("attn_norm"), dim), weights.floats(name("ffn_norm"), dim)),
            )
            self._layers.append(layer)
        self._embedding = product([("token_embd.weight", config.vocab)], dim)
        tied = "output.weight" not in weights.file.tensors
        self._head = self._embedding if tied else product([("output.weight", config.vocab)], dim)
        self._output_norm = weights.floats("output_norm.weight", dim)
        forget_plans()

    # ---- the decode step ----

    def _allocate(self) -> None:
        config = self._config
        q_rows = config.heads * config.head_dim
        self._state = _zeros(2, dtypes.int32)
        self._mailbox = Mailbox(self._context)
        self._h = _zeros(config.dim)
        self._rows = _zeros(q_rows + 2 * config.kv_heads * config.head_dim)
        self._value_rows = _zeros(config.kv_heads * config.head_dim)
        self._angles = _zeros(config.head_dim)
        self._attended, self._activated = _zeros(permuted_size(q_rows)), _zeros(permuted_size(config.ffn))
        self._gate_up = _zeros(2 * config.ffn)
        self._logits = _zeros(config.vocab)
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: dict[int, Tensor] = {}
        self._prescales: dict[int, Tensor] = {}
        self._scaled: dict[tuple[int, int], Tensor] = {}
        self._limits = [_SHORT]
        while self._limits[-1] < self._context:
            self._limits.append(_MEDIUM if self._limits[-1] < _MEDIUM else self._limits[-1] * 4)
        most = max(self._split(limit).splits for limit in self._limits)
        self._partial = _zeros(most * q_rows), _zeros(most * config.heads * 2)

    def _split(self, limit: int) -> Split:
        """While the context is short a block takes a head; then there are blocks for each multiprocessor."""
        config = self._config
        threads = max(256, -(-config.head_dim // 64) * 64)
        if limit <= _SHORT:
            return Split(limit, 1, 1, threads)
        group = 2 if config.heads // config.kv_heads % 2 == 0 else 1
        scores_bytes = limit * group * Split(limit, 2, group, threads).cuts(config.head_dim) * 4
        splits = max(2, multiprocessors() // config.kv_heads, -(-scores_bytes // _SCORES_BYTES))
        return Split(limit, splits, group, threads, ahead=8)

    def _decode_step(self, split: Split) -> Launches:
        step = Launches()
        inputs = self._layers[0].qkv
        stream = self._stream(max(self._layers[0].down.n_blocks, UNIT // QUARTER), inputs, 0)
        kernel = embed(
            self._embedding.packing,
            self._config.vocab,
            self._config.dim,
            stream.n_parts,
            len(stream.inputs),
            self._context,
            self._config.head_dim // 2,
        )
        tables = [self._angles, self._state, self._cos, self._sin]
        first_norm = [self._norm(self._layers[0].norms[0], scaling) for scaling in stream.inputs]
        step.add(
            kernel,
            stream.h,
            stream.parts,
            *stream.inputs.values(),
            *tables,
            *first_norm,
            *self._embedding.planes,
        )
        for i, layer in enumerate(self._layers):
            for part in layer.qkv:
                bias = [] if layer.bias is None else [layer.bias]
                own = part is layer.qkv[-1] and layer.values_apart
                epilogue = Store(0 if own else part.row, part.row if bias else None)
                self._normed(
                    step, part, stream, epilogue, [self._value_rows if own else self._rows], bias, "qkv"
                )
            self._attention(step, layer, split)
            stream = self._residual(step, layer.o, self._attended, layer.gate_up, layer.norms[1], 1, "o")
            prescale = self._prescale(layer.down.packing)
            if len(layer.gate_up) == 1:
                self._normed(
                    step, layer.gate_up[0], stream, GateUp(), [self._activated], [prescale], "gate_up"
                )
            else:
                for part in layer.gate_up:
                    self._normed(step, part, stream, Store(part.row), [self._gate_up], [], "gate_up")
                step.add(activate(self._config.ffn), self._activated, self._gate_up, prescale)
            last = i + 1 == len(self._layers)
            following = [self._head] if last else self._layers[i + 1].qkv
            norm = self._output_norm if last else self._layers[i + 1].norms[0]
            stream = self._residual(step, layer.down, self._activated, following, norm, 0, "down")
        blocks = self._head.n_blocks
        best = _zeros(blocks), _zeros(blocks, dtypes.int32)
        self._normed(step, self._head, stream, Best(), [self._logits, *best], [], "head")
        step.add(next_token(blocks, self._context), self._state, self._mailbox.tensor, *best)
        return step

    def _attention(self, step: Launches, layer: Layer, split: Split) -> None:
        norms = [] if layer.head_norms is None else [layer.head_norms]
        prescale = self._prescale(layer.o.packing)
        apart = layer.values_apart
        new = [self._rows, self._value_rows] if apart else [self._rows]
        ins = [layer.keys, layer.values, *new, self._angles, self._state, *norms]
        if split.splits == 1:
            step.add(attention(self._heads, split, apart), self._attended, *ins, prescale)
            return
        step.add(attention(self._heads, split, apart), *self._partial, *ins)
        step.add(combine(self._heads, split.splits), self._attended, *self._partial, prescale)

    def _normed(
        self,
        step: Launches,
        part: Product,
        stream: Stream,
        epilogue: Epilogue,
        outs: list[Tensor],
        ins: list[Tensor],
        name: str,
    ) -> None:
        """A product with the normed stream."""
        kernel = matvec(
            part.packing,
            part.rows,
            part.cols,
            part.schedule,
            epilogue,
            name,
            stream.n_parts,
            self._config.norm_eps,
        )
        step.add(kernel, *outs, stream.inputs[part.packing.scaling], stream.parts, *ins, *part.planes)

    def _residual(
        self,
        step: Launches,
        part: Product,
        x: Tensor,
        following: list[Product],
        norm: Floats,
        which: int,
        name: str,
    ) -> Stream:
        """A product that the residual stream takes up, before `norm` and the products `following`."""
        stream = self._stream(part.n_blocks, following, which)
        kernel = matvec(part.packing, part.rows, part.cols, part.schedule, Residual(len(stream.inputs)), name)
        norms = [self._norm(norm, scaling) for scaling in stream.inputs]
        step.add(kernel, stream.h, stream.parts, *stream.inputs.values(), x, *norms, *part.planes)
        return stream

    def _stream(self, n_parts: int, following: list[Product], which: int) -> Stream:
        """Producers take turns with two arrays of parts, since a kernel may read one while it fills the other."""
        scalings = sorted({part.packing.scaling for part in following})
        for s in scalings:
            if s not in self._inputs:
                self._inputs[s] = _zeros(permuted_size(self._config.dim))
        if n_parts not in self._parts:
            self._parts[n_parts] = _zeros(n_parts), _zeros(n_parts)
        return Stream(self._h, self._parts[n_parts][which], n_parts, {s: self._inputs[s] for s in scalings})

    # ---- prefill ----

    def _prefill_step(self, tokens: int) -> Launches:
        """A step for up to `tokens` tokens; the last layer's keys and values are all that is wanted of it."""
        config, step, heads = self._config, Launches(), self._heads
        dim, q_rows = config.dim, config.heads * config.head_dim
        h, x = self._buffer("h", tokens * dim), self._buffer("x", fragments_size(tokens, dim), dtypes.float16)
        queries = self._buffer("queries", tokens * q_rows, dtypes.float16)
        attended = self._buffer("attended", fragments_size(tokens, q_rows), dtypes.float16)
        activated = self._buffer("activated", fragments_size(tokens, config.ffn), dtypes.float16)
        kernel = embed_prompt(self._embedding.packing, tokens, config.vocab, dim)
        step.add(kernel, h, self._ids, *self._embedding.planes)

        def product(part: Product, x: Tensor, name: str) -> tuple[Tensor, int]:
            """Sums of a product, and how many they are."""
            tiles = tiles_for(tokens, part.rows, part.cols, multiprocessors(), False)
            out = self._buffer(name, tiles.parts * tokens * part.rows)
            kernel = matmul(part.packing, tokens, part.rows, part.cols, tiles, False, name)
            step.add(kernel, out, x, self._prompt, *part.planes)
            return out, tiles.parts

        added: list[tuple[Tensor, int]] = []  # what the stream has yet to take up

        def norm(weight: Floats) -> None:
            sums, parts = ([added[0][0]], added[0][1]) if added else ([], 0)
            step.add(norm_prompt(tokens, dim, parts, config.norm_eps), x, h, *sums, self._norm(weight, 0))
            added.clear()

        for layer in self._layers:
            norm(layer.norms[0])
            runs = [product(part, x, f"qkv{i}") for i, part in enumerate(layer.qkv)]
            extra = [t for t in (layer.bias, layer.head_norms) if t is not None]
            sizes, counts = tuple(p.rows for p in layer.qkv), tuple(n for _, n in runs)
            kernel = rotate_prompt(heads, tokens, counts, sizes, layer.bias is not None)
            sums = [t for t, _ in runs]
            step.add(
                kernel, queries, layer.keys, layer.values, *sums, self._cos, self._sin, self._prompt, *extra
            )
            if layer is self._layers[-1]:
                break
            step.add(attend_prompt(heads, tokens), attended, queries, layer.keys, layer.values, self._prompt)
            added.append(product(layer.o, attended, "o"))
            norm(layer.norms[1])
            if len(layer.gate_up) == 1:
                part = layer.gate_up[0]
                tiles = tiles_for(tokens, part.rows, part.cols, multiprocessors(), True)
                kernel = matmul(part.packing, tokens, part.rows, part.cols, tiles, True, "gate_up")
                step.add(kernel, activated, x, self._prompt, *part.planes)
            else:
                (gate, a), (up, b) = (product(p, x, f"gate_up{i}") for i, p in enumerate(layer.gate_up))
                step.add(activate_prompt(tokens, config.ffn, (a, b)), activated, gate, up)
            added.append(product(layer.down, activated, "down"))
        return step

    def _buffer(self, name: str, n: int, dtype: DType = dtypes.float32) -> Tensor:
        """Scratch memory of prefill, the same for all layers."""
        if (name, n) not in self._scratch:
            self._scratch[name, n] = _zeros(n, dtype)
        return self._scratch[name, n]

    def _prescale(self, packing: Packing) -> Tensor:
        if packing.scaling not in self._prescales:
            self._prescales[packing.scaling] = _tensor(prescale(packing.scaling))
        return self._prescales[packing.scaling]

    def _norm(self, weight: Floats, scaling: int) -> Tensor:
        """A norm's weight times the prescale of the product that follows."""
        key = (id(weight), scaling)
        if key not in self._scaled:
            self._scaled[key] = _tensor(
                weight * np.tile(prescale(scaling), -(-weight.size // UNIT))[: weight.size]
            )
        return self._scaled[key]


def _zeros(n: int, dtype: DType = dtypes.float32) -> Tensor:
    return Tensor.zeros(n, dtype=dtype).contiguous().realize()


def _tensor(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Tensor:
    return Tensor(np.ascontiguousarray(values, np.float32)).realize()
