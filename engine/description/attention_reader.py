"""The attention of a model's layers, read from a file."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from engine.description.families import Family
from engine.description.head_reader import AttentionHeads, HeadReader
from engine.description.latent_reader import is_latent, read_latent_attention
from engine.description.sublayers import Attention, Vector, Weight
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged


class AttentionReader(HeadReader):
    """Reads attention, also of the draft layers, which follow the others. All methods raise ModelFileError."""

    def __init__(self, file: GGUF, architecture: str, family: Family) -> None:
        super().__init__(file, architecture, family)
        self.draft_layers = self.last_layers("nextn_predict_layers")
        self.layers -= self.draft_layers
        if self.draft_layers < 0 or self.layers < 1:
            raise damaged(self.file.path, f"{self.draft_layers} of its layers are draft layers")
        self.shared_caches = self.last_layers("attention.shared_kv_layers")
        """So many layers, the last ones, read the KV cache of another."""
        if not 0 <= self.shared_caches < self.layers:
            raise damaged(self.file.path, f"{self.shared_caches} of its layers share a KV cache")
        self.layer_embedding = self.file.get(self.key("embedding_length_per_layer_input"), int, 0)
        """Elements of what a token gives each layer, 0 if nothing."""

    @property
    def both_ways(self) -> bool:
        return not self.file.get(self.key("attention.causal"), bool, not self.family.both_ways)

    def last_layers(self, key: str) -> int:
        """How many of the last layers are of a kind, 0 if the file does not say it."""
        return self.file.get(self.key(key), int, 0)

    @functools.cached_property
    def has_windows(self) -> bool:
        return any(self.window(i) for i in range(self.layers))

    def attend(self, i: int, prefix: str) -> Attention:
        if is_latent(self, prefix):
            return read_latent_attention(self, i, prefix)
        window = self.window(i)
        # glm4: files of models that see pictures have the rows in the other order (use_mrope in llama-hparams.cpp).
        interleaved = self.family.interleaved and not any(self.sections())
        heads = self.heads(i, window > 0, interleaved)
        dim, head_dim, kv_size = self.dim, heads.dim, heads.kv * heads.dim
        sizes = {"q": heads.count * head_dim, "k": kv_size, "v": kv_size}
        is_gated, is_rotated = self.family.gated_attention, self.is_rotated(i, window)
        q_norm = self.file.tensors.get(f"{prefix}attn_q_norm.weight")
        has_layer_norms = self.family.layer_norms and q_norm is not None and len(q_norm.shape) > 1
        has_unit_norms = self.family.unit_norms and is_rotated and not self.is_unnormed
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
            order = heads.order if x != "v" else None
            if x == "q" and is_gated:
                return self.weight(
                    tensor, sizes[x], dim, first, of, order, every=2 * head_dim, run=head_dim
                ), None
            weight = self.weight(tensor, sizes[x], dim, first, of, order)
            return weight, self.vector(f"{tensor}.bias", sizes[x], order, first, of)

        def gate() -> Weight | None:
            if info := self.file.tensors.get(f"{prefix}attn_gate.weight"):
                rows = heads.count if info.shape[0] == heads.count else sizes["q"]
                return self.weight(f"{prefix}attn_gate", rows, dim)
            tensor, first, of = source("q")
            every, run = 2 * head_dim, head_dim
            return (
                self.weight(tensor, sizes["q"], dim, first + run, of, every=every, run=run)
                if is_gated
                else None
            )

        def norm(x: str) -> Vector | None:
            if has_unit_norms:
                return Vector("", head_dim)
            tensor = f"{prefix}attn_{x}_norm.weight"
            if has_layer_norms and self.has(tensor):
                norm = self.required(tensor, sizes[x] // head_dim, head_dim)
                return replace(norm, order=heads.order)
            is_over_heads = self.has(tensor) and self.file.tensors[tensor].shape != (head_dim,)
            return self.vector(tensor, sizes[x] if is_over_heads else head_dim, heads.order)

        q, q_bias = projection("q")
        of, has_values = self.cache_of(i, window), fused or self.has(f"{prefix}attn_v.weight")
        k, k_bias = projection("k") if of is None else (None, None)
        v, v_bias = projection("v") if of is None and has_values else (None, None)
        if of is not None:  # the file may have what is not needed
            self.used.update(f"{prefix}attn_{x}.weight" for x in ("k", "v", "k_norm"))
        if k and not v and heads.order:
            raise ModelFileError(
                f"{self.name} has keys as values, in an order that orin-chat does not run.",
                "Choose another model.",
            )
        scale = 1.0 if self.family.unscaled_attention else self._default_scale(heads)
        return Attention(
            q=q, k=k, v=v, o=self.weight(f"{prefix}attn_output", dim, sizes["q"]),
            q_bias=q_bias, k_bias=k_bias, v_bias=v_bias, o_bias=self.vector(f"{prefix}attn_output.bias", dim),
            q_norm=norm("q"), k_norm=norm("k") if k else None,
            heads=heads.count, kv_heads=heads.kv, head_dim=head_dim,
            rope=self.rope(
                heads,
                is_rotated,
                window > 0 and self.family.plain_windows,
                self.family.grid,
            ),
            sees_pictures=self.sees_pictures(window),
            both_ways=self.both_ways,
            scale=self.factor("attention.scale", scale),
            window=window, sinks=self.vector(f"{prefix}attn_sinks.weight", heads.count), gate=gate(), cache_of=of,
            has_normed_values=self.family.normed_values,
            softcap=self.number("attn_logit_softcapping", cap) if (cap := self.family.score_cap) else 0.0,
            rotates_first=self.family.rotates_first,
            chunked=self.family.chunked and window > 0,
            tempered=self.family.tempered_full is None or window == 0,
            slopes=self.slopes(heads.count),
            limit=self.number("attention.clamp_kqv", 0.0),
            layer_norms=has_layer_norms,
            result_norm=self.vector(f"{prefix}attn_sub_norm.weight", sizes["q"]),
            gating="softplus" if self.family.softplus_gates else "sigmoid",
        )  # fmt: skip

    @property
    def distance_bias(self) -> float:
        """By how much the scores of the first head fall with the distance of tokens, as a power of 2, 0 if not."""
        unsaid = self.family.distance_bias if self.family.biased_layers in (0, self.layers) else 0.0
        return self.number("attention.max_alibi_bias", unsaid)

    def slopes(self, heads: int) -> tuple[float, ...]:
        """See `Attention`: those of as many heads as the largest power of 2 allows, and then those between them
        (ggml_soft_max_ext)."""
        if not (most := self.distance_bias):
            return ()
        even = 1 << (heads.bit_length() - 1)
        steps = [(i + 1) / even if i < even else (2 * (i - even) + 1) / (2 * even) for i in range(heads)]
        return tuple(2.0 ** (-most * step) for step in steps)

    @property
    def is_unnormed(self) -> bool:
        """Whether it is the model of a family that has no unit norms."""
        return self.file.get(self.key("expert_count"), int, 0) == self.family.unnormed_experts

    def is_rotated(self, i: int, window: int) -> bool:
        """Whether layer i has rotary embeddings."""
        pattern = self.file.metadata.get(self.key("attention.rope_pattern"))
        if self.distance_bias:
            return False
        if isinstance(pattern, np.ndarray) and i < len(pattern):
            return bool(pattern[i])
        if self.family.unrotated_full:
            dense = self.file.get(self.key("leading_dense_block_count"), int, 0)
            return window > 0 or not self.has_windows or (self.family.rotates_dense and i < dense)
        if (
            not self.file.get(self.key("rope.scaling.finetuned"), bool, True)
            and self.family.recurrent == "mamba"
        ):
            return False  # Granite 4 hybrids
        every = self.family.unrotated_every
        return not every or (i + 1) % every != 0

    def sees_pictures(self, window: int) -> bool:
        """See `Attention`. Gemma 4's small models, which have embeddings of layers, look back alone."""
        if self.layer_embedding or self.family.sees_pictures == "no layer":
            return False
        return self.family.sees_pictures == "all layers" or window > 0

    def cache_of(self, i: int, window: int) -> int | None:
        """The layer whose KV cache layer i reads, None if it has its own: the last one of these that has a window too,
        or none (gemma4.cpp)."""
        own = self.layers - self.shared_caches
        if i < own or i >= self.layers:
            return None
        of = own - (2 if window else 1)
        if of < 0 or self.window(of) != window:
            raise damaged(self.file.path, f"layer {i} shares the KV cache of none")
        return of

    def _default_scale(self, heads: AttentionHeads) -> float:
        if self.family.scaled_by_size:
            return 1 / heads.dim
        if self.layers == self.family.scored_by_width:
            return float((self.dim / heads.count) ** -0.5)
        return float(heads.dim**-0.5)

    def window(self, i: int) -> int:
        """The window of layer i in tokens, 0 if it has none. `sliding_window_pattern` tells the layers that have one:
        booleans, or the number of layers of which the last has none."""
        every = self.family.full_attention_every
        unsaid = self.family.window
        if not every or not self.file.get(self.key("attention.sliding_window"), int, unsaid):
            return 0
        pattern = self.file.metadata.get(self.key("attention.sliding_window_pattern"), every)
        if isinstance(pattern, np.ndarray):
            if len(pattern) < self.layers:
                raise damaged(self.file.path, f"its pattern of windows has {len(pattern)} layers")
            has_window = i < len(pattern) and bool(pattern[i])
        else:
            every = self.size("attention.sliding_window_pattern", every)
            has_window = i % every > 0 if self.family.full_attention_first else i % every < every - 1
        window = self.size("attention.sliding_window", unsaid) if has_window else 0
        return window // 2 + 1 if window and self.both_ways else window
