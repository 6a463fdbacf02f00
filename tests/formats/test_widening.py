"""Types of grids as they are read, against the gguf package's own dequantization."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.description.architectures import read_spec
from engine.formats.ggml_types import GGML_TYPES
from engine.formats.gguf import GGUF
from engine.formats.quantization import WIDENED, WIDER, read_as
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


def test_a_file_cannot_have_a_type_of_memory() -> None:
    assert GGML_TYPES.keys() & WIDENED.keys() == {Type.TQ2_0, Q2_0}


def test_any_part_of_a_matrix_is_read_the_same(tmp_path: Path) -> None:
    """Rows at once, and bytes from anywhere to anywhere, as uploads to GPUs read them."""
    path = generated_model.write(tmp_path / "model.gguf", quant="IQ2_XS", dim=256, ffn=512, layers=1)
    with GGUF(path) as file:
        done: list[int] = []
        weights = Weights(file, read_spec(file), done.append)
        weight = next(w for w in weights.spec.weights() if w.name == "ffn_down")
        whole = weights.read(weight, range(weight.rows))
        info = file.tensors[weight.tensor]
        assert whole.size == weight.n_bytes == weights.n_bytes(weight, range(weight.rows)) > info.n_bytes
        np.testing.assert_array_equal(whole, widened(info.type, info.data))
        np.testing.assert_array_equal(weights.mapped(weight).reshape(-1), whole)
        rows = whole.reshape(weight.rows, -1)
        np.testing.assert_array_equal(weights.read(weight, range(3, 40)), rows[3:40].reshape(-1))
        for start, n in ((0, 1), (145, 2), (146, 146), (1, 9000), (rows[3:40].size - 7, 7)):
            out = bytearray(n)
            weights.read_into(weight, range(3, 40), start, memoryview(out))
            assert bytes(out) == rows[3:40].tobytes()[start : start + n]
        weights.release(weight, range(3, 40))
        assert done[-1] == weight.n_bytes + 37 * weight.row_bytes
