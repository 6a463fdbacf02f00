"""The fused path for NVIDIA GPUs: quantized products as kernels of our own, a decode step of five a layer.

    embed · (qkv · attention · o · gate+up · down) for each layer · head · next token

All that changes from token to token (the token, its position, keys and values) lies in device memory, so that a
step is one graph launch; the token also arrives in host memory, where it is read without stopping the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from engine.fixes import launch_bounds
from engine.kernels.attention import SLACK, Heads, Split, attention, combine
from engine.kernels.gpu import capability, multiprocessors
from engine.kernels.launch import Launches
from engine.kernels.mailbox import Mailbox, send
from engine.kernels.matvec import Best, Epilogue, GateUp, Residual, Store, activate, matvec
from engine.kernels.packing import UNIT, Packing, permuted_size, prescale
from engine.kernels.schedules import matvec_schedule
from engine.kernels.token import embed, next_token
from engine.model.sampling import Logits
from engine.model.weights import Weights

_SHORT, _MEDIUM = 512, 8192  # tokens that one block a head, and 32, attend to


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
        self.schedule = matvec_schedule(self.packing, self.rows, self.cols, capability())

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
    norms: tuple[Tensor, Tensor]  # attention's, feed-forward's
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
        config = self._config = weights.config
        self.chunk = 512
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
        self._expected = (-1, -1)  # token and position on the device
        self._ahead = -1  # position of a step that runs already

    # ---- the protocol ----

    def prefill(self, tokens: Sequence[int], position: int) -> None:
        for i, token in enumerate(tokens):
            self.decode(token, position + i)

    def decode(self, token: int, position: int, ahead: bool = False) -> int:
        """As `Steps.decode`. With `ahead`, the step after it is launched too, for a caller who is going to ask
        for it with the token that this one returns; logits are then that step's."""
        if self._ahead == position and self._expected == (token, position):
            self._ahead = -1
        else:
            if self._ahead >= 0:
                Device[Device.DEFAULT].synchronize()  # or it would answer for the step launched now
                self._ahead, self._expected = -1, (-1, -1)
            if self._expected != (token, position):
                send(self._state, np.asarray([token, position], np.int32))
            self._launch(position)
        if ahead and position + 1 < self._context:
            self._launch(position + 1)
            self._ahead = position + 1
        best = self._mailbox.take(position)
        self._expected = (best, position + 1)
        return best

    def logits(self) -> Logits:
        return np.asarray(self._logits.numpy(), np.float32)

    def _launch(self, position: int) -> None:
        self._mailbox.expect(position)
        limit = next(limit for limit in self._limits if position < limit)
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
            raws, types = zip(*(weights.stored(name, rows, cols) for name, rows in names), strict=True)
            rows = sum(n for _, n in names)
            if in_turn:
                raw = Tensor.stack(*(r.reshape(names[0][1], -1) for r in raws), dim=1).flatten()
            else:
                raw = raws[0].cat(*raws[1:])
            packing = Packing(types[0])
            planes = packing.pack(raw, rows, cols)
            Device[Device.DEFAULT].synchronize()  # so that the host's copies are freed
            return Product(names[0][0].split(".")[-2], packing, rows, cols, planes, row)

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
            biases = [
                weights.vector(f"blk.{i}.attn_{x}.bias", n)
                for x, n in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
            ]
            norms = [weights.vector(name(f"attn_{x}_norm"), config.head_dim) for x in "qk"]
            gate_up = [(name("ffn_gate"), ffn), (name("ffn_up"), ffn)]
            same = weights.type_of(gate_up[0][0]) == weights.type_of(gate_up[1][0])
            layer = Layer(
                qkv=projection(qkv, dim),
                bias=_joined(biases, (q_rows, kv_rows, kv_rows), 0.0),
                head_norms=_joined(norms, (config.head_dim,) * 2, 1.0),
                o=product([(name("attn_output"), dim)], q_rows),
                gate_up=[product(gate_up, dim, in_turn=True)] if same else projection(gate_up, dim),
                down=product([(name("ffn_down"), dim)], ffn),
                norms=(
                    weights.required_vector(name("attn_norm"), dim),
                    weights.required_vector(name("ffn_norm"), dim),
                ),
            )
            self._layers.append(layer)
        self._embedding = product([("token_embd.weight", config.vocab)], dim)
        tied = "output.weight" not in weights.file.tensors
        self._head = self._embedding if tied else product([("output.weight", config.vocab)], dim)
        self._output_norm = weights.required_vector("output_norm.weight", dim)

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
        self._best = _zeros(self._head.n_blocks), _zeros(self._head.n_blocks, dtypes.int32)
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
        """While the context is short a block takes a head; then there is a block for each multiprocessor."""
        config = self._config
        if limit <= _SHORT:
            return Split(limit, 1, 1, max(256, -(-config.head_dim // 64) * 64))
        group = next(g for g in (4, 3, 2, 1) if config.heads // config.kv_heads % g == 0)
        blocks = config.heads // group
        splits = max(2, multiprocessors() // blocks, limit // 1024)
        return Split(limit, splits, group, 512, ahead=8)

    def _decode_step(self, split: Split) -> Launches:
        step = Launches()
        inputs = self._layers[0].qkv
        stream = self._stream(self._layers[0].down.n_blocks, inputs, 0)
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
                self._normed(step, part, stream, epilogue, [self._value_rows if own else self._rows], bias, "qkv")
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
        self._normed(step, self._head, stream, Best(), [self._logits, *self._best], [], "head")
        step.add(
            next_token(self._head.n_blocks, self._context), self._state, self._mailbox.tensor, *self._best
        )
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
        norm: Tensor,
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

    def _prescale(self, packing: Packing) -> Tensor:
        if packing.scaling not in self._prescales:
            self._prescales[packing.scaling] = _tensor(prescale(packing.scaling))
        return self._prescales[packing.scaling]

    def _norm(self, weight: Tensor, scaling: int) -> Tensor:
        """A norm's weight times the prescale of the product that follows."""
        key = (id(weight), scaling)
        if key not in self._scaled:
            n = int(weight.numel())
            self._scaled[key] = _tensor(weight.numpy() * np.tile(prescale(scaling), -(-n // UNIT))[:n])
        return self._scaled[key]


def _zeros(n: int, dtype: DType = dtypes.float32) -> Tensor:
    return Tensor.zeros(n, dtype=dtype).contiguous().realize()


def _tensor(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Tensor:
    return Tensor(np.ascontiguousarray(values, np.float32)).realize()


def _joined(vectors: Sequence[Tensor | None], sizes: Sequence[int], missing: float) -> Tensor | None:
    """Vectors one after the other; None where there is none at all."""
    if all(v is None for v in vectors):
        return None
    whole = [Tensor.full((n,), missing) if v is None else v for v, n in zip(vectors, sizes, strict=True)]
    return whole[0].cat(*whole[1:]).contiguous().realize()
