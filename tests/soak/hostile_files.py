"""Damaged and crafted model files: the reader, the description of the model, the tokenizer and the weight loader."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st

from engine.description.architectures import read_spec
from engine.errors import OrinError
from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.loading.weights import Weights, pieces
from engine.model.memory_need import memory_need
from tests import generated_model
from tests.soak.counts import Counts
from tests.soak.drawn import drawn

ARCHITECTURES = ("llama", "gemma3", "qwen3moe", "gpt-oss", "qwen35", "granitehybrid", "phi2")
_NUMBERS = st.sampled_from([0, 1, 2, 8, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])
_PIECES = st.one_of(
    st.binary(min_size=1, max_size=12),
    _NUMBERS.map(lambda number: number.to_bytes(8, "little")),
    _NUMBERS.map(lambda number: (number & 0xFFFFFFFF).to_bytes(4, "little")),
)
CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), _PIECES), min_size=1, max_size=4)


def changed(data: bytes, changes: list[tuple[float, bytes]], size: int, cut: float | None) -> bytes:
    """A file with pieces of its first `size` bytes replaced, each at its part of them, and all but a part of it cut."""
    new = bytearray(data)
    for place, piece in changes:
        start = int(place * size)
        new[start : start + len(piece)] = piece
    return bytes(new if cut is None else new[: int(cut * len(new))])


def head_size(path: Path, data: bytes) -> int:
    """The bytes of a model file that are not its tensors'. Writes it to `path`."""
    path.write_bytes(data)
    with GGUF(path) as file:
        return len(data) - sum(tensor.data.nbytes for tensor in file.tensors.values())


def run(tries: int, number: int = 0) -> Counts:
    """Changes bytes of the heads of small models, or cuts them, and reads all that a start reads before it computes."""
    counts = Counts("model files with changed bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        files = [
            generated_model.write(path, architecture=name, layers=3).read_bytes() for name in ARCHITECTURES
        ]
        heads = [head_size(path, data) for data in files]

        @drawn(tries, number, st.integers(0, len(files) - 1), CHANGES, st.none() | st.floats(0, 1))
        def read(which: int, changes: list[tuple[float, bytes]], cut: float | None) -> None:
            path.write_bytes(changed(files[which], changes, heads[which], cut))
            with counts.trying():
                try:
                    _read(path)
                    counts.survived["read"] += 1
                except OrinError:
                    counts.survived["refused"] += 1

        read()
    return counts


def _read(path: Path) -> None:
    with GGUF(path) as file:
        spec = read_spec(file)
        _ = memory_need(spec).total_bytes
        encoder = PromptEncoder(file)
        encoder.tokenizer.encode("The water rises: größer 😀 <|im_start|>", special=True, add_special=True)
        weights = Weights(file, spec, lambda done: None)
        for weight in spec.weights():
            for rows in pieces(weight):
                weights.read(weight, rows)
