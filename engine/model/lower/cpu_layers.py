"""The layers of a model as the CPU's kernels read them: their weights, and the memory that each keeps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from tinygrad import Tensor, dtypes

from engine.formats.kv_format import KVFormat
from engine.kernels.cpu import memory
from engine.kernels.cpu.delta_net import DeltaNet
from engine.kernels.cpu.rope import Heads
from engine.model.kv_blocks import BLOCK
from engine.model.lower.cpu_cache import CPUCache
from engine.model.lower.cpu_states import CPUStates
from engine.model.lower.cpu_weights import CPUWeights, Matrix
from engine.model.mixes import Activation, Attend, Beside, Delta, Dense, Experts, LayerEmbedding
from engine.model.spec import ModelSpec, Sublayer


@dataclass
class Attention:
    """The weights and the cache (`Heads.cached`) of a layer's attention. `norms`: those of queries and of keys, if
    there are any. `gate`: that of the result, if there is one."""

    heads: Heads
    rope: int
    qkv: list[Matrix]
    gate: Matrix | None
    bias: Tensor | None
    norms: list[Tensor]
    o: Matrix
    o_bias: Tensor | None
    sinks: list[Tensor]
    cached: list[Tensor]


@dataclass
class Recurrence:
    """The weights of a gated delta net, and the states of its sequences (`DeltaNet`). `tables`: what `convolve` reads
    beside the tokens."""

    net: DeltaNet
    qkv: Matrix
    gate: Matrix
    beta: Matrix
    alpha: Matrix
    out: Matrix
    tables: list[Tensor]
    norm: Tensor
    states: Tensor
    inputs: Tensor


@dataclass
class FeedForward:
    """The weights of a feed-forward layer."""

    gate: Matrix
    up: Matrix
    down: Matrix
    activation: Activation


@dataclass
class Shared:
    """A layer that all tokens share beside experts, and its gate."""

    layer: FeedForward
    gate: Matrix

    @property
    def reads(self) -> list[Matrix]:
        """What reads the tokens."""
        return [self.layer.gate, self.layer.up, self.gate]


@dataclass
class Mixture:
    """The weights of a mixture of experts. `biases`: those of gate, up and down; zeros where there are none. `choices`:
    how often each expert was chosen, int32 (experts,)."""

    spec: Experts
    router: Matrix
    router_bias: Tensor | None
    gate: Matrix
    up: Matrix
    down: Matrix
    biases: list[Tensor]
    choices: Tensor
    shared: Shared | None
    scales: list[Tensor]
    """What the results of the experts are multiplied by, if there is something."""


@dataclass
class SideBySide:
    """A feed-forward layer and a mixture of experts side by side, with the weights of their norms."""

    dense: FeedForward
    dense_norm: Tensor
    dense_post_norm: Tensor
    experts: Mixture
    experts_norm: Tensor
    experts_post_norm: Tensor
    router_norm: Tensor


@dataclass
class Embedded:
    """The weights through which the embeddings of a layer, the `layer`-th, are added."""

    gate: Matrix
    proj: Matrix
    layer: int


Mix = Attention | Recurrence | FeedForward | Mixture | SideBySide | Embedded


@dataclass
class Layer:
    """A sublayer with the weights of its norms. `scale`: what the stream is multiplied by after it, if there is
    something."""

    norm: Tensor | None
    mix: Mix
    post_norm: Tensor | None
    scale: list[Tensor]


class LayerLoader:
    """Loads layers. Their caches are `cache`'s, in format `kv`, and their states `states`'. Methods raise
    ModelFileError."""

    def __init__(
        self,
        loader: CPUWeights,
        spec: ModelSpec,
        cache: CPUCache,
        states: CPUStates,
        kv: KVFormat,
        lanes: int,
    ) -> None:
        self._loader, self._spec, self._lanes = loader, spec, lanes
        self._cache, self._states = cache, states
        self._caches: list[list[Tensor]] = []  # of each attention the one that it reads
        floats = dtypes.float32 if spec.is_float32 else dtypes.float16
        self._cache_type = dtypes.int8 if kv.is_quantized else floats

    def layer(self, sublayer: Sublayer) -> Layer:
        norm, post_norm = (v and self._loader.vector(v) for v in (sublayer.norm, sublayer.post_norm))
        part = sublayer.mix
        added = (
            post_norm is None
        )  # the last product adds the residual stream, unless its result is normed first
        mix: Mix
        match part:
            case Attend():
                mix = self._attention(part, added)
            case Experts():
                mix = self._mixture(part)
            case Delta():
                mix = self._recurrence(part, added)
            case Dense():
                mix = self._feed_forward(part, added)
            case Beside():
                mix = self._side_by_side(part)
            case LayerEmbedding():
                gate, proj = self._loader.matrix(part.gate), self._loader.matrix(part.proj, added=added)
                mix = Embedded(gate, proj, part.layer)
        return Layer(norm, mix, post_norm, [self._loader.vector(sublayer.scale)] if sublayer.scale else [])

    def _side_by_side(self, part: Beside) -> SideBySide:
        vector = self._loader.vector
        return SideBySide(
            dense=self._feed_forward(part.dense),
            dense_norm=vector(part.dense_norm),
            dense_post_norm=vector(part.dense_post_norm),
            experts=self._mixture(part.experts),
            experts_norm=vector(part.experts_norm),
            experts_post_norm=vector(part.experts_post_norm),
            router_norm=vector(part.router_scale),
        )

    def _feed_forward(self, part: Dense, added: bool = False) -> FeedForward:
        gate, up = (self._loader.matrix(weight) for weight in (part.gate, part.up))
        return FeedForward(gate, up, self._loader.matrix(part.down, added=added), part.activation)

    def _mixture(self, part: Experts) -> Mixture:
        matrices = [(part.gate, part.gate_bias), (part.up, part.up_bias), (part.down, part.down_bias)]
        gate, up, down = (self._loader.matrix(weight, added=bias is not None) for weight, bias in matrices)
        shared = None
        if part.shared and part.shared_gate:
            shared = Shared(self._feed_forward(part.shared), self._loader.matrix(part.shared_gate))
        return Mixture(
            spec=part,
            router=self._loader.matrix(part.router),
            router_bias=part.router_bias and self._loader.vector(part.router_bias),
            gate=gate,
            up=up,
            down=down,
            biases=[
                self._loader.vector(bias) if bias else memory.zeros(weight.rows, dtypes.float32)
                for weight, bias in matrices
            ],
            choices=memory.zeros(part.count, dtypes.int32),
            shared=shared,
            scales=[self._loader.vector(part.scales)] if part.scales else [],
        )

    def _attention(self, part: Attend, added: bool) -> Attention:
        qkv = [weight for weight in (part.q, part.k, part.v) if weight]
        *firsts, rows = accumulate((weight.rows for weight in qkv), initial=0)
        length, window, table = self._cache.slots(part.window)
        heads = Heads(
            part.heads, part.kv_heads, part.head_dim, length, BLOCK, table, self._lanes, part.scale,
            norm_eps=self._spec.eps, query_norm=part.q_norm is not None, key_norm=part.k_norm is not None,
            temperature=self._spec.temperature is not None,
            window=window, dtype=self._cache_type,
            wide_norms=part.has_wide_norms, sinks=part.sinks is not None,
            stored="keys and values" if part.v else "keys" if part.k else "nothing", value_norm=part.has_normed_values,
        )  # fmt: skip
        biases = part.q_bias, part.k_bias, part.v_bias
        self._caches.append(self._cache.add(heads) if part.cache_of is None else self._caches[part.cache_of])
        return Attention(
            heads=heads,
            rope=part.rope,
            qkv=[self._loader.matrix(w, first, rows) for w, first in zip(qkv, firsts, strict=True)],
            gate=self._loader.matrix(part.gate) if part.gate else None,
            bias=self._loader.joined([(bias, w.rows) for bias, w in zip(biases, qkv, strict=False)]),
            norms=[self._loader.vector(norm) for norm in (part.q_norm, part.k_norm) if norm],
            o=self._loader.matrix(part.o, added=added),
            o_bias=part.o_bias and self._loader.vector(part.o_bias),
            sinks=[self._loader.vector(part.sinks)] if part.sinks else [],
            cached=self._caches[-1],
        )

    def _recurrence(self, part: Delta, added: bool) -> Recurrence:
        net = DeltaNet(part.key_heads, part.value_heads, part.size, part.taps, self._spec.eps, self._lanes)
        states, inputs = self._states.add(net)
        loader = self._loader
        return Recurrence(
            net=net,
            qkv=loader.matrix(part.qkv),
            gate=loader.matrix(part.gate),
            beta=loader.matrix(part.beta, 0, 2 * net.gates),
            alpha=loader.matrix(part.alpha, net.gates, 2 * net.gates),
            out=loader.matrix(part.out, added=added),
            tables=[
                loader.transposed(part.conv, net.taps),
                *(loader.vector(v) for v in (part.decay, part.decay_bias)),
            ],
            norm=loader.vector(part.norm),
            states=states,
            inputs=inputs,
        )
