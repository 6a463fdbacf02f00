"""The attention of a model's layers, read from a file."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from engine.description.attention import Attention, Indexer
from engine.description.families import Family
from engine.description.head_reader import MAX_HEAD, AttentionHeads, HeadReader
from engine.description.latent_reader import is_latent, read_latent_attention
from engine.description.sublayers import Vector, Weight
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged
from engine.formats.rope_order import HeadOrder


class AttentionReader(HeadReader):
    """Reads attention, also of the draft layers, which follow the others. All methods raise ModelFileError."""

    def __init__(self, file: GGUF, architecture: str, family: Family) -> None:
        super().__init__(file, architecture, family)
        self.draft_layers = self.last_layers("nextn_predict_layers")
        self.layers -= self.draft_layers
        if self.draft_layers < 0 or self.layers < 1:
            raise damaged(self.file.path, f"{self.draft_layers} of its layers are draft layers")
        self.shared_caches = self.last_layers("attention.shared_kv_layers")
        """How many layers read the KV cache of another one: the last ones."""
        if not 0 <= self.shared_caches < self.layers:
            raise damaged(self.file.path, f"{self.shared_caches} of its layers share a KV cache")
        is_hashed = self.key("ple.layers") in file.metadata  # which says its own size by this key
        size = self.file.get(self.key("embedding_length_per_layer_input"), int, 0)
        self.layer_embedding = 0 if is_hashed else size
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
        """The attention of layer i, the names of whose tensors begin with `prefix`."""
        if is_latent(self, prefix):
            return read_latent_attention(self, i, prefix)
        window = self.window(i)
        # glm4: files of models that see pictures have the rows in the other order (use_mrope in llama-hparams.cpp).
        interleaved = self.family.interleaved and not any(self.sections())
        heads, is_rotated = self.heads(i, window > 0, interleaved), self.is_rotated(i, window)
        tensors = _Tensors(self, prefix, heads, is_rotated)
        q, q_bias = tensors.projection("q")
        of = self.cache_of(i, window)
        k, k_bias = tensors.projection("k") if of is None else (None, None)
        v, v_bias = tensors.projection("v") if of is None and tensors.has_values else (None, None)
        if of is not None:  # the file may have what is not needed
            self.used.update(f"{prefix}attn_{x}.weight" for x in ("k", "v", "k_norm"))
        if k and not v and heads.order:
            raise ModelFileError(
                f"{self.name} has keys as values, in an order that orin-chat does not run.",
                "Choose another model.",
            )
        if k and not v and heads.values != heads.dim:
            raise damaged(self.file.path, f"its keys are values, in heads of {heads.values} elements")
        scale = 1.0 if self.family.unscaled_attention else self._default_scale(heads)
        return Attention(
            q=q, k=k, v=v, o=self.weight(f"{prefix}attn_output", self.dim, heads.count * heads.values),
            q_bias=q_bias, k_bias=k_bias, v_bias=v_bias, o_bias=self.vector(f"{prefix}attn_output.bias", self.dim),
            q_norm=tensors.norm("q"), k_norm=tensors.norm("k") if k else None,
            heads=heads.count, kv_heads=heads.kv, head_dim=heads.dim,
            rope=self.rope(heads, is_rotated, window > 0 and self.family.plain_windows, self.family.grid),
            sees_pictures=self.sees_pictures(window),
            both_ways=self.both_ways,
            scale=self.factor("attention.scale", scale),
            window=window, sinks=self.vector(f"{prefix}attn_sinks.weight", heads.count), gate=tensors.gate(),
            cache_of=of,
            has_normed_values=self.family.normed_values,
            softcap=self.number("attn_logit_softcapping", cap) if (cap := self.family.score_cap) else 0.0,
            rotates_first=self.family.rotates_first,
            chunked=self.family.chunked and window > 0,
            tempered=self.family.tempered_full is None or window == 0,
            slopes=self.slopes(heads.count),
            limit=self.number("attention.clamp_kqv", 0.0),
            own_norms=tensors.has_own_norms, layer_norms=tensors.has_own_norms and self.family.layer_norms,
            result_norm=self.vector(f"{prefix}attn_sub_norm.weight", tensors.sizes["q"]),
            value_factor=self.number("attention.value_scale", 1.0) or 1.0,
            gating="softplus" if self.family.softplus_gates else "sigmoid",
            indexer=self.indexer(i, prefix, heads),
        )  # fmt: skip

    @property
    def reads_all_to(self) -> int:
        """See `ModelSpec`: the tokens that indexers of other kinds than `Indexer` choose."""
        if not self.family.chooses_tokens:
            return 0
        return self.size("attention.indexer.top_k") * self.size("attention.indexer.block_size", 1)

    def indexer(self, i: int, prefix: str, attended: AttentionHeads) -> Indexer | None:
        """What chooses the tokens that the attention of layer i reads. Without blocks, it reads all of them."""
        if self.family.chooses_tokens or not self.has(f"{prefix}indexer.q_proj.weight"):
            return None
        count, size = (self.size(f"attention.indexer.{key}") for key in ("head_count", "key_length"))
        order = HeadOrder(size, attended.rotated, interleaved=False)
        if size % 2 or not attended.rotated <= size <= MAX_HEAD:
            raise damaged(self.file.path, f"its indexer has heads of {size} elements")
        heads = AttentionHeads(count, 1, size, attended.rotated, None if order.is_engines else order)
        blocks = self.file.metadata.get(self.key("attention.compress_ratios"))
        if isinstance(blocks, np.ndarray):
            blocks = blocks[i] if i < len(blocks) else 0
        block = int(blocks) if isinstance(blocks, int | np.integer) else 0
        top = self.size("attention.indexer.top_k")

        def norm(x: str) -> Vector:
            return replace(self.required(f"{prefix}indexer.{x}_norm.weight", size), order=heads.order)

        found = Indexer(
            q=self.weight(f"{prefix}indexer.q_proj", count * size, self.dim, order=heads.order),
            k=self.weight(f"{prefix}indexer.k_proj", size, self.dim, order=heads.order),
            q_norm=norm("q"), k_norm=norm("k"), heads=count, size=size,
            rope=self.rope(heads, True, False, self.family.grid), top=top, block=block,
        )  # fmt: skip
        if block < 0 or (block and top % block):
            raise ModelFileError(
                f"{self.name} chooses {top} tokens in blocks of {block}, which orin-chat does not run.",
                "Choose another model.",
            )
        return found if block else None

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


class _Tensors:
    """Where a file has the matrices and the norms of a layer's attention. Queries, keys and values (q, k, v) are three
    tensors or one, and a gate may lie among the queries. All methods raise ModelFileError."""

    def __init__(self, reader: AttentionReader, prefix: str, heads: AttentionHeads, is_rotated: bool) -> None:
        self._reader, self._prefix, self._heads = reader, prefix, heads
        self.sizes = {"q": heads.count * heads.dim, "k": heads.kv * heads.dim, "v": heads.kv * heads.values}
        family, self._is_fused = reader.family, reader.has(f"{prefix}attn_qkv.weight")
        self._is_gated = family.gated_attention
        self._in_file = self.sizes | {"q": 2 * self.sizes["q"]} if self._is_gated else self.sizes
        q_norm = reader.file.tensors.get(f"{prefix}attn_q_norm.weight")
        # Norms after the rotation have the same weights for all heads.
        self.has_own_norms = q_norm is not None and len(q_norm.shape) > 1 and not family.rotates_first
        self._has_gains = q_norm is not None and q_norm.shape == (heads.count, 1)
        self._has_unit_norms = family.unit_norms and is_rotated and not reader.is_unnormed

    @property
    def has_values(self) -> bool:
        return self._is_fused or self._reader.has(f"{self._prefix}attn_v.weight")

    def projection(self, x: str) -> tuple[Weight, Vector | None]:
        """The matrix of queries, keys or values, and its bias."""
        tensor, first, of = self._source(x)
        reader, size, order = self._reader, self.sizes[x], self._heads.order if x != "v" else None
        if x == "q" and self._is_gated:
            return self._every_second(0), None
        bias = reader.vector(f"{tensor}.bias", size, order, first, of)
        if not bias and self._is_fused:  # some files have each by itself
            bias = reader.vector(f"{self._prefix}attn_{x}.bias", size, order)
        return reader.weight(tensor, size, reader.dim, first, of, order), bias

    def gate(self) -> Weight | None:
        """The matrix of the gate of what heads attend to: of each element, or of each head."""
        if info := self._reader.file.tensors.get(f"{self._prefix}attn_gate.weight"):
            count = self._heads.count
            rows = count if info.shape[0] == count else self.sizes["q"]
            return self._reader.weight(f"{self._prefix}attn_gate", rows, self._reader.dim)
        return self._every_second(self._heads.dim) if self._is_gated else None

    def norm(self, x: str) -> Vector | None:
        """The norm of queries or keys."""
        reader, heads, tensor = self._reader, self._heads, f"{self._prefix}attn_{x}_norm.weight"
        if self._has_unit_norms:
            return Vector("", heads.dim)
        if self._has_gains:  # a number for each head of queries, and none for keys (Talkie)
            if x == "k":
                return Vector("", self.sizes[x])
            return replace(reader.required(tensor, heads.count, 1), size=self.sizes[x], each=heads.dim)
        if self.has_own_norms and reader.has(tensor):
            norm = reader.required(tensor, self.sizes[x] // heads.dim, heads.dim)
            return replace(norm, order=heads.order)
        is_over_heads = reader.has(tensor) and reader.file.tensors[tensor].shape != (heads.dim,)
        return reader.vector(tensor, self.sizes[x] if is_over_heads else heads.dim, heads.order)

    def _source(self, x: str) -> tuple[str, int, int]:
        """The tensor with these rows, the first of them, and the tensor's rows."""
        if not self._is_fused:
            return f"{self._prefix}attn_{x}", 0, self._in_file[x]
        q, k, v = self._in_file.values()
        return f"{self._prefix}attn_qkv", {"q": 0, "k": q, "v": q + k}[x], q + k + v

    def _every_second(self, start: int) -> Weight:
        """The rows of all heads' queries or gates, which follow each other in each head."""
        tensor, first, of = self._source("q")
        run, order = self._heads.dim, None if start else self._heads.order
        return self._reader.weight(
            tensor, self.sizes["q"], self._reader.dim, first + start, of, order, every=2 * run, run=run
        )
