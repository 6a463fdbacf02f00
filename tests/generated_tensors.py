"""The tensors of `generated_model`: random weights under the names that published files have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.generated_connections import add_connections, add_indexer, add_last_connection
from tests.generated_mixing import add_channel_mix, add_older_time_mix, add_time_mix
from tests.generated_parts import Parts

STREAMS, LOW_RANK = 4, 64  # as llama.cpp has them
Weights = Callable[[np.random.Generator, int, int, Type], Any]
"""As `generated_weights.random_matrix`."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. `kinds`: the letter of each layer, by `Parts.lone` or `Parts.partial`. `widths`: the hidden
    elements of each feed-forward layer. `kv_heads`: of each layer. The first `own` layers have matrices of keys and
    values."""

    layers: int
    vocab: int
    context: int
    dim: int
    heads: int
    head_dim: int
    rotated: int
    ffn: int
    kinds: Sequence[str]
    widths: Sequence[int]
    kv_heads: Sequence[int]
    own: int


class Tensors:
    """Adds the tensors of a model to a `writer`, in the order in which they are drawn from `rng`. `metadata`: without
    the architecture. `quant`: the type of each matrix, but of those in `types`, see `generated_model.write`."""

    def __init__(
        self,
        writer: gguf.GGUFWriter,
        architecture: str,
        parts: Parts,
        shape: Shape,
        metadata: Mapping[str, Any],
        quant: str,
        types: Mapping[str, str],
        rng: np.random.Generator,
        weights: Weights,
    ) -> None:
        self.writer, self.architecture, self.parts, self.shape = writer, architecture, parts, shape
        self.metadata, self.quant, self.types = metadata, quant, types
        self.rng, self.weights = rng, weights
        self._dim = shape.dim

    # --- tensors of one kind ------------------------------------------------------------------------------

    def type_of(self, name: str, usual: str = "") -> Type:
        own = (kind for pattern, kind in self.types.items() if re.fullmatch(pattern, name))
        return Type[next(own, usual or self.quant)]

    def matrix(self, name: str, rows: int, cols: int, usual: str = "") -> None:
        kind = self.type_of(name, usual)
        self.writer.add_tensor(f"{name}.weight", self.weights(self.rng, rows, cols, kind), raw_dtype=kind)
        if kind in (Type.NVFP4, Type.TQ2_0) and name != "token_embd":
            self.vector(f"{name}.scale", 1, 1.0)

    def matrices(self, name: str, count: int, rows: int, cols: int) -> None:
        """So many matrices in one tensor."""
        kind = self.type_of(name)
        data = np.stack([self.weights(self.rng, rows, cols, kind) for _ in range(count)])
        self.writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def numbers(self, name: str, data: np.ndarray) -> None:
        self.writer.add_tensor(name, data.astype(np.float32))

    def vector(self, name: str, size: int, mean: float, std: float = 0.1) -> None:
        self.numbers(name, mean + std * self.rng.standard_normal(size))

    def norm(self, name: str) -> None:
        if self.parts.layer_norms == "none" or self.parts.begin:
            return
        is_bare = self.parts.mamba_beside and name.endswith("ffn_norm")
        self.vector(name if is_bare else f"{name}.weight", self._dim, 1.0)
        if self.parts.layer_norms == "biases":
            self.vector(f"{name}.bias", self._dim, 0.0)

    def taps(self, name: str, channels: int, key: str) -> None:
        """Of a convolution."""
        self.numbers(name, self.weights(self.rng, channels, self.metadata[key], Type.F32))

    # --- the model ----------------------------------------------------------------------------------------

    def add_model(self, *, tied: bool, rope_factors: bool, classes: int, draft_head: bool) -> None:
        """See `generated_model.write`."""
        parts, shape, dim = self.parts, self.shape, self._dim
        self.matrix("token_embd", shape.vocab, dim)
        last = "enc.output_norm" if self.architecture == "neo-bert" else "output_norm"
        if parts.connections:
            add_last_connection(self)
        else:
            self.norm("token_embd_norm" if parts.conv or parts.normed_after else last)
        if parts.embedding_norm:
            self.norm("token_embd_norm")
        if parts.positions:
            self.matrix("position_embd", shape.context, dim, "F32")
        if parts.normed_after:
            self.matrix("token_types", 1, dim, "F32")
        if self.architecture in ("phi2", "phimoe"):
            self.vector("output.bias", shape.vocab, 0.0)
        if not tied:
            self.matrix("output", shape.vocab, dim)
        if classes:
            self.matrix("cls.output", classes, dim)
        factors = {"rope_freqs": 8} if rope_factors else {}
        factors |= {"rope_factors_long": 16, "rope_factors_short": 2} if self.architecture == "phi3" else {}
        for name, most in factors.items():
            self.numbers(f"{name}.weight", np.geomspace(1, most, shape.rotated // 2))
        if parts.streams:
            for name in "altup_proj", "altup_unembd_proj":
                self.matrices(name, STREAMS - 1, dim, dim)
        if parts.layers:
            size = self.metadata["embedding_length_per_layer_input"]
            self.matrix("per_layer_token_embd", shape.vocab, shape.layers * size)
            self.matrix("per_layer_model_proj", shape.layers * size, dim)
            self.vector("per_layer_proj_norm.weight", size, 1.0)
        for layer in range(shape.layers):
            self.layer(layer, f"blk.{layer}.")
        if draft_head:
            self.draft_head()

    def draft_head(self) -> None:
        """A layer with attention, and what makes its input."""
        at, shape = self.shape.layers, self.shape
        self.norm(f"blk.{at}.attn_norm")
        self.attention(f"blk.{at}.", shape.head_dim, shape.kv_heads[-1], has_keys=True, has_values=True)
        self.norms_of_feed_forward(f"blk.{at}.")
        self.feed_forward(at, f"blk.{at}.", shape.ffn)
        prefix = f"blk.{at}.nextn."
        self.matrix(prefix + "eh_proj", self._dim, 2 * self._dim)
        for name in "enorm", "hnorm", "shared_head_norm":
            self.vector(f"{prefix}{name}.weight", self._dim, 1.0)

    def layer(self, layer: int, prefix: str) -> None:
        parts, kind = self.parts, self.shape.kinds[layer]
        if parts.connections:
            add_connections(self, layer, prefix)
        elif parts.norms_before and not parts.normed_after and kind != "F":
            self.norm(parts.first_norm if parts.first_norm and not layer else prefix + "attn_norm")
        self.operator(layer, prefix)
        if parts.mamba_beside:
            self.mamba(prefix)
        if kind == "A" or (parts.lone and kind != "E"):
            return  # has no feed-forward layer
        if parts.mixing and parts.layer_norms:
            add_channel_mix(self, prefix, self.shape.widths[layer])
            return
        if not parts.connections:
            self.norms_of_feed_forward(prefix)
        if parts.scaled or parts.begin:
            self.vector(prefix + "layer_output_scale.weight", 1, 0.7)
        if parts.begin:
            self.numbers(prefix + "attn_q_norm.weight", 1 + 0.3 * self.rng.random((self.shape.heads, 1)))
            for name in "attn_output", "ffn_down":
                self.vector(f"{prefix}{name}.scale", 1, 1.3)
        if parts.layers:
            size = self.metadata["embedding_length_per_layer_input"]
            self.matrix(prefix + "inp_gate", size, self._dim)
            self.matrix(prefix + "proj", self._dim, size)
            self.vector(prefix + "post_norm.weight", self._dim, 1.0)
        if parts.streams:
            self.streams(prefix)
        self.feed_forward(layer, prefix, self.shape.widths[layer])

    def operator(self, layer: int, prefix: str) -> None:
        """What comes before the feed-forward layer, if anything does."""
        parts, kind, is_even = self.parts, self.shape.kinds[layer], layer % 2 == 0
        if parts.mixing and parts.older:
            add_older_time_mix(self, prefix)
        elif parts.mixing:
            add_time_mix(self, layer, prefix)
        elif parts.lone:
            if kind == "M":
                (self.scan if parts.scan else self.mamba)(prefix)
            elif kind == "*":
                self.mixing(layer, prefix)
        elif parts.delta and (layer + 1) % self.metadata["full_attention_interval"]:
            self.delta_net(prefix)
        elif parts.keyed and is_even:
            self.keyed_delta_net(prefix)
        elif parts.conv and is_even:
            self.short_conv(f"{prefix}shortconv.")
        elif parts.scan and is_even:
            (self.head_scan if parts.head_scan else self.scan)(prefix)
        elif parts.mamba and is_even and not parts.mamba_beside:
            self.mamba(prefix)
        elif kind != "F":
            self.mixing(layer, prefix)

    def norms_of_feed_forward(self, prefix: str) -> None:
        parts = self.parts
        if parts.normed_after:
            self.norm(prefix + "attn_output_norm")
            self.norm(prefix + "layer_output_norm")
        elif parts.norms_before and not parts.lone and not parts.feed_forward.endswith("beside"):
            usual = "attn_output_norm" if self.architecture == "dbrx" else "ffn_norm"
            self.norm(prefix + ("post_attention_norm" if parts.renamed else usual))
        if parts.norms_after:
            suffix = "" if self.architecture.startswith("plamo") else ".weight"
            for name in "post_attention_norm", "post_ffw_norm":
                self.vector(f"{prefix}{name}{suffix}", self._dim, 1.0)

    # --- attention ----------------------------------------------------------------------------------------

    def mixing(self, layer: int, prefix: str) -> None:
        """Attention of the kind that the layer has."""
        add_indexer(self, layer, prefix)
        if self.parts.latent:
            return self.latent_attention(prefix)
        head_dim, has_window = self.shape.head_dim, False
        of_layers = self.metadata.get("attention.sliding_window_pattern")
        if isinstance(of_layers, list) and of_layers[layer]:
            head_dim, has_window = self.metadata.get("attention.key_length_swa", head_dim), True
        has_keys = layer < self.shape.own
        has_values = has_keys and (has_window or not self.parts.beside)
        self.attention(prefix, head_dim, self.shape.kv_heads[layer], has_keys, has_values)

    def attention(self, prefix: str, head_dim: int, kv_heads: int, has_keys: bool, has_values: bool) -> None:
        parts, heads, dim = self.parts, self.shape.heads, self._dim
        values = head_dim * self.metadata["attention.value_length"] // self.shape.head_dim
        rows = {"attn_q": heads * head_dim}
        if has_keys:
            rows["attn_k"] = kv_heads * head_dim
        if has_values:
            rows["attn_v"] = kv_heads * values
        in_file = {"attn_qkv": sum(rows.values())} if parts.fused else rows
        for name, n in in_file.items():
            self.matrix(prefix + name, 2 * n if parts.delta and name == "attn_q" else n, dim)
        self.matrix(prefix + "attn_output", dim, heads * values)
        if parts.gated:
            self.matrix(prefix + "attn_gate", heads if parts.gated == "heads" else heads * head_dim, dim)
        if parts.biases:
            for name, n in in_file.items():
                self.vector(f"{prefix}{name}.bias", n, 0.0)
            if parts.biases in ("all", "qkvo"):
                self.vector(f"{prefix}attn_output.bias", dim, 0.0)
        if parts.sub_norms:
            self.vector(f"{prefix}attn_sub_norm.weight", heads * head_dim, 1.0)
        if parts.sinks:
            self.vector(f"{prefix}attn_sinks.weight", heads, 1.0, 1.0)
        if parts.norms:
            for name in (name for name in rows if name != "attn_v"):
                self.head_norm(f"{prefix}{name}_norm.weight", rows[name], head_dim, name == "attn_q")

    def head_norm(self, name: str, rows: int, head_dim: int, is_query: bool) -> None:
        """A norm of queries or keys."""
        if self.parts.norms == "heads":
            self.numbers(name, 1 + 0.1 * self.rng.standard_normal((rows // head_dim, head_dim)))
            return
        mean = 0.2 if (self.parts.scaled or self.parts.streams) and is_query else 1.0
        self.vector(name, head_dim if self.parts.norms == "head" else rows, mean)

    def latent_attention(self, prefix: str) -> None:
        metadata, heads, dim = self.metadata, self.shape.heads, self._dim
        latent, q_width = metadata["attention.kv_lora_rank"], metadata.get("attention.q_lora_rank")
        whole, values = (
            metadata.get(f"attention.{x}_length_mla", metadata[f"attention.{x}_length"])
            for x in ("key", "value")
        )
        plain = whole - self.shape.rotated
        if q_width:
            self.matrix(prefix + "attn_q_a", q_width, dim)
            self.vector(prefix + "attn_q_a_norm.weight", q_width, 1.0)
        self.matrix(prefix + ("attn_q_b" if q_width else "attn_q"), heads * whole, q_width or dim)
        self.matrix(prefix + "attn_kv_a_mqa", latent + self.shape.rotated, dim)
        self.vector(prefix + "attn_kv_a_norm.weight", latent, 1.0)
        if self.parts.latent == "together":
            self.matrix(prefix + "attn_kv_b", heads * (plain + values), latent)
        else:
            self.matrices(prefix + "attn_k_b", heads, latent, plain)
            self.matrices(prefix + "attn_v_b", heads, values, latent)
        if self.parts.gated:
            self.matrix(prefix + "attn_gate", heads, dim)
        self.matrix(prefix + "attn_output", dim, heads * values)

    # --- layers with a state ------------------------------------------------------------------------------

    def delta_net(self, prefix: str) -> None:
        size, values = self.metadata["ssm.state_size"], self.metadata["ssm.time_step_rank"]
        channels = (2 * self.metadata["ssm.group_count"] + values) * size
        self.matrix(prefix + "attn_qkv", channels, self._dim)
        self.matrix(prefix + "attn_gate", values * size, self._dim)
        # many published files hold these as floats
        small = {"ba": 2 * values} if self.parts.fused_delta else {"beta": values, "alpha": values}
        for name, rows in small.items():
            self.matrix(f"{prefix}ssm_{name}", rows, self._dim, "F32")
        self.matrix(prefix + "ssm_out", self._dim, values * size)
        self.taps(prefix + "ssm_conv1d.weight", channels, "ssm.conv_kernel")
        self.numbers(prefix + "ssm_a", -self.rng.uniform(0.2, 4, values))
        self.vector(prefix + "ssm_dt.bias", values, -3.0, 1.0)
        self.vector(prefix + "ssm_norm.weight", size, 1.0)

    def keyed_delta_net(self, prefix: str) -> None:
        heads, size, dim = self.shape.heads, self.metadata["kda.head_dim"], self._dim
        width, is_bounded = heads * size, "kda.gate_lower_bound" in self.metadata
        for x in "qkv":
            self.matrix(f"{prefix}attn_{x}", width, dim)
            self.numbers(
                f"{prefix}ssm_conv1d_{x}.weight",
                self.weights(self.rng, width, self.metadata["ssm.conv_kernel"], Type.F32).reshape(
                    1, width, 1, -1
                ),
            )
        for x in "fg":
            self.matrix(f"{prefix}ssm_{x}_a", width if is_bounded else size, dim, "F32")
            if not is_bounded:
                self.matrix(f"{prefix}ssm_{x}_b", width, size, "F32")
        self.matrix(prefix + "ssm_beta", heads, dim, "F32")
        rates = self.rng.uniform(0.2, 4, (heads, 1))
        self.numbers(prefix + "ssm_a", rates if is_bounded else -rates)
        self.vector(prefix + "ssm_dt.bias", width, -3.0, 1.0)
        self.vector(prefix + "ssm_norm.weight", size, 1.0)
        self.matrix(prefix + "attn_output", dim, width)

    def mamba(self, prefix: str) -> None:
        state_size, groups, heads, width = (
            self.metadata[f"ssm.{key}"]
            for key in ("state_size", "group_count", "time_step_rank", "inner_size")
        )
        channels = width + 2 * groups * state_size
        self.matrix(prefix + "ssm_in", width + channels + heads, self._dim)
        self.matrix(prefix + "ssm_out", self._dim, width)
        self.taps(prefix + "ssm_conv1d.weight", channels, "ssm.conv_kernel")
        self.vector(prefix + "ssm_conv1d.bias", channels, 0.0)
        self.numbers(prefix + "ssm_a", -self.rng.uniform(0.2, 4, (heads, 1)))
        self.vector(prefix + "ssm_dt.bias", heads, -3.0, 1.0)
        self.numbers(prefix + "ssm_d", self.rng.standard_normal((heads, 1)))
        self.numbers(
            prefix + "ssm_norm.weight", 1 + 0.1 * self.rng.standard_normal((groups, width // groups))
        )

    def head_scan(self, prefix: str) -> None:
        width, size, heads = (
            self.metadata[f"ssm.{key}"] for key in ("inner_size", "state_size", "time_step_rank")
        )
        rank = max(64, self._dim // 16)
        self.matrix(prefix + "ssm_in", 2 * width, self._dim)
        self.matrix(prefix + "ssm_x", rank + 2 * size, width)
        self.matrix(prefix + "ssm_dt", heads, rank)
        self.matrix(prefix + "ssm_out", self._dim, width)
        self.taps(prefix + "ssm_conv1d.weight", width, "ssm.conv_kernel")
        self.vector(prefix + "ssm_dt.bias", heads, -3.0, 1.0)
        self.numbers(prefix + "ssm_a", -self.rng.uniform(0.2, 4, heads))
        self.vector(prefix + "ssm_d", heads, 0.0, 1.0)
        for name, n in ("dt", rank), ("b", size), ("c", size):
            self.vector(f"{prefix}ssm_{name}_norm", n, 1.0)

    def scan(self, prefix: str) -> None:
        width, size, rank = (
            self.metadata[f"ssm.{key}"] for key in ("inner_size", "state_size", "time_step_rank")
        )
        self.matrix(prefix + "ssm_in", 2 * width, self._dim)
        self.matrix(prefix + "ssm_x", rank + 2 * size, width)
        self.matrix(prefix + "ssm_dt", width, rank, "F32")
        self.matrix(prefix + "ssm_out", self._dim, width)
        self.taps(prefix + "ssm_conv1d.weight", width, "ssm.conv_kernel")
        self.vector(prefix + "ssm_conv1d.bias", width, 0.0)
        self.vector(prefix + "ssm_dt.bias", width, -3.0, 1.0)
        self.numbers(prefix + "ssm_a", -self.rng.uniform(0.2, 4, (width, size)))
        self.vector(prefix + "ssm_d", width, 0.0, 1.0)
        if not self.parts.lone:
            for name, n in ("dt", rank), ("b", size), ("c", size):
                self.vector(f"{prefix}ssm_{name}_norm.weight", n, 1.0)

    def short_conv(self, prefix: str) -> None:
        self.taps(prefix + "conv.weight", self._dim, "shortconv.l_cache")
        self.matrix(prefix + "in_proj", 3 * self._dim, self._dim)
        self.matrix(prefix + "out_proj", self._dim, self._dim)

    # --- feed-forward layers ------------------------------------------------------------------------------

    def feed_forward(self, layer: int, prefix: str, width: int) -> None:
        """The experts of a layer, or its matrices of so many hidden elements, or both."""
        if not self.has_experts(layer):
            return self.dense(prefix, width)
        self.experts(prefix)
        if self.parts.beside:
            self.vector(prefix + "ffn_gate_inp.scale", self._dim, self._dim**0.5)
            self.vector(prefix + "ffn_down_exps.scale", self.parts.experts, 1.0)
            for name in "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2":
                self.vector(f"{prefix}{name}.weight", self._dim, 1.0)
            self.dense(prefix, width)

    def has_experts(self, layer: int) -> bool:
        if not self.parts.experts:
            return False
        if self.parts.normed_after:
            return layer % 2 == 1
        is_dense = layer < self.metadata.get("leading_dense_block_count", 0)
        return not is_dense and (layer + 1) % self.parts.every_expert == 0

    def experts(self, prefix: str) -> None:
        """A router, and matrices for each expert."""
        parts, dim, n = self.parts, self._dim, self.parts.experts
        inner = self.metadata.get("moe_latent_size", dim)
        if inner != dim:
            self.matrix(f"{prefix}ffn_latent_down", inner, dim)
            self.matrix(f"{prefix}ffn_latent_up", dim, inner)
        width = self.metadata.get("expert_feed_forward_length", self.shape.ffn)
        router = 2 * self.weights(self.rng, n, dim, Type.F32)  # some are much more probable than others
        kind = self.type_of(f"{prefix}ffn_gate_inp", "F32")
        data = router if kind is Type.F32 else gguf.quantize(router, kind)
        self.writer.add_tensor(f"{prefix}ffn_gate_inp.weight", data, raw_dtype=kind)
        has_biases, is_gated = (
            parts.biases == "all" and not parts.normed_after,
            parts.feed_forward != "ungated",
        )
        rows = (
            {"gate_up": 2 * width}
            if parts.beside
            else {"gate": width, "up": width}
            if is_gated
            else {"up": width}
        )
        for name, n_rows, cols in *((name, r, inner) for name, r in rows.items()), ("down", inner, width):
            self.matrices(f"{prefix}ffn_{name}_exps", n, n_rows, cols)
            if self.type_of(f"{prefix}ffn_{name}_exps") is Type.NVFP4:
                self.vector(f"{prefix}ffn_{name}_exps.scale", n, 1.0)
            if has_biases:
                self.numbers(f"{prefix}ffn_{name}_exps.bias", 0.2 * self.rng.standard_normal((n, n_rows)))
        if has_biases:
            self.vector(f"{prefix}ffn_gate_inp.bias", n, 0.0, 0.5)
        if parts.choice_bias:
            suffix = "" if self.architecture == "hy_v3" else ".bias"
            self.vector(f"{prefix}exp_probs_b{suffix}", n, 0.0, 0.2)
        if parts.shared:
            self.shared_expert(prefix, width, is_gated)

    def shared_expert(self, prefix: str, width: int, is_gated: bool) -> None:
        """`width`: that of the other experts."""
        width = self.metadata.get("expert_shared_feed_forward_length", width)
        width *= self.metadata.get("expert_shared_count", 1)
        if not self.parts.ungated:
            self.vector(f"{prefix}ffn_gate_inp_shexp.weight", self._dim, 0.0, self._dim**-0.5)
        if is_gated:
            self.matrix(f"{prefix}ffn_gate_shexp", width, self._dim)
        self.matrix(f"{prefix}ffn_up_shexp", width, self._dim)
        self.matrix(f"{prefix}ffn_down_shexp", self._dim, width)

    def dense(self, prefix: str, width: int) -> None:
        parts, dim = self.parts, self._dim
        if parts.feed_forward.startswith("ungated"):
            self.matrix(prefix + "ffn_up", width, dim)
            if parts.biases == "all":
                self.vector(prefix + "ffn_up.bias", width, 0.0)
                self.vector(prefix + "ffn_down.bias", dim, 0.0)
        elif parts.feed_forward == "gated biases":
            for name in "gate", "up":
                self.matrix(f"{prefix}ffn_{name}", width, dim)
                self.vector(f"{prefix}ffn_{name}.bias", width, 0.0)
            self.vector(prefix + "ffn_down.bias", dim, 0.0)
        elif parts.fused and not (parts.experts or parts.normed_after or parts.halved):
            self.matrix(prefix + "ffn_up", 2 * width, dim)
        else:
            self.matrix(prefix + "ffn_gate", width, dim)
            self.matrix(prefix + "ffn_up", width, dim)
            if self.architecture == "jina-bert-v2":
                self.vector(prefix + "ffn_down.bias", dim, 0.0)
        if parts.sub_norms:
            self.vector(f"{prefix}ffn_sub_norm.weight", width, 1.0)
        self.matrix(prefix + "ffn_down", dim, width)

    # --- streams ------------------------------------------------------------------------------------------

    def streams(self, prefix: str) -> None:
        """What mixes them (AltUp), and the matrix of a low rank beside attention."""
        dim = self._dim
        self.matrix(prefix + "altup_router", STREAMS, dim, "F32")
        self.vector(prefix + "altup_router_norm.weight", dim, dim / 2)
        self.vector(prefix + "altup_correct_scale.weight", dim, 1.0)
        for name, rows in ("predict", STREAMS**2), ("correct", STREAMS):
            coefficients = 0.3 * self.weights(self.rng, rows, STREAMS, Type.F32)
            self.numbers(f"{prefix}altup_{name}_coef.weight", coefficients)
        self.matrix(prefix + "laurel_l", LOW_RANK, dim)
        self.matrix(prefix + "laurel_r", dim, LOW_RANK)
        self.vector(prefix + "laurel_post_norm.weight", dim, 1.0)
