"""Damaged and crafted model files: the reader, the description of the model, the tokenizer and the weight loader."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from hypothesis import strategies as st

from engine.description.architectures import read_spec
from engine.errors import OrinError
from engine.formats.gguf import GGUF
from engine.formats.prompt import PromptEncoder
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


def run(tries: int, number: int = 0) -> Counts:
    """Changes bytes of the heads of small models, or cuts them, and reads all that a start reads before it computes."""
    counts = Counts("model files with changed bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        files = [
            generated_model.write(path, architecture=name, layers=3).read_bytes() for name in ARCHITECTURES
        ]
        heads = []
        for data in files:
            path.write_bytes(data)
            with GGUF(path) as file:
                heads.append(len(data) - sum(tensor.data.nbytes for tensor in file.tensors.values()))

        @drawn(tries, number, st.integers(0, len(files) - 1), CHANGES, st.none() | st.floats(0, 1))
        def read(which: int, changes: list[tuple[float, bytes]], cut: float | None) -> None:
            data = bytearray(files[which])
            for place, piece in changes:
                start = int(place * heads[which])
                data[start : start + len(piece)] = piece
            path.write_bytes(data if cut is None else data[: int(cut * len(data))])
            started = time.perf_counter()
            try:
                _read(path)
                counts.survived["read"] += 1
            except OrinError:
                counts.survived["refused"] += 1
            except Exception as error:
                counts.lost[f"{type(error).__name__}: {str(error)[:60]}"] += 1
            counts.took((time.perf_counter() - started) * 1e3)

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
