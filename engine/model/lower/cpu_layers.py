"""The layers of a model as the CPU's kernels read them: their weights, and the memory that each keeps."""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from engine.formats.kv_format import KVFormat
from engine.kernels.cpu import memory
from engine.kernels.cpu.rope import Heads
from engine.model.kv_blocks import BLOCK
from engine.model.lower.cpu_cache import CPUCache
from engine.model.lower.cpu_weights import CPUWeights, Matrix
from engine.model.mixes import Activation, Attend, Dense, Experts
from engine.model.spec import ModelSpec, Sublayer


@dataclass
class Attention:
    """The weights and the cache (`Heads.cached`) of a layer's attention. `norms`: those of queries and of keys, if
    there are any."""

    heads: Heads
    rope: int
    qkv: list[Matrix]
    bias: Tensor | None
    norms: list[Tensor]
    o: Matrix
    o_bias: Tensor | None
    sinks: list[Tensor]
    cached: list[Tensor]


@dataclass
class FeedForward:
    """The weights of a feed-forward layer."""

    gate: Matrix
    up: Matrix
    down: Matrix
    activation: Activation


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


@dataclass
class Layer:
    """A sublayer with the weights of its norms."""

    norm: Tensor | None
    mix: Attention | FeedForward | Mixture
    post_norm: Tensor | None


class LayerLoader:
    """Loads layers. Their caches are `cache`'s, in format `kv`. Methods raise ModelFileError."""

    def __init__(
        self, loader: CPUWeights, spec: ModelSpec, cache: CPUCache, kv: KVFormat, lanes: int
    ) -> None:
        self._loader, self._spec, self._cache, self._lanes = loader, spec, cache, lanes
        floats = dtypes.float32 if spec.is_float32 else dtypes.float16
        self._cache_type = dtypes.int8 if kv.is_quantized else floats

    def layer(self, sublayer: Sublayer) -> Layer:
        norm, post_norm = (v and self._loader.vector(v) for v in (sublayer.norm, sublayer.post_norm))
        part = sublayer.mix
        added = (
            post_norm is None
        )  # the last product adds the residual stream, unless its result is normed first
        mix: Attention | FeedForward | Mixture
        match part:
            case Attend():
                mix = self._attention(part, added)
            case Experts():
                mix = self._mixture(part)
            case Dense():
                mix = FeedForward(
                    gate=self._loader.matrix(part.gate),
                    up=self._loader.matrix(part.up),
                    down=self._loader.matrix(part.down, added=added),
                    activation=part.activation,
                )
        return Layer(norm, mix, post_norm)

    def _mixture(self, part: Experts) -> Mixture:
        matrices = [(part.gate, part.gate_bias), (part.up, part.up_bias), (part.down, part.down_bias)]
        gate, up, down = (self._loader.matrix(weight, added=bias is not None) for weight, bias in matrices)
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
        )

    def _attention(self, part: Attend, added: bool) -> Attention:
        rows, firsts = (
            part.query_size + 2 * part.kv_size,
            (0, part.query_size, part.query_size + part.kv_size),
        )
        assert part.k and part.v
        qkv = part.q, part.k, part.v
        length, window, table = self._cache.slots(part.window)
        heads = Heads(
            part.heads, part.kv_heads, part.head_dim, length, self._lanes, part.scale,
            norm_eps=self._spec.eps, query_norm=part.q_norm is not None, key_norm=part.k_norm is not None,
            temperature=self._spec.temperature is not None,
            window=window, table=table, block=BLOCK,
            dtype=self._cache_type,
            wide_norms=part.has_wide_norms, sinks=part.sinks is not None,
        )  # fmt: skip
        biases = part.q_bias, part.k_bias, part.v_bias
        return Attention(
            heads=heads,
            rope=part.rope,
            qkv=[self._loader.matrix(w, first, rows) for w, first in zip(qkv, firsts, strict=True)],
            bias=self._loader.joined([(bias, w.rows) for bias, w in zip(biases, qkv, strict=True)]),
            norms=[self._loader.vector(norm) for norm in (part.q_norm, part.k_norm) if norm],
            o=self._loader.matrix(part.o, added=added),
            o_bias=part.o_bias and self._loader.vector(part.o_bias),
            sinks=[self._loader.vector(part.sinks)] if part.sinks else [],
            cached=self._cache.add(heads),
        )
