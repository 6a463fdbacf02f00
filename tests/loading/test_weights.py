"""How matrices come from the file: in pieces, each released before the next is read."""

import gguf
import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.description.sublayers import Weight
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.formats.rope_order import HeadOrder
from engine.loading import weights
from engine.loading.weights import Weights, blank_end, pieces
from engine.targets.cpu.kernels.thread_pool import default_pool
from engine.targets.cpu.weights import CPUWeights
from engine.targets.graph.parts import load_matrix
from tests import generated_model
from tests.reference_weights import read_gguf
from tests.thorough import rarely

MIB = 1 << 20


class CountedWeights(Weights):
    """Counts the bytes of the file that are read and not released yet: now, and at most. Each of them is in memory
    beside the device's copy."""

    live = most = released = 0

    def read(self, weight, rows):
        data = super().read(weight, rows)
        self.live += data.nbytes
        self.most = max(self.most, self.live)
        return data

    def release(self, weight, rows):
        super().release(weight, rows)
        n_bytes = len(rows) * weight.row_bytes
        self.live -= min(self.live, n_bytes)
        self.released += n_bytes


@pytest.mark.parametrize(
    "weight, multiple, side_by_side, lengths",
    [
        (Weight("q", 4096, 4096, 12), 16, 1, {4096}),
        (Weight("gate", 768, 2048, 12, experts=128), 16, 1, {32_768}),
        (Weight("gate", 768, 2048, 12, experts=128), 16, 2, {16_384}),  # with up, six pieces each
        (Weight("head", 50_257, 2048, 14), 16, 1, {32_768, 50_257 - 32_768}),  # no even number of rows
        (Weight("k", 1800, 65_536, 8, order=HeadOrder(120, 120, True)), 16, 1, {960, 840}),  # whole heads
        (Weight("long", 64, 2 * MIB, 0), 16, 1, {16}),  # at least as many as belong together
    ],
)
def test_large_matrices_come_in_pieces(weight, multiple, side_by_side, lengths):
    cut = pieces(weight, multiple, side_by_side)
    assert [row for rows in cut for row in rows] == list(range(weight.experts * weight.rows))
    assert {len(rows) for rows in cut} == lengths


@pytest.mark.parametrize("device", ["CPU", rarely("graph")])
def test_one_piece_at_a_time_is_in_memory(tmp_path, monkeypatch, device):
    monkeypatch.setattr(weights, "PIECE_BYTES", 2048)
    path = generated_model.write(tmp_path / "model.gguf", quant="F32", layers=1, tied=True)
    done: list[int] = []
    file = GGUF(path)
    counted = CountedWeights(file, read_spec(file), done.append, keep_cached=False)
    weight = counted.spec.embedding
    if device == "CPU":
        CPUWeights(counted, default_pool(), 8, keep_packed=False).matrix(weight)
    else:
        load_matrix(counted, weight)
    assert (counted.live, counted.released) == (0, weight.n_bytes)
    assert counted.most <= 2048 < weight.n_bytes / 4
    assert done == [*range(counted.most, weight.n_bytes, counted.most), weight.n_bytes]


def test_rows_that_lie_between_those_of_another_matrix(tmp_path):
    file = GGUF(generated_model.write(tmp_path / "model.gguf", quant="F32", layers=1))
    tensor = "blk.0.ffn_up.weight"
    rows, cols = file.tensors[tensor].shape
    opened = Weights(file, read_spec(file), lambda done: None)
    values = opened.read(Weight(tensor, rows, cols, 0), range(rows)).view("float32").reshape(rows, cols)
    second = Weight(tensor, rows // 2, cols, 0, first=4, every=8, run=4)
    for piece in range(rows // 2), range(3, 9):
        read = opened.read(second, piece).view("float32").reshape(-1, cols)
        into = bytearray(opened.n_bytes(second, piece) - 7)
        opened.read_into(second, piece, 7, memoryview(into))
        assert into == read.tobytes()[7:]
        opened.release(second, piece)
        assert (read == values[[row // 4 * 8 + 4 + row % 4 for row in piece]]).all()
        into, start = bytearray(read.nbytes - 60), 44  # in the middle of rows
        opened.read_into(second, piece, start, memoryview(into))
        assert into == read.tobytes()[start : start + len(into)]


@pytest.mark.parametrize("is_blank", [True, False])
def test_a_download_whose_end_is_still_zeros(tmp_path, is_blank):
    path = generated_model.write(tmp_path / "model.gguf", layers=2)
    file = GGUF(path)
    spec = read_spec(file)
    infos = sorted((file.tensors[weight.tensor] for weight in spec.weights()), key=lambda info: info.place())
    with path.open("r+b") as written:
        for info in infos[-1:] if is_blank else infos[:-1]:
            written.seek(info.place()[1])
            written.write(bytes(info.n_bytes))
    assert ("unfinished download" in blank_end(GGUF(path), spec)) is is_blank


def test_a_transpose_is_read_in_any_pieces(tmp_path):
    """Of each head the rows of its keys, whose values follow: as floats of 16 bits."""
    path = generated_model.write(tmp_path / "model.gguf", architecture="deepseek2-lite")
    file = GGUF(path)
    spec = read_spec(file)
    part, all_weights = spec.attention[0], Weights(file, spec, lambda _: None)
    weight, rows = part.of_keys, range(part.heads * part.latent)
    [tensor] = [t for t in read_gguf(path).tensors if t.name == weight.tensor]
    both = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(part.heads, -1, part.latent)
    wanted = both[:, : part.plain].transpose(0, 2, 1).astype(np.float16).tobytes()
    assert all_weights.read(weight, rows).tobytes() == wanted
    inside, start = range(50, 140), 70  # of three heads, and from within a row on
    out = bytearray(len(inside) * weight.row_bytes - 100)
    all_weights.read_into(weight, inside, start, memoryview(out))
    assert out == wanted[inside.start * weight.row_bytes + start :][: len(out)]


@pytest.mark.parametrize("quant", ["F16", "Q4_1"])
def test_a_scale_that_makes_numbers_too_large_is_refused(tmp_path, quant):
    path = generated_model.write(tmp_path / "model.gguf", architecture="talkie", quant=quant)
    reader = gguf.GGUFReader(path, "r+")
    [scale] = [tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_output.scale"]
    scale.data[0] = 1e9
    reader.data.flush()
    file = GGUF(path)
    spec = read_spec(file)
    weight = spec.attention[0].o
    with pytest.raises(ModelFileError, match=r"attn_output\.scale is 1e\+09"):
        Weights(file, spec, lambda _: None).read(weight, range(weight.rows))
