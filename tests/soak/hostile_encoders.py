"""Damaged and crafted encoders of pictures ("mmproj"): the reader, the weights, and a picture through what is read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from engine.description.encoder_input import resized
from engine.description.encoder_kinds import KINDS
from engine.description.vision_reader import read_vision
from engine.errors import OrinError
from engine.formats.gguf import GGUF
from engine.loading.weights import FileWeights
from engine.targets.graph.vision import GraphEncoder
from tests import generated_encoder
from tests.soak.counts import Counts
from tests.soak.drawn import drawn
from tests.soak.hostile_files import CHANGES, changed, head_size

PICTURE = np.random.default_rng(3).integers(0, 256, (30, 40, 3), np.uint8)


def run(tries: int, number: int = 0) -> Counts:
    """Changes bytes of small encoders, most of them in their heads, or cuts them, and encodes a picture."""
    counts = Counts("encoders with changed bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mmproj.gguf")
        files = [generated_encoder.write(path, kind).read_bytes() for kind in KINDS]
        files.append(generated_encoder.write(path, "qwen3vl_merger", deep=True).read_bytes())
        heads = [head_size(path, data) for data in files]

        @drawn(
            tries, number, st.integers(0, len(files) - 1), CHANGES, st.none() | st.floats(0, 1), st.booleans()
        )
        def read(which: int, changes: list[tuple[float, bytes]], cut: float | None, in_head: bool) -> None:
            size = heads[which] if in_head else len(files[which])
            path.write_bytes(changed(files[which], changes, size, cut))
            with counts.trying():
                try:
                    with GGUF(path) as file:
                        spec = read_vision(file)
                        encoder = GraphEncoder(FileWeights(file, list(spec.weights()), lambda _: None), spec)
                        for _ in encoder.encode(resized(spec, PICTURE)):
                            pass
                    counts.survived["a picture encoded"] += 1
                except OrinError:
                    counts.survived["refused"] += 1

        read()
    return counts
