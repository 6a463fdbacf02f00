"""Converts between train.py's folder and the guide's GGUF file.

python -m tools.guide.export pack out presets/orin-guide.gguf      train.py's folder -> GGUF file
python -m tools.guide.export unpack presets/orin-guide.gguf out    GGUF file -> a folder for train.py --start
python -m tools.guide.export convert presets/orin-guide.gguf guide-q4_k.gguf --quant Q4_K
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from tools.guide.bpe import from_merges
from tools.guide.k_quants import quantize_q4_k, quantize_q6_k
from tools.guide.shape import SHAPE, Shape
from tools.guide.template import PRETOKENIZER, SPECIALS, TEMPLATE

KNOWN = "orin-guide.known"
"""The GGUF key that holds, as JSON, the texts that the guide must say for each fact about the program."""
MIXES = {"F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0", "Q6_K": "MOSTLY_Q6_K", "Q4_K": "MOSTLY_Q4_K_S"}

SHARPNESS = 4.0
"""The last norm of the file multiplies the logits by this. Most programs start at a temperature of 0.7 or 0.8, and the
guide then answers as at a quarter of that: only one answer to a question about a fact is right. It is a power of two,
so that nothing is rounded."""
LAST_NORM = "output_norm.weight"

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Guide:
    """A guide in memory. `weights` float32 by GGUF name, matrices (rows, cols); `tokens` in GPT-2's spelling of bytes,
    without the special ones; `merges` as "left right"; `known` the texts that it must say, by fact id."""

    shape: Shape
    weights: Weights
    tokens: Sequence[str]
    merges: Sequence[str]
    known: Mapping[str, Sequence[str]]


def trained(folder: Path) -> Guide:
    """The guide in a folder of train.py."""
    weights: dict[str, NDArray[np.float32]] = {}
    for path in sorted(folder.glob("weights-*.npz")):
        with np.load(path) as part:
            weights |= {name: part[name].astype(np.float32) for name in part.files}
    weights[LAST_NORM] *= SHARPNESS
    bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab = bpe.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    if tuple(tokens[-len(SPECIALS) :]) != SPECIALS:
        raise ValueError(f"the last tokens of {folder}/tokenizer.json are not {SPECIALS}")
    merges = json.loads(bpe.to_str())["model"]["merges"]
    known = json.loads((folder / "known.json").read_text("utf-8"))
    shape = Shape(**json.loads((folder / "report.json").read_text("utf-8"))["shape"])
    return Guide(shape, weights, tokens[: -len(SPECIALS)], [" ".join(pair) for pair in merges], known)


def read(path: Path) -> Guide:
    """The guide in a GGUF file, with weights of any type."""
    file = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return file.get_field(key).contents()

    weights = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in file.tensors
    }
    shape = Shape(
        layers=value("llama.block_count"),
        dim=value("llama.embedding_length"),
        heads=value("llama.attention.head_count"),
        kv_heads=value("llama.attention.head_count_kv"),
        ffn=value("llama.feed_forward_length"),
        vocab=len(value("tokenizer.ggml.tokens")),
        context=value("llama.context_length"),
    )
    tokens = value("tokenizer.ggml.tokens")[: -len(SPECIALS)]
    return Guide(shape, weights, tokens, value("tokenizer.ggml.merges"), json.loads(value(KNOWN)))


def unpack(guide: Guide, folder: Path) -> None:
    """Writes weights-0.npz, tokenizer.json, known.json and report.json, as train.py does."""
    folder.mkdir(parents=True, exist_ok=True)
    unscaled = {**guide.weights, LAST_NORM: guide.weights[LAST_NORM] / SHARPNESS}
    weights: dict[str, Any] = {name: data.astype(np.float16) for name, data in unscaled.items()}
    np.savez(folder / "weights-0.npz", **weights)
    (folder / "tokenizer.json").write_text(from_merges(guide.tokens, guide.merges).to_str(), "utf-8")
    (folder / "known.json").write_text(json.dumps(guide.known), "utf-8")
    (folder / "report.json").write_text(json.dumps({"shape": vars(guide.shape)}), "utf-8")


def pack(guide: Guide, path: Path, quant: str = "Q8_0") -> None:
    """Writes `guide` as a GGUF file with matrices of the type `quant`: F16, Q8_0, Q6_K or Q4_K. With Q4_K the
    embedding, which is also the output head, is Q6_K, as in Q4_K_M."""
    shape = guide.shape
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("orin-guide")
    writer.add_description("A small model that answers questions about orin-chat; built into it")
    writer.add_license("MIT")
    writer.add_file_type(gguf.LlamaFileType[MIXES[quant]])
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocab)
    writer.add_string(KNOWN, json.dumps(guide.known))

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRETOKENIZER)
    writer.add_token_list([*guide.tokens, *SPECIALS])
    types = [gguf.TokenType.NORMAL] * len(guide.tokens) + [gguf.TokenType.CONTROL] * len(SPECIALS)
    writer.add_token_types(types)
    writer.add_token_merges(guide.merges)
    writer.add_bos_token_id(len(guide.tokens))
    writer.add_eos_token_id(len(guide.tokens) + SPECIALS.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    for name, data in guide.weights.items():
        if data.ndim == 1:
            writer.add_tensor(name, data.astype(np.float32))
            continue
        kind = "Q6_K" if quant == "Q4_K" and name == "token_embd.weight" else quant
        writer.add_tensor(name, quantized(data, kind), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(data: NDArray[np.float32], quant: str) -> NDArray[Any]:
    """A matrix float32 (rows, cols) as the file stores it: float16 (rows, cols), or uint8 (rows, bytes of a row)."""
    if quant == "Q6_K":
        return quantize_q6_k(data)
    if quant == "Q4_K":
        return quantize_q4_k(data)
    stored: NDArray[Any] = gguf.quantize(data, Type[quant])
    return stored


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pack", "unpack", "convert"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--quant", choices=MIXES, default="Q8_0")
    given = parser.parse_args()
    if given.what == "pack":
        guide = trained(given.source)
        if guide.shape != SHAPE:
            raise SystemExit(f"this is a {guide.shape}, and the guide says of itself that it is a {SHAPE}")
        pack(guide, given.target, given.quant)
    elif given.what == "unpack":
        unpack(read(given.source), given.target)
    else:
        pack(read(given.source), given.target, given.quant)


if __name__ == "__main__":
    main()
