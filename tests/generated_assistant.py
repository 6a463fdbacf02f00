"""A small assistant with random weights for a generated model of gemma4, and what numpy makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from engine.description.assistant import read_assistant
from engine.description.attention import Attention
from engine.description.spec import ModelSpec
from engine.formats.gguf import GGUF
from tests.generated_families import GEMMA4
from tests.generated_model import ROPE_BASE, SPECIALS, learned_vocabulary
from tests.generated_parts import EPSILON
from tests.generated_weights import random_matrix
from tests.reference import Floats, Reference
from tests.reference_functions import softmax

_ARCHITECTURE = "gemma4-assistant"


def write_assistant(
    path: Path,
    *,
    quant: str = "F32",
    layers: int = 2,
    dim: int = 32,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    keys: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Path:
    """Writes an assistant of a model whose residual stream has `width` elements. `head_dim`: of layers without a
    window. `keys` change the metadata."""
    rng, kind = np.random.default_rng(seed), Type[quant]
    tokens, merges = learned_vocabulary()
    names = [*tokens, *SPECIALS]
    writer = gguf.GGUFWriter(str(path), _ARCHITECTURE)
    writer.add_name("noise before noise")
    writer.add_context_length(2048)
    writer.add_embedding_length(dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * dim)
    writer.add_head_count(heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    own = {
        "nextn_predict_layers": layers,
        "embedding_length_out": width,
        "attention.shared_kv_layers": layers,
        "attention.head_count_kv": kv_heads,
    }
    for key, value in (GEMMA4 | own | dict(keys or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{_ARCHITECTURE}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([1] * len(tokens) + [3] * len(SPECIALS))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) + SPECIALS.index("<|im_end|>"))

    def matrix(name: str, rows: int, cols: int) -> None:
        writer.add_tensor(f"{name}.weight", random_matrix(rng, rows, cols, kind), raw_dtype=kind)

    def vector(name: str, size: int, mean: float = 1.0) -> None:
        values = mean + 0.1 * rng.standard_normal(size)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    matrix("token_embd", len(names), dim)
    vector("output_norm", dim)
    matrix("nextn.pre_projection", dim, 2 * width)
    matrix("nextn.post_projection", width, dim)
    vector("masked_embd_centroids", dim)
    for layer in range(layers):
        prefix, pattern = f"blk.{layer}.", GEMMA4["attention.sliding_window_pattern"]
        assert isinstance(pattern, list)
        size = 32 if pattern[layer] else head_dim
        for name in "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm":
            vector(prefix + name, dim)
        vector(f"{prefix}attn_q_norm", size, 0.2)
        vector(f"{prefix}layer_output_scale", 1, 0.7)
        matrix(f"{prefix}attn_q", heads * size, dim)
        matrix(f"{prefix}attn_output", dim, heads * size)
        for name in "ffn_gate", "ffn_up":
            matrix(prefix + name, 2 * dim, dim)
        matrix(f"{prefix}ffn_down", dim, 2 * dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class AssistantReference(Reference):
    """An assistant of a `model`."""

    def __init__(self, path: Path, model: Reference) -> None:
        self._model, self._position = model, 0
        super().__init__(path, model.context)

    def _read(self, file: GGUF) -> ModelSpec:
        return read_assistant(file, self._model.spec)

    def drafts(self, tokens: Sequence[int], n: int) -> Iterator[Floats]:
        """The logits for `n` tokens after a text, whose last token is not in the model's cache yet."""
        model, narrowing = self._model, self.spec.narrowing
        assert narrowing
        x = model.streams(tokens[:-1])[-1][-1:]
        h = model._normed(x, model.spec.output_norm, model.spec.stream_eps)
        last, caches, self._position = tokens[-1], model.caches(tokens[:-1]), len(tokens) - 1
        for _ in range(n):
            e = model._matrix(model.spec.embedding)[[last]] * np.float32(model.spec.dim**0.5)
            x = self._product(e, narrowing.of_embedding) + self._product(h, narrowing.of_hidden)
            *_, x = self._sublayers(self.spec, x, None, list(caches))
            y = self._normed(x, self.spec.output_norm, self.spec.stream_eps)
            [logits] = self._product(y, self.spec.head)
            yield logits
            last, h = int(logits.argmax()), self._product(y, narrowing.back)

    def _attend(self, part: Attention, h: Floats, caches: list[tuple[Floats, Floats]]) -> Floats:
        """All queries are at the position of the text's last token."""
        assert part.cache_of is not None
        keys, values = caches[part.cache_of]
        q = self._heads(part, self._product(h, part.q), part.q_norm)
        [q] = self._rotated(part, np.repeat(q, self._position + 1, 0))[-1:]
        distance = self._position - np.arange(len(keys))
        window = self._model.spec.attention[part.cache_of].window
        seen = (distance > 0) & (distance < window if window else True)
        out = np.empty_like(q)
        for head in range(part.heads):
            of = head * part.kv_heads // part.heads
            scores: NDArray[np.float32] = q[head] @ keys[:, of].T * np.float32(part.scale)
            out[head] = softmax(np.where(seen, scores, -np.inf)[None])[0] @ values[:, of]
        return self._product(out.reshape(1, -1), part.o)
