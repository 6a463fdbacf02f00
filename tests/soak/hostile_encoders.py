"""Damaged and crafted encoders of pictures ("mmproj"): the reader, the weights, and a picture through what is read."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from engine.description.vision_reader import KINDS, read_vision
from engine.errors import OrinError
from engine.formats.gguf import GGUF
from engine.loading.weights import FileWeights
from engine.pictures import resized
from engine.targets.graph.vision import GraphEncoder
from tests import generated_encoder
from tests.soak.counts import Counts
from tests.soak.drawn import drawn
from tests.soak.hostile_files import CHANGES

PICTURE = np.random.default_rng(3).integers(0, 256, (30, 40, 3), np.uint8)


def run(tries: int, number: int = 0) -> Counts:
    """Changes bytes of small encoders, most of them in their heads, or cuts them, and encodes a picture."""
    counts = Counts("encoders with changed bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mmproj.gguf")
        files = [generated_encoder.write(path, kind).read_bytes() for kind in KINDS]
        files.append(generated_encoder.write(path, "qwen3vl_merger", deep=True).read_bytes())
        heads = []
        for data in files:
            path.write_bytes(data)
            with GGUF(path) as file:
                heads.append(len(data) - sum(tensor.data.nbytes for tensor in file.tensors.values()))

        @drawn(
            tries, number, st.integers(0, len(files) - 1), CHANGES, st.none() | st.floats(0, 1), st.booleans()
        )
        def read(which: int, changes: list[tuple[float, bytes]], cut: float | None, in_head: bool) -> None:
            data = bytearray(files[which])
            for place, piece in changes:
                start = int(place * (heads[which] if in_head else len(data)))
                data[start : start + len(piece)] = piece
            path.write_bytes(data if cut is None else data[: int(cut * len(data))])
            started = time.perf_counter()
            try:
                with GGUF(path) as file:
                    spec = read_vision(file)
                    encoder = GraphEncoder(FileWeights(file, list(spec.weights()), lambda _: None), spec)
                    for _ in encoder.encode(resized(spec, PICTURE)):
                        pass
                counts.survived["a picture encoded"] += 1
            except OrinError:
                counts.survived["refused"] += 1
            except Exception as error:
                counts.lost[f"{type(error).__name__}: {str(error)[:60]}"] += 1
            counts.took((time.perf_counter() - started) * 1e3)

        read()
    return counts
