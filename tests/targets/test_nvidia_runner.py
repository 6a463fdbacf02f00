"""What a runner for NVIDIA GPUs decides before it launches kernels. `tests/kernels/gpu` runs them."""

from types import SimpleNamespace

import pytest

from engine.runtime.model_runner import Slot
from engine.targets.nvidia.memory import CHUNK_SIZES as SIZES
from engine.targets.nvidia.runner import NvidiaRunner


@pytest.mark.parametrize(
    ("tokens", "compiled", "launched"),
    [
        (200, SIZES, [(256, 0, 200)]),
        (200, (32,), [(32, at, min(32, 200 - at)) for at in range(0, 200, 32)]),
        (200, (32, 128, 512), [(128, 0, 128), (128, 128, 72)]),
        (200, (32, 512), [(512, 0, 200)]),
        (200, (), [(32, at, min(32, 200 - at)) for at in range(0, 200, 32)]),  # the first compiles them
        (3, (), [(1, 0, 1), (1, 1, 1), (1, 2, 1)]),
        (3, SIZES, [(32, 0, 3)]),
    ],
)
def test_a_prompt_is_read_in_pieces_whose_kernels_are_compiled(tokens, compiled, launched):
    seen = []
    runner = SimpleNamespace(
        _size_of=lambda n: next(size for size in SIZES if n <= size),
        _has_prefill=lambda size: size in compiled,
        _steps=SimpleNamespace(decode=lambda rows, ahead: seen.append((1, rows[0].position, 1))),
        _launch_prefill=lambda size, pieces: seen.append((size, pieces[0].position, len(pieces[0].inputs))),
    )
    NvidiaRunner._store_one(runner, Slot(0, (7,) * tokens, 0, "none"))
    assert seen == launched
