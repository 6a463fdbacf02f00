"""A small model with random weights and a vocabulary of its own: a real GGUF file, made in a second.

It exercises everything that a published model does (template, tokenizer, quantized products, cache), but what
it says is noise. Tests call `write`; `python tests/generated_model.py FILE` makes one to chat with.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Type

from tests.generated_families import ARCHITECTURES
from tests.generated_parts import EPSILON, Parts
from tests.generated_tensors import Shape, Tensors, Weights
from tests.generated_weights import random_matrix

ROPE_BASE = 10_000.0
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_MARKS = ("<think>", "</think>")

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
    weights: Weights = random_matrix,
    vocabulary: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Path:
    """Writes a model to `path` and returns it. The same arguments give the same bytes.

    `architecture` is one of `ARCHITECTURES`. `quant` is the type of every matrix: F32, F16, BF16, Q4_0, Q4_1,
    Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4 or NVFP4, but of those in `types`, by a pattern of their names
    without ".weight", of which the first that matches counts; `dim` and `ffn` (twice `dim` unless given) must be
    multiples of its block: 32, or 256 for the K types and IQ4_XS. A head has `head_dim` elements (`dim // heads`), of
    which the first `rotated` (by default all) are rotated. `rope_factors` adds rope_freqs.weight. `keys` change the
    architecture's metadata. `template` None is ChatML. With `classes`, the model ranks documents. With a `draft_head`
    (qwen35, qwen35moe), a layer more guesses. `weights` makes the matrices. `vocabulary`: tokens and merges other than
    the learned ones.
    """
    parts = ARCHITECTURES[architecture]
    architecture = parts.architecture or architecture
    ffn, head_dim = ffn or 2 * dim, head_dim or dim // heads
    block = gguf.GGML_QUANT_SIZES[Type[quant]][0]
    if dim % block or ffn % block:
        raise ValueError(f"{quant} has blocks of {block}: dim {dim} and ffn {ffn} must be multiples of it")
    metadata = {**parts.keys, **(keys or {})}
    if parts.latent == "together":
        metadata.setdefault("attention.head_count_kv", heads)
    sizes = {"rope.dimension_count": rotated or head_dim}
    sizes |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for size, usual in sizes.items():
        metadata.setdefault(size, usual)

    turns = parts.lone or parts.partial or " "
    kinds = [turns[i % len(turns)] for i in range(layers)]
    own = layers
    if parts.layers:
        metadata.setdefault("attention.shared_kv_layers", layers - 2)
        own -= metadata["attention.shared_kv_layers"]
    widths = [ffn if i < own or parts.streams else 2 * ffn for i in range(layers)]
    if parts.lone:
        widths = [ffn if kind == "E" else 0 for kind in kinds]
    kv_counts = metadata.setdefault("attention.head_count_kv", _kv_heads(parts, kinds, kv_heads))
    # Published files have the matrices of keys and values of all layers, also where they are not used.
    has_all = "attention.shared_kv_layers" in (keys or {})
    tokens, merges = vocabulary or learned_vocabulary()
    specials = SPECIALS + (THINK_MARKS if parts.thinks else ())
    shape = Shape(
        layers=layers, vocab=len(tokens) + len(specials), context=context, dim=dim, heads=heads, head_dim=head_dim,
        rotated=metadata["rope.dimension_count"], ffn=ffn, kinds=kinds, widths=widths, own=layers if has_all else own,
        kv_heads=kv_counts if isinstance(kv_counts, list) else [kv_counts] * layers,
    )  # fmt: skip

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("random noise")
    _add_file_type(writer, quant)
    writer.add_context_length(context)
    writer.add_embedding_length(dim)
    writer.add_block_count(layers + draft_head)
    if draft_head:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
    if "feed_forward_length" not in parts.keys:
        if parts.partial:
            writer.add_feed_forward_length([0 if kind == "A" else ffn for kind in kinds])
        else:
            writer.add_feed_forward_length(widths if parts.layers or parts.lone else ffn * (1 + parts.halved))
    heads_of = [0 if kind == "F" else heads for kind in kinds] if parts.partial else heads
    writer.add_head_count(0 if parts.lone == "M" or parts.mixing else heads_of)
    writer.add_rope_freq_base(ROPE_BASE)
    add_eps = writer.add_layer_norm_eps if parts.layer_norms else writer.add_layer_norm_rms_eps
    add_eps(EPSILON)
    writer.add_vocab_size(shape.vocab)
    adding = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array, tuple: functools.partial(_add_long_numbers, writer),
    }  # fmt: skip
    for key, value in metadata.items():
        add = adding[type(value)]
        add(key if key.startswith("xielu.") else f"{architecture}.{key}", value)
    _add_tokenizer(writer, architecture, tokens, merges, specials)
    chatml = CHATML + NO_THINKING if parts.thinks else CHATML
    writer.add_chat_template(chatml if template is None else template)
    if parts.normed_after:
        writer.add_token_type_count(1)
    if classes:
        writer.add_uint32(f"{architecture}.pooling_type", 4)

    rng = np.random.default_rng(seed)
    tensors = Tensors(writer, architecture, parts, shape, metadata, quant, types or {}, rng, weights)
    tensors.add_model(tied=tied, rope_factors=rope_factors, classes=classes, draft_head=draft_head)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_long_numbers(writer: gguf.GGUFWriter, key: str, numbers: Sequence[int]) -> None:
    """Unsigned numbers of 64 bits."""
    kind = gguf.GGUFValueType
    writer.add_key_value(key, list(numbers), kind.ARRAY, sub_type=kind.UINT64)


def _kv_heads(parts: Parts, kinds: Sequence[str], count: int) -> int | list[int]:
    """The heads of keys: of each layer, where some layers have no attention."""
    if parts.lone:
        return [count if kind == "*" else 0 for kind in kinds]
    if parts.partial:
        return [0 if kind == "F" else count for kind in kinds]
    if parts.keyed:
        return [1 if i % 2 else 0 for i in range(len(kinds))]
    if parts.conv or parts.scan or (parts.mamba and not parts.mamba_beside):
        return [count if i % 2 else 0 for i in range(len(kinds))]
    return count


def _add_file_type(writer: gguf.GGUFWriter, quant: str) -> None:
    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"} | {
        f"Q{n}_K": f"MOSTLY_Q{n}_K_S" for n in (3, 4, 5)
    }
    writer.add_file_type(gguf.LlamaFileType[names.get(quant, f"MOSTLY_{quant}")])


def _add_tokenizer(
    writer: gguf.GGUFWriter,
    architecture: str,
    tokens: Sequence[str],
    merges: Sequence[str],
    specials: Sequence[str],
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if architecture == "llama" else "qwen2")
    writer.add_token_list([*tokens, *specials])
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIALS)
    writer.add_token_types(kinds + [gguf.TokenType.USER_DEFINED] * (len(specials) - len(SPECIALS)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) + SPECIALS.index("<|endoftext|>"))
    writer.add_eos_token_id(len(tokens) + SPECIALS.index("<|im_end|>"))
    writer.add_add_bos_token(False)


@functools.cache
def learned_vocabulary() -> tuple[list[str], list[str]]:
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
