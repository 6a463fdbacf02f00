"""Types of grids as they are read, against the gguf package's own dequantization."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.description.architectures import read_spec
from engine.formats.ggml_types import GGML_TYPES
from engine.formats.gguf import GGUF
from engine.formats.quantization import FORMATS, WIDENED, WIDER, read_as
from engine.formats.widening import file_bytes, widened
from engine.loading.weights import Weights
from tests import generated_model
from tests.quantized_blocks import Q2_0, dequantized, random_blocks

KINDS = sorted(WIDER)


def values_of(kind: int, raw: np.ndarray) -> np.ndarray:
    """The weights in blocks of a type of `WIDENED`, float32 (n,)."""
    format = WIDENED[kind]
    (scales,), (q,) = format.scale, format.q
    blocks = raw.reshape(-1, format.block_bytes)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32) * np.float32(format.factor)
    factors = d * blocks[:, scales[0].byte : q.byte].view(np.int8)
    indices = np.concatenate([blocks[:, q.byte :] & 15, blocks[:, q.byte :] >> 4], axis=1)
    return (factors.repeat(format.group, 1) * np.array(format.codebook)[indices]).reshape(-1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: GGML_TYPES[kind].name)
def test_weights_stay_what_they_are(kind: int) -> None:
    blocks = random_blocks(kind, 500, 512)
    wanted = dequantized(kind, blocks).reshape(-1)
    wide = widened(kind, blocks.reshape(-1))
    assert file_bytes(kind, wide.size) == blocks.size
    is_file_s = read_as(kind) in GGML_TYPES
    got = dequantized(read_as(kind), wide.reshape(500, -1)) if is_file_s else values_of(read_as(kind), wide)
    np.testing.assert_array_equal(got.reshape(-1), wanted)


def test_small_scales_of_nvfp4_are_rounded() -> None:
    """Of any scales, all weights are within half a step of the largest one's, of which there are 64 to 120."""
    blocks = np.random.default_rng(3).integers(0, 256, (500, 36), dtype=np.uint8)
    wanted = dequantized(Type.NVFP4, blocks)
    got = values_of(read_as(Type.NVFP4), widened(Type.NVFP4, blocks.reshape(-1))).reshape(500, 64)
    largest = gguf.quants.NVFP4.ue4m3_to_fp32(blocks[:, :4]).max(1)  # of doubled numbers, up to 12
    assert (abs(got - wanted).max(1) <= 12 * largest / 128).all()


def test_a_file_cannot_have_a_type_of_memory() -> None:
    assert GGML_TYPES.keys() & WIDENED.keys() == {Type.TQ2_0, Q2_0}


@pytest.mark.parametrize(
    "kind, architecture",
    [("IQ2_XS", "llama"), ("NVFP4", "llama"), ("NVFP4", "qwen3moe"), ("TQ2_0", "bitnet-b1.58")],
)
def test_any_part_of_a_matrix_is_read_the_same(kind: str, architecture: str, tmp_path: Path) -> None:
    """Rows at once, and bytes from anywhere to anywhere, as uploads to GPUs read them."""
    path = generated_model.write(
        tmp_path / "model.gguf", quant=kind, architecture=architecture, dim=256, ffn=512, layers=1
    )
    with GGUF(path) as file:
        done: list[int] = []
        weights = Weights(file, read_spec(file), done.append)
        weight = next(w for w in weights.spec.weights() if w.name.startswith("ffn_down"))
        n_rows = weight.experts * weight.rows
        whole = weights.read(weight, range(n_rows))
        info = file.tensors[weight.tensor]
        assert whole.size == weight.n_bytes == weights.n_bytes(weight, range(n_rows)) >= info.n_bytes
        format = FORMATS[weight.type]
        blocks, of_d = whole.reshape(-1, format.block_bytes).copy(), slice(format.d, format.d + 2)
        unscaled = widened(info.type, info.data).reshape(blocks.shape)
        if weight.scale:
            scale = file.tensors[weight.scale].read().view(np.float32)
            scale = scale.repeat(len(blocks) // weight.experts)[:, None]
            d, own = (b[:, of_d].copy().view(np.float16).astype(np.float32) for b in (blocks, unscaled))
            np.testing.assert_allclose(d, own * scale, rtol=2**-11)
            blocks[:, of_d] = unscaled[:, of_d]
        np.testing.assert_array_equal(blocks, unscaled)
        if weight.experts == 1:
            np.testing.assert_array_equal(weights.mapped(weight).reshape(-1), whole)
        rows = whole.reshape(n_rows, -1)
        np.testing.assert_array_equal(weights.read(weight, range(3, 40)), rows[3:40].reshape(-1))
        for start, n in ((0, 1), (145, 2), (146, 146), (1, rows[3:40].size // 2), (rows[3:40].size - 7, 7)):
            out = bytearray(n)
            weights.read_into(weight, range(3, 40), start, memoryview(out))
            assert bytes(out) == rows[3:40].tobytes()[start : start + n]
        weights.release(weight, range(3, 40))
        assert done[-1] == weight.n_bytes * (weight.experts == 1) + 37 * weight.row_bytes
