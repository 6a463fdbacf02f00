"""Reads a file's metadata and tensor names into the description of its model. No other file knows an architecture.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized key-value pairs". What each architecture
does: its file in src/models of llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged, printable
from engine.formats.rope_order import HeadOrder
from engine.model.checked_file import CheckedFile
from engine.model.mixes import Activation, Attend, Delta, Dense, Experts, Vector, Weight
from engine.model.spec import ModelSpec, Rope, Sublayer, Temperature


@dataclass(frozen=True)
class Family:
    """What neither the tensors nor the metadata of an architecture's files say. `interleaved`: rotary pairs are
    neighbours ("norm" in llama_model_rope_type of llama.cpp; else "neox"). Of `full_attention_every` layers the last
    has no window (0: no layer has one, whatever the metadata say). `plain_windows`: layers with a window have a rotary
    base of their own, and no scaling. Of `unrotated_every` layers the last has no rotary embedding. `scaled_embedding`:
    the embedding is multiplied by sqrt(dim). `renormalised`: the probabilities of the chosen experts are divided by
    their sum. Of `attention_every` layers the last has attention, and the others are gated delta nets, unless the
    metadata say otherwise (0: all have attention). `gated_attention`: in each head the rows of the query come before
    those of a gate of its result."""

    interleaved: bool = False
    activation: Activation = "silu"
    full_attention_every: int = 0
    plain_windows: bool = False
    unrotated_every: int = 0
    scaled_embedding: bool = False
    renormalised: bool = True
    attention_every: int = 0
    gated_attention: bool = False


ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family(interleaved=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "mistral3": Family(interleaved=True),
    "phi3": Family(),
    "gemma3": Family(activation="gelu", full_attention_every=6, plain_windows=True, scaled_embedding=True),
    "granite": Family(interleaved=True),
    "smollm3": Family(interleaved=True, unrotated_every=4),
    "olmo2": Family(),
    "olmoe": Family(renormalised=False),
    "qwen3moe": Family(),
    "gpt-oss": Family(activation="swiglu_oai", full_attention_every=2),
    "qwen35": Family(attention_every=4, gated_attention=True),
    "qwen35moe": Family(attention_every=4, gated_attention=True),
}


_VISION = "v.", "mm."
"""How the names of tensors of a vision encoder begin: tools/mtmd/clip-impl.h of llama.cpp."""

_DRAFT = "mtp."
"""How the names of tensors of a draft layer begin in files of Ollama."""

_MAX_HEAD = 1 << 13  # elements: published models have at most 576


def check_architecture(architecture: str, model: str) -> None:
    """Raises ModelFileError if the engine does not run this architecture; the message calls the model `model`."""
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{model} is of the architecture {printable(architecture)}, which orin-chat does not run.",
            f"Choose a model of one of these: {', '.join(ARCHITECTURES)}.",
        )


def read_spec(file: GGUF) -> ModelSpec:
    """Raises ModelFileError for an architecture that the engine does not run, for a variant of one, and for damaged
    metadata."""
    architecture = file.get("general.architecture", str)
    check_architecture(architecture, printable(file.path.name))
    try:
        return _Reader(file, architecture).spec()
    except (ArithmeticError, ValueError):  # scales close to 0, whose inverse is no number
        raise damaged(file.path, "its metadata has numbers that nothing can be computed with") from None


class _Reader(CheckedFile):
    """Reads one file."""

    def __init__(self, file: GGUF, architecture: str) -> None:
        super().__init__(file, architecture)
        self.family = ARCHITECTURES[architecture]
        if "token_embd.weight" not in file.tensors:
            raise ModelFileError(
                f"{self.name} has no weights (there is no token_embd.weight).",
                "It may be a vocabulary or an adapter; choose a model file.",
            )
        self._ropes: list[Rope] = []
        self.dim, self.heads = self.size("embedding_length"), self.size("attention.head_count")
        self.head_dim = self.size("attention.key_length", self.dim // self.heads)
        self.rotated = self.size("rope.dimension_count", self.head_dim)
        self.draft_layers = self.file.get(self.key("nextn_predict_layers"), int, 0)
        self.layers = self.size("block_count") - self.draft_layers
        if self.draft_layers < 0 or self.layers < 1:
            raise damaged(self.file.path, f"{self.draft_layers} of its layers are draft layers")
        self.kv_heads = max(self.sizes("attention.head_count_kv", self.layers, self.heads))
        self.context = self.size("context_length")
        if (
            self.size("attention.value_length", self.head_dim) != self.head_dim
            or self.head_dim % 2
            or self.head_dim > _MAX_HEAD  # before tables of this size are made
            or not self.kv_heads
            or self.heads % self.kv_heads
            or self.rotated % 2
            or self.rotated > self.head_dim
        ):
            raise ModelFileError(
                f"{self.name} has attention heads of a shape that orin-chat does not run.",
                "Choose another model.",
            )
        order = HeadOrder(self.head_dim, self.rotated, self.family.interleaved)
        self.order = None if order.is_engines else order

    # --- the model -------------------------------------------------------------------------------------

    def spec(self) -> ModelSpec:
        vocab = self.file.tensors["token_embd.weight"].shape[0]
        embedding = head = self.weight("token_embd", vocab, self.dim)
        if self.has("output.weight"):
            head = self.weight("output", vocab, self.dim)
        # The stream is kept divided by granite's multiplier of what layers add to it: only norms read it, and a norm of
        # x / c with eps / c**2 is that of x with eps.
        residual = self.factor("residual_scale", 1.0)
        scale = self.number("embedding_scale", math.sqrt(self.dim) if self.family.scaled_embedding else 1.0)
        eps = self.number("attention.layer_norm_rms_epsilon", 1e-5)
        norm = self.required("output_norm.weight", self.dim)
        slope = self.number("attention.temperature_scale", 0.0)
        spec = ModelSpec(
            architecture=self.architecture,
            name=self.file.get("general.name", str, self.file.path.stem),
            dim=self.dim,
            vocab=vocab,
            trained_context=self.context,
            embedding=embedding,
            embedding_scale=scale / residual,
            sublayers=tuple(sublayer for i in range(self.layers) for sublayer in self.layer(i)),
            output_norm=Vector(norm.tensor, norm.size, factor=1 / self.factor("logit_scale", 1.0)),
            head=head,
            ropes=tuple(self._ropes),
            eps=eps,
            stream_eps=eps / residual**2,
            softcap=self.number("final_logit_softcapping", 0.0),
            temperature=Temperature(slope, self.original_context) if slope else None,
            draft_layers=self.draft_layers or int(any(name.startswith(_DRAFT) for name in self.file.tensors)),
            has_vision=any(name.startswith(_VISION) for name in self.file.tensors),
        )
        if not spec.attention:
            raise damaged(self.file.path, "no layer has attention")
        self.used.update(filter(self.is_left_out, self.file.tensors))
        if unread := sorted(self.file.tensors.keys() - self.used):
            raise ModelFileError(
                f"{self.name} holds {printable(unread[0])}, which orin-chat does not know in a model of the "
                f"architecture {self.architecture}.",
                "It is of a variant that orin-chat does not run. Choose another model.",
            )
        return spec

    def is_left_out(self, tensor: str) -> bool:
        """Whether a tensor is of draft layers, which come after the others, or of a vision encoder."""
        layer = re.match(r"blk\.(\d{1,9})\.", tensor)
        is_draft = layer and self.layers <= int(layer[1]) < self.layers + self.draft_layers
        return bool(is_draft) or tensor.startswith((*_VISION, _DRAFT))

    def layer(self, i: int) -> tuple[Sublayer, Sublayer]:
        """Attention or a delta net, and the feed-forward layer of layer i. A file that has post_ffw_norm norms the
        results of both; in others post_attention_norm is another name of ffn_norm."""
        prefix = f"blk.{i}."

        def norm(name: str) -> Vector | None:
            return self.vector(f"{prefix}{name}.weight", self.dim)

        has_post_norms = self.has(f"{prefix}post_ffw_norm.weight")
        before = [norm("attn_norm"), norm("ffn_norm")]
        after = [norm("post_attention_norm"), norm("post_ffw_norm")] if has_post_norms else [None, None]
        if not has_post_norms:
            is_renamed = not before[1] and self.has(f"{prefix}post_attention_norm.weight")
            names = "attn_norm", "post_attention_norm" if is_renamed else "ffn_norm"
            before = [self.required(f"{prefix}{name}.weight", self.dim) for name in names]
        return (
            Sublayer(
                before[0], self.delta(prefix) if self.is_recurrent(i) else self.attend(i, prefix), after[0]
            ),
            Sublayer(before[1], self.feed_forward(prefix), after[1]),
        )

    def is_recurrent(self, i: int) -> bool:
        """Whether layer i is a gated delta net: `recurrent_layers` tells it, or the number of layers of which the last
        has attention."""
        if not self.family.attention_every:
            return False
        layers = self.file.metadata.get(self.key("attention.recurrent_layers"))
        if isinstance(layers, np.ndarray):
            if len(layers) < self.layers:
                raise damaged(self.file.path, f"{len(layers)} of its layers are recurrent or not")
            return bool(layers[i])
        return (i + 1) % self.size("full_attention_interval", self.family.attention_every) != 0

    def delta(self, prefix: str) -> Delta:
        """A gated delta net. Raises ModelFileError for one that is cut into other heads than the engine's."""
        key_heads, value_heads = self.size("ssm.group_count"), self.size("ssm.time_step_rank")
        size, taps = self.size("ssm.state_size"), self.size("ssm.conv_kernel")
        dim, channels, values = self.dim, (2 * key_heads + value_heads) * size, value_heads * size
        is_tiled = self.file.get(self.key("ssm.v_head_reordered"), bool, True)  # only files of Ollama say it
        decay_bias = (
            "ssm_dt" if self.has(f"{prefix}ssm_dt") else "ssm_dt.bias"
        )  # the first in files of Ollama
        fits = not value_heads % key_heads and self.size("ssm.inner_size", values) == values
        if size > _MAX_HEAD or not fits or not is_tiled:
            raise ModelFileError(
                f"{self.name} has gated delta nets of a shape that orin-chat does not run.",
                "Choose another model.",
            )
        return Delta(
            qkv=self.weight(f"{prefix}attn_qkv", channels, dim),
            gate=self.weight(f"{prefix}attn_gate", values, dim),
            beta=self.weight(f"{prefix}ssm_beta", value_heads, dim),
            alpha=self.weight(f"{prefix}ssm_alpha", value_heads, dim),
            out=self.weight(f"{prefix}ssm_out", dim, values),
            conv=self.required(f"{prefix}ssm_conv1d.weight", channels, taps),
            decay=self.required(f"{prefix}ssm_a", value_heads),
            decay_bias=self.required(f"{prefix}{decay_bias}", value_heads),
            norm=self.required(f"{prefix}ssm_norm.weight", size),
            key_heads=key_heads, value_heads=value_heads, size=size, taps=taps,
        )  # fmt: skip

    def attend(self, i: int, prefix: str) -> Attend:
        dim, head_dim = self.dim, self.head_dim
        sizes = {"q": self.heads * head_dim, "k": self.kv_heads * head_dim, "v": self.kv_heads * head_dim}
        is_gated = self.family.gated_attention
        in_file = sizes | {"q": 2 * sizes["q"]} if is_gated else sizes
        firsts = {"q": 0, "k": in_file["q"], "v": in_file["q"] + in_file["k"]}
        fused = self.has(f"{prefix}attn_qkv.weight")

        def source(x: str) -> tuple[str, int, int]:
            """The tensor with these rows, the first of them, and the tensor's rows."""
            if fused:
                return f"{prefix}attn_qkv", firsts[x], sum(in_file.values())
            return f"{prefix}attn_{x}", 0, in_file[x]

        def projection(x: str) -> tuple[Weight, Vector | None]:
            tensor, first, of = source(x)
            order = self.order if x != "v" else None
            if x == "q" and is_gated:
                return self.weight(
                    tensor, sizes[x], dim, first, of, order, every=2 * head_dim, run=head_dim
                ), None
            weight = self.weight(tensor, sizes[x], dim, first, of, order)
            return weight, self.vector(f"{tensor}.bias", sizes[x], order, first, of)

        def gate() -> Weight | None:
            tensor, first, of = source("q")
            every, run = 2 * head_dim, head_dim
            return (
                self.weight(tensor, sizes["q"], dim, first + run, of, every=every, run=run)
                if is_gated
                else None
            )

        def norm(x: str) -> Vector | None:
            tensor = f"{prefix}attn_{x}_norm.weight"
            is_wide = self.has(tensor) and self.file.tensors[tensor].shape != (head_dim,)
            return self.vector(tensor, sizes[x] if is_wide else head_dim, self.order)

        (q, q_bias), (k, k_bias), (v, v_bias) = (projection(x) for x in "qkv")
        window = self.window(i)
        return Attend(
            q=q, k=k, v=v, o=self.weight(f"{prefix}attn_output", dim, sizes["q"]),
            q_bias=q_bias, k_bias=k_bias, v_bias=v_bias, o_bias=self.vector(f"{prefix}attn_output.bias", dim),
            q_norm=norm("q"), k_norm=norm("k"),
            heads=self.heads, kv_heads=self.kv_heads, head_dim=head_dim,
            rope=self.rope(i, window > 0 and self.family.plain_windows),
            scale=self.factor("attention.scale", self._default_scale()),
            window=window, sinks=self.vector(f"{prefix}attn_sinks.weight", self.heads), gate=gate(),
        )  # fmt: skip

    def _default_scale(self) -> float:
        if self.architecture == "gemma3" and self.layers == 62:  # 27B: LLM_TYPE_27B in gemma3.cpp
            return float((self.dim / self.heads) ** -0.5)
        return float(self.head_dim**-0.5)

    def feed_forward(self, prefix: str) -> Dense | Experts:
        return self.experts(prefix) if self.has(f"{prefix}ffn_gate_inp.weight") else self.dense(prefix)

    def dense(self, prefix: str, width: int = 0, suffix: str = "") -> Dense:
        """The feed-forward layer. Without ffn_gate, the rows of gate and then of up are one tensor (phi3)."""
        dim, width = self.dim, width or self.size("feed_forward_length")
        down = self.weight(f"{prefix}ffn_down{suffix}", dim, width)
        if self.has(f"{prefix}ffn_gate{suffix}.weight"):
            gate, up = (self.weight(f"{prefix}ffn_{x}{suffix}", width, dim) for x in ("gate", "up"))
        else:
            gate, up = (
                self.weight(f"{prefix}ffn_up{suffix}", width, dim, first, 2 * width) for first in (0, width)
            )
        return Dense(gate, up, down, self.family.activation)

    def experts(self, prefix: str) -> Experts:
        """A mixture of experts. Older files give the experts' width as feed_forward_length (olmoe). Of each expert, the
        rows of gate and then of up may be one tensor."""
        dim, count, used = self.dim, self.size("expert_count"), self.size("expert_used_count")
        if not count > 1 or used > count:
            raise damaged(self.file.path, f"it chooses {used} of {count} experts")
        has_width = self.key("expert_feed_forward_length") in self.file.metadata
        width = self.size("expert_feed_forward_length" if has_width else "feed_forward_length")

        def of_experts(x: str, rows: int, cols: int) -> tuple[Weight, Vector | None]:
            tensor = f"{prefix}ffn_{x}_exps"
            bias = self.vector(f"{tensor}.bias", rows, experts=count)
            return self.weight(tensor, rows, cols, experts=count), bias

        def half(first: int) -> tuple[Weight, None]:
            tensor, whole = f"{prefix}ffn_gate_up_exps", 2 * width
            return self.weight(tensor, width, dim, first, whole, experts=count, every=whole, run=width), None

        if self.has(f"{prefix}ffn_gate_up_exps.weight"):
            (gate, gate_bias), (up, up_bias) = half(0), half(width)
        else:
            (gate, gate_bias), (up, up_bias) = (of_experts(x, width, dim) for x in ("gate", "up"))
        down, down_bias = of_experts("down", dim, width)
        has_shared = self.has(f"{prefix}ffn_gate_inp_shexp.weight")
        shared_width = self.size("expert_shared_feed_forward_length", width)
        return Experts(
            router=self.weight(f"{prefix}ffn_gate_inp", count, dim),
            router_bias=self.vector(f"{prefix}ffn_gate_inp.bias", count),
            gate=gate, up=up, down=down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias,
            used=used, renormalised=self.family.renormalised, activation=self.family.activation,
            shared=self.dense(prefix, shared_width, "_shexp") if has_shared else None,
            shared_gate=self.weight(f"{prefix}ffn_gate_inp_shexp", 1, dim) if has_shared else None,
        )  # fmt: skip

    def window(self, i: int) -> int:
        """The window of layer i in tokens, 0 if it has none. `sliding_window_pattern` tells the layers that have one:
        booleans, or the number of layers of which the last has none."""
        every = self.family.full_attention_every
        if not every or not self.file.get(self.key("attention.sliding_window"), int, 0):
            return 0
        pattern = self.file.metadata.get(self.key("attention.sliding_window_pattern"), every)
        if isinstance(pattern, np.ndarray):
            if len(pattern) < self.layers:
                raise damaged(self.file.path, f"its pattern of windows has {len(pattern)} layers")
            has_window = bool(pattern[i])
        else:
            every = self.size("attention.sliding_window_pattern", every)
            has_window = i % every < every - 1
        return self.size("attention.sliding_window") if has_window else 0

    # --- rotary embedding ------------------------------------------------------------------------------

    @property
    def original_context(self) -> int:
        return self.size("rope.scaling.original_context_length", self.context)

    def rope(self, i: int, plain: bool) -> int:
        """The index of a layer's rotary embedding."""
        every = self.family.unrotated_every
        rope = self._unrotated if every and (i + 1) % every == 0 else self._rotation(plain)
        if rope not in self._ropes:
            self._ropes.append(rope)
        return self._ropes.index(rope)

    @property
    def _unrotated(self) -> Rope:
        return Rope(self.head_dim // 2)

    def _rotation(self, plain: bool) -> Rope:
        """`plain`: with the base of layers with a window, and no scaling (gemma3.cpp). Raises ModelFileError."""
        if plain:
            base, kind, scale = self.number("rope.freq_base_swa", 10_000.0), "none", 1.0
        else:
            base = self.number("rope.freq_base", 10_000.0)
            kind = self.file.get(self.key("rope.scaling.type"), str, "none")
            scale = self.number("rope.scaling.factor", 1.0)
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise ModelFileError(
                f"{self.name} uses RoPE scaling {printable(kind)}, which orin-chat does not run.",
                "Choose another model.",
            )
        whole, long = self._factors("rope_freqs"), self._factors("rope_factors_long")
        short = self._factors("rope_factors_short")
        magnitude = self.number("rope.scaling.attn_factor", 1.0)

        def frequencies(factors: NDArray[np.float32] | None) -> tuple[float, ...]:
            with np.errstate(all="ignore"):  # checked below
                rates = np.float64(base) ** (-np.arange(0, self.rotated, 2, dtype=np.float64) / self.rotated)
                if factors is not None and not plain:
                    rates = rates / factors
                if kind == "linear":
                    rates = rates / scale
                if kind == "yarn":
                    kept = self._yarn_share(base)
                    rates = rates * kept + rates / scale * (1 - kept)
            if not (np.isfinite(rates).all() and (rates > 0).all()):
                raise damaged(self.file.path, "its RoPE frequencies are not positive")
            return tuple(rates.tolist())

        if kind == "yarn":
            if scale <= 0:
                raise damaged(self.file.path, "its RoPE frequencies are not positive")
            log_multiplier = self.number("rope.scaling.yarn_log_multiplier", 0.0)
            magnitude *= (1 + 0.1 * math.log(scale)) / (1 + 0.1 * log_multiplier * math.log(scale))
        return Rope(
            pairs=self.head_dim // 2,
            frequencies=frequencies(whole if whole is not None else short),
            long_frequencies=frequencies(long) if long is not None and whole is None else (),
            short_context=self.original_context,
            magnitude=1.0 if plain else magnitude,
        )

    def _yarn_share(self, base: float) -> NDArray[np.float64]:
        """The share of each pair's frequency that yarn keeps: rope_yarn in ggml/src/ggml-cpu/ops.cpp, and
        ggml_rope_yarn_corr_dims in ggml/src/ggml.c."""
        dims, original = self.rotated, self.original_context

        def pair(turns: float) -> float:
            if not (turns > 0 and base > 1):
                raise damaged(self.file.path, "its RoPE scaling yarn has no bounds")
            return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(pair(self.number("rope.scaling.yarn_beta_fast", 32.0))))
        high = min(dims - 1, math.ceil(pair(self.number("rope.scaling.yarn_beta_slow", 1.0))))
        ramp = np.clip((np.arange(dims // 2) - low) / max(0.001, high - low), 0, 1)
        return np.asarray(1 - ramp, np.float64)

    def _factors(self, name: str) -> NDArray[np.float32] | None:
        """Divisors of the frequencies, float32 (rotated / 2,): freq_factors of ggml_rope_ext."""
        tensor = f"{name}.weight"
        if not self.has(tensor):
            return None
        info = self.file.tensors[tensor]
        if info.type != 0 or info.shape != (self.rotated // 2,):
            raise damaged(self.file.path, f"the shape or type of {tensor} does not fit its heads")
        self.used.add(tensor)
        return info.data.view(np.float32)
