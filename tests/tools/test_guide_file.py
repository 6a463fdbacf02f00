"""The guide's file: written, read back, converted to other types of weights."""

import json

import gguf
import numpy as np
import pytest

from tools.guide import bpe, export
from tools.guide.k_quants import quantize_q4_k, quantize_q6_k
from tools.guide.shape import Shape
from tools.guide.template import SPECIALS

SHAPE = Shape(layers=1, dim=256, heads=4, kv_heads=2, ffn=256, vocab=300, context=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As train.py leaves it."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    narrow = SHAPE.kv_heads * SHAPE.head_dim
    sizes = {
        "token_embd.weight": (SHAPE.vocab, SHAPE.dim), "output_norm.weight": (SHAPE.dim,),
        "blk.0.attn_norm.weight": (SHAPE.dim,), "blk.0.attn_q.weight": (SHAPE.dim, SHAPE.dim),
        "blk.0.attn_k.weight": (narrow, SHAPE.dim), "blk.0.attn_v.weight": (narrow, SHAPE.dim),
        "blk.0.attn_output.weight": (SHAPE.dim, SHAPE.dim), "blk.0.ffn_norm.weight": (SHAPE.dim,),
        "blk.0.ffn_gate.weight": (SHAPE.ffn, SHAPE.dim), "blk.0.ffn_up.weight": (SHAPE.ffn, SHAPE.dim),
        "blk.0.ffn_down.weight": (SHAPE.dim, SHAPE.ffn),
    }  # fmt: skip
    weights = {name: (0.05 * rng.standard_normal(size)).astype(np.float16) for name, size in sizes.items()}
    np.savez(folder / "weights-0.npz", **dict(list(weights.items())[:4]))
    np.savez(folder / "weights-1.npz", **dict(list(weights.items())[4:]))
    texts = ["the model reads the prompt and then it writes the reply, a token at a time, " * 9]
    bpe.trained(texts, SHAPE.vocab).save(str(folder / "tokenizer.json"))
    (folder / "known.json").write_text(json.dumps({"key.stop.press": ["Esc"]}))
    (folder / "report.json").write_text(json.dumps({"shape": vars(SHAPE)}))
    return folder


def test_pack_and_read(folder, tmp_path):
    guide = export.trained(folder)
    assert len(guide.weights) == 11 and len(guide.tokens) == SHAPE.vocab - len(SPECIALS)
    for quant, loss in {"F16": 0, "Q8_0": 0.01, "Q6_K": 0.03, "Q4_K": 0.1}.items():
        path = tmp_path / f"{quant}.gguf"
        export.pack(guide, path, quant)
        again = export.read(path)
        assert again.shape == guide.shape
        assert (again.tokens, again.merges) == (guide.tokens, guide.merges)
        assert again.known == {"key.stop.press": ["Esc"]}
        for name, weights in guide.weights.items():
            far = np.linalg.norm(again.weights[name] - weights) / np.linalg.norm(weights)
            assert far <= (loss if weights.ndim == 2 else 0), (quant, name)


def test_unpacked_it_can_be_trained_on(folder, tmp_path):
    guide = export.trained(folder)
    export.unpack(guide, tmp_path)
    again = export.trained(tmp_path)
    assert again.shape == guide.shape and (again.tokens, again.merges) == (guide.tokens, guide.merges)
    assert all(np.array_equal(again.weights[name], weights) for name, weights in guide.weights.items())
    text = "the model writes 17 tokens, isn't it?"
    one, other = (bpe.from_merges(g.tokens, g.merges).encode(text).ids for g in (guide, again))
    assert (
        one == other == export.tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    )


@pytest.mark.parametrize(
    ("quantize", "kind", "bound"), [(quantize_q6_k, "Q6_K", 0.02), (quantize_q4_k, "Q4_K", 0.09)]
)
def test_k_quants(quantize, kind, bound):
    rng = np.random.default_rng(1)
    weights = (0.02 * rng.standard_normal((8, 512))).astype(np.float32)
    weights[2] = 0  # no scale at all
    weights[3, :256] += 0.5  # far from zero
    weights[4, 7] = 3.0  # one large among small ones
    stored = quantize(weights)
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert stored.dtype == np.uint8 and stored.shape == (8, 512 // block * block_bytes)
    back = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
    assert not back[2].any()
    for row in (0, 1, 3, 5, 6, 7):
        assert np.linalg.norm(back[row] - weights[row]) < bound * np.linalg.norm(weights[row])
