"""A small model with random weights and a vocabulary of its own: a real GGUF file, made in a second.

It exercises everything that a published model does (template, tokenizer, quantized products, cache), but what
it says is noise. Tests call `write`; `python tests/generated_model.py FILE` makes one to chat with.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Type

from engine.formats.quantization import QUANTIZED
from tests.generated_families import ARCHITECTURES, EPSILON

ROPE_BASE = 10_000.0
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_MARKS = ("<think>", "</think>")
STREAMS, LOW_RANK = 4, 64  # as llama.cpp has them


# The vocabulary is learned from this, so that it depends on nothing else in the repository.
PASSAGE = """\
The river came down from the hills in spring, brown and loud, and the people of the valley went out to
look at it. They said that it had never been so high; they said so every year. The miller counted the
stones that were still dry and wrote the number in his book: twelve on Monday, nine on Tuesday, seven on
Wednesday morning. "What will you do when there are none?" asked the child. "Then I shall have nothing
left to count," he said, "and I will have to look at the water instead." Nobody knew whether he was
joking. The child thought about it for a while, and then she asked how the water knew the way. "It does
not know," said the miller. "It only falls, a little at a time, wherever falling is easiest. That is how
most things find their way." In the evening the rain stopped. The light was long and yellow over the
fields, the birds began again where they had left off, and one after another the stones came back. She
wrote the numbers herself: eight, ten, thirteen. There had been one more than anybody remembered, and she
was the only one who had seen it, because she was the only one who had asked.
"""

CHATML = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
# As Qwen3's: a reply without thinking begins after an empty span of it.
NO_THINKING = """\
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% endif -%}
"""


def damage(path: Path, tensor: str, row: int) -> None:
    """Makes numbers of a row of a matrix NaN: all of float32, or the scales of Q8_0."""
    reader = gguf.GGUFReader(path, "r+")
    [data] = [t.data for t in reader.tensors if t.name == tensor]
    if data.dtype == np.float32:
        data[row] = np.nan
    else:
        data[row].reshape(-1, 34)[:, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    reader.data.flush()


def write(
    path: Path,
    *,
    architecture: str = "llama",
    quant: str = "Q8_0",
    types: Mapping[str, str] | None = None,
    layers: int = 2,
    dim: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int | None = None,
    context: int = 2048,
    tied: bool = True,
    rotated: int | None = None,
    rope_factors: bool = False,
    keys: Mapping[str, int | float | str | Sequence[int]] | None = None,
    template: str | None = None,
    classes: int = 0,
    draft_head: bool = False,
    seed: int = 0,
) -> Path:
    """Writes a model to `path` and returns it. The same arguments give the same bytes.

    `architecture` is one of `ARCHITECTURES`. `quant` is the type of every matrix: F32, F16, BF16, Q4_0, Q4_1,
    Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4 or NVFP4, but of those in `types`, by a pattern of their names
    without ".weight", of which the first that matches counts; `dim` and `ffn` (twice `dim` unless given) must be
    multiples of its block: 32, or 256 for the K types and IQ4_XS. A head has `head_dim` elements (`dim // heads`), of
    which the first `rotated` (by default all) are rotated. `rope_factors` adds rope_freqs.weight. `keys` change the
    architecture's metadata. `template` None is ChatML. With `classes`, the model ranks documents. With a `draft_head`
    (qwen35, qwen35moe), a layer more guesses.
    """
    parts = ARCHITECTURES[architecture]
    architecture = parts.architecture or architecture
    ffn = ffn or 2 * dim
    full_head = head_dim = head_dim or dim // heads
    block = gguf.GGML_QUANT_SIZES[Type[quant]][0]
    if dim % block or ffn % block:
        raise ValueError(f"{quant} has blocks of {block}: dim {dim} and ffn {ffn} must be multiples of it")
    rng = np.random.default_rng(seed)
    metadata = {**parts.keys, **(keys or {})}
    if parts.latent == "together":
        metadata.setdefault("attention.head_count_kv", heads)
    sizes = {"rope.dimension_count": rotated or head_dim}
    sizes |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for size, usual in sizes.items():
        metadata.setdefault(size, usual)
    rotated = metadata["rope.dimension_count"]
    tokens, merges = _vocabulary()
    specials = SPECIALS + (THINK_MARKS if parts.thinks else ())

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("random noise")
    operators = {
        "F32": "ALL_F32",
        "MXFP4": "MOSTLY_MXFP4_MOE",
        **{f"Q{n}_K": f"MOSTLY_Q{n}_K_S" for n in (3, 4, 5)},
    }
    operator = operators.get(quant, f"MOSTLY_{quant}")
    writer.add_file_type(gguf.LlamaFileType[operator])
    writer.add_context_length(context)
    writer.add_embedding_length(dim)
    writer.add_block_count(layers + draft_head)
    if draft_head:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
    shared = metadata.get("attention.shared_kv_layers", layers - 2) if parts.layers else 0
    own = layers - shared  # so many layers have a KV cache
    unused = "attention.shared_kv_layers" in (
        keys or {}
    )  # the others' matrices are there, as in published files
    widths = [ffn if i < own or parts.streams else 2 * ffn for i in range(layers)]
    turns = parts.lone or parts.partial or " "
    kinds_of = [turns[i % len(turns)] for i in range(layers)]
    widths = [ffn if kind == "E" else 0 for kind in kinds_of] if parts.lone else widths
    if "feed_forward_length" not in parts.keys:
        if parts.partial:
            writer.add_feed_forward_length([0 if kind == "A" else ffn for kind in kinds_of])
        else:
            writer.add_feed_forward_length(widths if parts.layers or parts.lone else ffn * (1 + parts.halved))
    writer.add_head_count([0 if kind == "F" else heads for kind in kinds_of] if parts.partial else heads)
    if parts.layers:
        metadata["attention.shared_kv_layers"] = shared
    has_states = parts.conv or (parts.mamba and not parts.mamba_beside)
    of_layers = [kv_heads if i % 2 else 0 for i in range(layers)] if has_states else kv_heads
    if parts.lone:
        of_layers = [kv_heads if kind == "*" else 0 for kind in kinds_of]
    if parts.partial:
        of_layers = [0 if kind == "F" else kv_heads for kind in kinds_of]
    kv_counts = metadata.setdefault("attention.head_count_kv", of_layers)
    writer.add_rope_freq_base(ROPE_BASE)
    add_eps = writer.add_layer_norm_eps if parts.layer_norms else writer.add_layer_norm_rms_eps
    add_eps(EPSILON)
    writer.add_vocab_size(len(tokens) + len(specials))
    adding = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    for key, value in metadata.items():
        add = adding[type(value)]
        add(key if key.startswith("xielu.") else f"{architecture}.{key}", value)

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if architecture == "llama" else "qwen2")
    writer.add_token_list([*tokens, *specials])
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIALS)
    writer.add_token_types(kinds + [gguf.TokenType.USER_DEFINED] * (len(specials) - len(SPECIALS)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) + SPECIALS.index("<|endoftext|>"))
    writer.add_eos_token_id(len(tokens) + SPECIALS.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    chatml = CHATML + NO_THINKING if parts.thinks else CHATML
    writer.add_chat_template(chatml if template is None else template)

    def type_of(name: str, usual: str = quant) -> Type:
        own = (kind for pattern, kind in (types or {}).items() if re.fullmatch(pattern, name))
        return Type[next(own, usual)]

    def matrix(name: str, rows: int, cols: int, usual: str = quant) -> None:
        kind = type_of(name, usual)
        writer.add_tensor(f"{name}.weight", random_matrix(rng, rows, cols, kind), raw_dtype=kind)
        if kind is Type.NVFP4 and name != "token_embd":
            vector(f"{name}.scale", 1, 1.0)

    def vector(name: str, size: int, mean: float, std: float = 0.1) -> None:
        writer.add_tensor(name, (mean + std * rng.standard_normal(size)).astype(np.float32))

    def norm(name: str) -> None:
        if parts.layer_norms == "none":
            return
        is_bare = parts.mamba_beside and name.endswith("ffn_norm")
        vector(name if is_bare else f"{name}.weight", dim, 1.0)
        if parts.layer_norms == "biases":
            vector(f"{name}.bias", dim, 0.0)

    def experts(prefix: str) -> None:
        """A router, and matrices of `width` hidden elements for each expert."""
        n, width = parts.experts, metadata.get("expert_feed_forward_length", ffn)
        router = 2 * random_matrix(rng, n, dim, Type.F32)  # some experts are much more probable than others
        kind = type_of(f"{prefix}ffn_gate_inp", "F32")
        data = router if kind is Type.F32 else gguf.quantize(router, kind)
        writer.add_tensor(f"{prefix}ffn_gate_inp.weight", data, raw_dtype=kind)
        first = [("gate_up", 2 * width, dim)] if parts.beside else [("gate", width, dim), ("up", width, dim)]
        first = first[1:] if parts.feed_forward == "ungated" else first
        for name, rows, cols in *first, ("down", dim, width):
            kind = type_of(f"{prefix}ffn_{name}_exps")
            data = np.stack([random_matrix(rng, rows, cols, kind) for _ in range(n)])
            writer.add_tensor(f"{prefix}ffn_{name}_exps.weight", data, raw_dtype=kind)
            if kind is Type.NVFP4:
                vector(f"{prefix}ffn_{name}_exps.scale", n, 1.0)
            if parts.biases == "all" and not parts.normed_after:
                biases = 0.2 * rng.standard_normal((n, rows))
                writer.add_tensor(f"{prefix}ffn_{name}_exps.bias", biases.astype(np.float32))
        if parts.biases == "all" and not parts.normed_after:
            vector(f"{prefix}ffn_gate_inp.bias", n, 0.0, 0.5)
        if parts.choice_bias:
            vector(f"{prefix}exp_probs_b.bias", n, 0.0, 0.2)
        if parts.shared:
            width = metadata.get("expert_shared_feed_forward_length", width)
            width *= metadata.get("expert_shared_count", 1)
            if not parts.ungated:
                vector(f"{prefix}ffn_gate_inp_shexp.weight", dim, 0.0, dim**-0.5)
            for name, rows, cols in ("gate", width, dim), ("up", width, dim), ("down", dim, width):
                if name != "gate" or parts.feed_forward != "ungated":
                    matrix(f"{prefix}ffn_{name}_shexp", rows, cols)

    def delta_net(prefix: str) -> None:
        size, values = metadata["ssm.state_size"], metadata["ssm.time_step_rank"]
        channels = (2 * metadata["ssm.group_count"] + values) * size
        matrix(prefix + "attn_qkv", channels, dim)
        matrix(prefix + "attn_gate", values * size, dim)
        # many published files hold these as floats
        for name, rows in (
            (("ba", 2 * values),) if parts.fused_delta else (("beta", values), ("alpha", values))
        ):
            matrix(f"{prefix}ssm_{name}", rows, dim, "F32")
        matrix(prefix + "ssm_out", dim, values * size)
        taps = random_matrix(rng, channels, metadata["ssm.conv_kernel"], Type.F32)
        writer.add_tensor(prefix + "ssm_conv1d.weight", taps)
        writer.add_tensor(prefix + "ssm_a", -rng.uniform(0.2, 4, values).astype(np.float32))
        vector(prefix + "ssm_dt.bias", values, -3.0, 1.0)
        vector(prefix + "ssm_norm.weight", size, 1.0)

    def mamba(prefix: str) -> None:
        state_size, groups, n_heads = (
            metadata[f"ssm.{key}"] for key in ("state_size", "group_count", "time_step_rank")
        )
        width = metadata["ssm.inner_size"]
        channels = width + 2 * groups * state_size
        matrix(prefix + "ssm_in", width + channels + n_heads, dim)
        matrix(prefix + "ssm_out", dim, width)
        taps = random_matrix(rng, channels, metadata["ssm.conv_kernel"], Type.F32)
        writer.add_tensor(prefix + "ssm_conv1d.weight", taps)
        vector(prefix + "ssm_conv1d.bias", channels, 0.0)
        writer.add_tensor(prefix + "ssm_a", -rng.uniform(0.2, 4, (n_heads, 1)).astype(np.float32))
        vector(prefix + "ssm_dt.bias", n_heads, -3.0, 1.0)
        writer.add_tensor(prefix + "ssm_d", rng.standard_normal((n_heads, 1)).astype(np.float32))
        norm = 1 + 0.1 * rng.standard_normal((groups, width // groups))
        writer.add_tensor(prefix + "ssm_norm.weight", norm.astype(np.float32))

    def short_conv(prefix: str) -> None:
        taps = random_matrix(rng, dim, metadata["shortconv.l_cache"], Type.F32)
        writer.add_tensor(prefix + "conv.weight", taps)
        matrix(prefix + "in_proj", 3 * dim, dim)
        matrix(prefix + "out_proj", dim, dim)

    matrix("token_embd", len(tokens) + len(specials), dim)
    norm("token_embd_norm" if parts.conv or parts.normed_after else "output_norm")
    if parts.embedding_norm:
        norm("token_embd_norm")
    if parts.positions:
        matrix("position_embd", context, dim, "F32")
    if parts.normed_after:
        matrix("token_types", 1, dim, "F32")
        writer.add_token_type_count(1)
    if architecture in ("phi2", "phimoe"):
        vector("output.bias", len(tokens) + len(specials), 0.0)
    if not tied:
        matrix("output", len(tokens) + len(specials), dim)
    if classes:
        writer.add_uint32(f"{architecture}.pooling_type", 4)
        matrix("cls.output", classes, dim)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.geomspace(1, 8, rotated // 2).astype(np.float32))
    if architecture == "phi3":
        for name, most in ("long", 16), ("short", 2):
            factors = np.geomspace(1, most, rotated // 2).astype(np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if parts.streams:
        for name in "altup_proj", "altup_unembd_proj":
            kind = type_of(name)
            data = np.stack([random_matrix(rng, dim, dim, kind) for _ in range(STREAMS - 1)])
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    if parts.layers:
        size = metadata["embedding_length_per_layer_input"]
        matrix("per_layer_token_embd", len(tokens) + len(specials), layers * size)
        matrix("per_layer_model_proj", layers * size, dim)
        vector("per_layer_proj_norm.weight", size, 1.0)

    def attention(prefix: str, layer: int) -> None:
        head_dim, has_window = full_head, metadata.get("attention.sliding_window_pattern")
        if isinstance(has_window, list) and has_window[layer]:
            head_dim = metadata.get("attention.key_length_swa", head_dim)
        kv_size = (kv_counts[layer] if isinstance(kv_counts, list) else kv_counts) * head_dim
        projections = {"attn_q": heads * head_dim}
        if layer < own or layer == layers or unused:
            projections["attn_k"] = kv_size
            if not parts.beside or has_window[layer]:
                projections["attn_v"] = kv_size
        if parts.fused:
            matrix(prefix + "attn_qkv", sum(projections.values()), dim)
        else:
            for name, rows in projections.items():
                matrix(prefix + name, 2 * rows if parts.delta and name == "attn_q" else rows, dim)
        matrix(prefix + "attn_output", dim, heads * head_dim)
        if parts.gated:
            matrix(prefix + "attn_gate", heads if parts.gated == "heads" else heads * head_dim, dim)
        if parts.biases:
            in_file = {"attn_qkv": sum(projections.values())} if parts.fused else projections
            for name, rows in in_file.items():
                vector(f"{prefix}{name}.bias", rows, 0.0)
            if parts.biases in ("all", "qkvo"):
                vector(f"{prefix}attn_output.bias", dim, 0.0)
        if parts.sinks:
            vector(f"{prefix}attn_sinks.weight", heads, 1.0, 1.0)
        if parts.norms:
            for name in (name for name in projections if name != "attn_v"):
                size = head_dim if parts.norms == "head" else projections[name]
                if parts.norms == "heads":
                    weights = 1 + 0.1 * rng.standard_normal((size // head_dim, head_dim))
                    writer.add_tensor(f"{prefix}{name}_norm.weight", weights.astype(np.float32))
                    continue
                mean = 0.2 if (parts.scaled or parts.streams) and name == "attn_q" else 1.0
                vector(f"{prefix}{name}_norm.weight", size, mean)

    def latent_attention(prefix: str) -> None:
        latent, q_width = metadata["attention.kv_lora_rank"], metadata.get("attention.q_lora_rank")
        whole, values = (
            metadata.get(f"attention.{x}_length_mla", metadata[f"attention.{x}_length"])
            for x in ("key", "value")
        )
        plain = whole - rotated
        if q_width:
            matrix(prefix + "attn_q_a", q_width, dim)
            vector(prefix + "attn_q_a_norm.weight", q_width, 1.0)
        matrix(prefix + ("attn_q_b" if q_width else "attn_q"), heads * whole, q_width or dim)
        matrix(prefix + "attn_kv_a_mqa", latent + rotated, dim)
        vector(prefix + "attn_kv_a_norm.weight", latent, 1.0)
        if parts.latent == "together":
            matrix(prefix + "attn_kv_b", heads * (plain + values), latent)
        else:
            for name, rows, cols in ("k", latent, plain), ("v", values, latent):
                kind = type_of(f"{prefix}attn_{name}_b")
                data = np.stack([random_matrix(rng, rows, cols, kind) for _ in range(heads)])
                writer.add_tensor(f"{prefix}attn_{name}_b.weight", data, raw_dtype=kind)
        matrix(prefix + "attn_output", dim, heads * values)

    for layer in range(layers + draft_head):
        prefix = f"blk.{layer}."
        has_heads = kinds_of[layer] != "F" if layer < layers else True
        if parts.norms_before and not parts.normed_after and has_heads:
            norm(parts.first_norm if parts.first_norm and not layer else prefix + "attn_norm")
        is_delta = parts.delta and layer < layers and (layer + 1) % metadata["full_attention_interval"] != 0
        if is_delta:
            delta_net(prefix)
        elif parts.latent:
            latent_attention(prefix)
        elif parts.conv and layer % 2 == 0:
            short_conv(f"{prefix}shortconv.")
        elif parts.lone and kinds_of[layer] != "*":
            if kinds_of[layer] == "M":
                mamba(prefix)
        elif parts.mamba and layer % 2 == 0 and not (parts.mamba_beside or parts.lone):
            mamba(prefix)
        elif has_heads:
            attention(prefix, layer)
        if parts.mamba_beside:
            mamba(prefix)
        if (parts.lone and kinds_of[layer] != "E") or (parts.partial and kinds_of[layer] == "A"):
            continue
        if parts.normed_after:
            norm(prefix + "attn_output_norm")
            norm(prefix + "layer_output_norm")
        elif parts.norms_before and not parts.lone and not parts.feed_forward.endswith("beside"):
            norm(prefix + ("post_attention_norm" if parts.renamed else "ffn_norm"))
        if parts.norms_after:
            vector(prefix + "post_attention_norm.weight", dim, 1.0)
            vector(prefix + "post_ffw_norm.weight", dim, 1.0)
        if parts.scaled:
            vector(prefix + "layer_output_scale.weight", 1, 0.7)
        if parts.layers:
            matrix(prefix + "inp_gate", size, dim)
            matrix(prefix + "proj", dim, size)
            vector(prefix + "post_norm.weight", dim, 1.0)
        if parts.streams:
            matrix(prefix + "altup_router", STREAMS, dim, "F32")
            vector(prefix + "altup_router_norm.weight", dim, dim / 2)
            vector(prefix + "altup_correct_scale.weight", dim, 1.0)
            for name, rows in ("predict", STREAMS**2), ("correct", STREAMS):
                coefficients = 0.3 * random_matrix(rng, rows, STREAMS, Type.F32)
                writer.add_tensor(f"{prefix}altup_{name}_coef.weight", coefficients)
            matrix(prefix + "laurel_l", LOW_RANK, dim)
            matrix(prefix + "laurel_r", dim, LOW_RANK)
            vector(prefix + "laurel_post_norm.weight", dim, 1.0)
        has_experts = (
            layer % 2 == 1
            if parts.normed_after
            else layer >= metadata.get("leading_dense_block_count", 0)
            and (layer + 1) % parts.every_expert == 0
        )
        if parts.experts and has_experts:
            experts(prefix)
            if not parts.beside:
                continue
            vector(prefix + "ffn_gate_inp.scale", dim, dim**0.5)
            vector(prefix + "ffn_down_exps.scale", parts.experts, 1.0)
            for name in "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2":
                vector(f"{prefix}{name}.weight", dim, 1.0)
        width = ffn if layer == layers else widths[layer]
        if parts.feed_forward.startswith("ungated"):
            matrix(prefix + "ffn_up", width, dim)
            if parts.biases == "all":
                vector(prefix + "ffn_up.bias", width, 0.0)
                vector(prefix + "ffn_down.bias", dim, 0.0)
        elif parts.fused and not (parts.experts or parts.normed_after or parts.halved):
            matrix(prefix + "ffn_up", 2 * width, dim)
        else:
            matrix(prefix + "ffn_gate", width, dim)
            matrix(prefix + "ffn_up", width, dim)
            if architecture == "jina-bert-v2":
                vector(prefix + "ffn_down.bias", dim, 0.0)
        matrix(prefix + "ffn_down", dim, width)
    if draft_head:
        prefix = f"blk.{layers}.nextn."
        matrix(prefix + "eh_proj", dim, 2 * dim)
        for name in "enorm", "hnorm", "shared_head_norm":
            vector(f"{prefix}{name}.weight", dim, 1.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def _vocabulary() -> tuple[list[str], list[str]]:
    """The 256 bytes and what byte-pair encoding learns from the passage: tokens in GPT-2's spelling of bytes,
    and merges as "left right"."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.train_from_iterator(
        [PASSAGE],
        tokenizers.trainers.BpeTrainer(
            vocab_size=1024, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False
        ),
    )
    vocab = bpe.get_vocab()
    model = json.loads(bpe.to_str())["model"]
    return sorted(vocab, key=vocab.__getitem__), [" ".join(pair) for pair in model["merges"]]


def random_matrix(rng: np.random.Generator, rows: int, cols: int, kind: Type) -> np.ndarray:
    """rows x cols weights of standard deviation cols**-0.5, as the file stores them: float32 or float16, or
    uint8 of shape (rows, bytes of a row).

    The gguf package does not quantize to the K types and IQ. For them the block's bytes are random and only
    its float16 scales are chosen (llama.cpp, ggml-common.h: block_q2_K to block_q6_K, block_iq4_nl, block_iq4_xs).
    """
    std = cols**-0.5
    if kind is Type.NVFP4:
        data = np.frombuffer(rng.bytes(rows * cols // 64 * 36), np.uint8).reshape(-1, 36).copy()
        scales = std * np.exp2(rng.uniform(-3, 0, (len(data), 4)))
        data[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(scales)
        return data.reshape(rows, -1)
    if not (kind.name.endswith("_K") or kind.name.startswith("IQ")):
        values = (rng.standard_normal((rows, cols)) * std).astype(np.float32)
        return values if kind is Type.F32 else gguf.quantize(values, kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = (
        np.frombuffer(rng.bytes(rows * cols // block * block_bytes), np.uint8).reshape(-1, block_bytes).copy()
    )

    def set_scales(scale: float) -> None:
        at = QUANTIZED[kind].d if kind in QUANTIZED else 0
        if kind is Type.IQ1_M:  # has its scale's bits in the upper ones of four words
            bits = int(np.float16(scale).view(np.uint16))
            words = data[:, 48:].view(np.uint16)
            words[:] = words & 0x0FFF | np.array(
                [bits << 12 - by & 0xF000 for by in (0, 4, 8, 12)], np.uint16
            )
        elif kind in (Type.Q2_K, Type.Q4_K, Type.Q5_K):
            # value = scale * q - min: the middle of q's range times the scale centres it on zero
            middle = {Type.Q2_K: 1.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}[kind]
            data[:, at : at + 4] = np.array([scale, middle * scale], np.float16).view(np.uint8)
        else:  # of both signs: the codebook of IQ4_NL is not centred
            scales = np.resize(np.array([scale, -scale], np.float16), len(data))
            signed = scales if kind is Type.IQ4_NL else np.abs(scales)
            data[:, at : at + 2] = signed.view(np.uint8).reshape(-1, 2)

    unit = 2.0**-10
    set_scales(unit)
    set_scales(unit * std / float(gguf.dequantize(data, kind).std()))
    return data.reshape(rows, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small GGUF model that speaks noise.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--architecture", default="llama", choices=[*ARCHITECTURES])
    parser.add_argument("--quant", default="Q8_0")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    write(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
