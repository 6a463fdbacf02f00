"""Sequences with pictures have the angles of their positions, as far as steps read them."""

from types import SimpleNamespace

import numpy as np

from engine.description.spec import Rope
from engine.formats.templates.prompt_pictures import PlacedPicture, SizedPicture
from engine.kernels.device_memory import to_device
from engine.runtime.model_runner import Slot
from engine.runtime.pictures import PictureRoom, Pictures, positions_of
from engine.targets.nvidia import mrope_angles
from engine.targets.nvidia.mrope_angles import MRopeAngles

CONTEXT, PARALLEL = 256, 2


def pictures(*places):
    """Each with its first token, rows and columns."""
    seen = ((at, SizedPicture((), r, c, tuple(range(-r * c, 0)), "")) for at, r, c in places)
    return Pictures([PlacedPicture(at, picture) for at, picture in seen])


def test_rows_are_those_of_the_pictures_and_of_texts_after_them(monkeypatch):
    monkeypatch.setattr(mrope_angles, "_AHEAD", 16)
    rope = Rope(pairs=4, frequencies=(1.0, 0.5, 0.25, 0.1), sections=(2, 1, 1))
    length = MRopeAngles(SimpleNamespace(spec=SimpleNamespace(ropes=()), ropes=()), CONTEXT, 1, None)._length
    tables = rope.tables(length, CONTEXT)
    tensors = [to_device(np.tile(table.reshape(-1), PARALLEL)) for table in tables]
    model = SimpleNamespace(spec=SimpleNamespace(ropes=(rope,)), ropes=(tensors,))
    angles = MRopeAngles(model, CONTEXT, PARALLEL, PictureRoom(0))
    rng = np.random.default_rng(7)
    kinds = [None, pictures((3, 2, 3)), pictures((40, 4, 2), (60, 3, 3)), pictures((0, 5, 1))]
    for _ in range(60):
        own, at, n, row = (
            kinds[rng.integers(4)],
            int(rng.integers(240)),
            int(rng.integers(1, 16)),
            int(rng.integers(2)),
        )
        for position in range(0, at + 1, max(1, at // 3)):
            angles.turn([Slot(row, (1,) * n, position, pictures=own)])
            end = min(position + n + 8, length)
            places = np.minimum(positions_of(own, 0, end), length - 1)
            for table, tensor in zip(tables, tensors, strict=True):
                got = tensor.numpy().reshape(PARALLEL, length, rope.pairs)[row, :end]
                assert np.array_equal(got, table[places[rope.turned_by].T, np.arange(rope.pairs)])
