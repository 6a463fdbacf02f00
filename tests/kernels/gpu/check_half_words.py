"""Pairs of float16 in words, through CUDA's functions and through UOps alone."""

from unittest.mock import patch

import numpy as np
from tinygrad import UOp, dtypes

from engine.kernels.kernel import Kernel
from engine.targets.nvidia.kernels import half_words
from engine.targets.nvidia.kernels.half_words import chosen_bytes, halves, integers, product, word_of
from engine.targets.nvidia.kernels.uops import F32, finish, load, store, store_run
from tests.kernels.gpu.buffers import buffer, rng, run, zeros


def _results(words: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Of each pair of words: (the words that are made of them, float32 numbers)"""

    def kernel(out: UOp, numbers: UOp, ins: UOp) -> UOp:
        thread = UOp.special(words.shape[0], "lidx0")
        a, b = (load(ins, thread * 2 + i) for i in (0, 1))
        made = [word_of(halves(a)[1], halves(b)[0]), chosen_bytes(a, b, (0, 4, 2, 6))]
        floats = [*product(halves(a), halves(b)), *integers(a, (0, 2, 1, 3), 128)]
        stores = store_run(out, thread * len(made), made)
        stores += [store(numbers, thread * len(floats) + i, x.cast(F32)) for i, x in enumerate(floats)]
        return finish(f"half_words_{name}", stores)

    out, numbers = zeros(len(words) * 2, dtypes.uint32), zeros(len(words) * 6)
    run(Kernel(kernel, ("out", "numbers"), ("ins",)), out, numbers, buffer(words))
    return out.numpy().reshape(-1, 2), numbers.numpy().reshape(-1, 6)


def check_half_words() -> None:
    """Products of halves, bytes chosen from two words, and bytes as numbers."""
    parts = rng.uniform(-4, 4, (32, 2, 2)).astype(np.float16)
    words, each = parts.view(np.uint32)[..., 0], parts.view(np.uint8).reshape(32, 2, 4)
    joined = np.stack([parts[:, 0, 1], parts[:, 1, 0]], -1).view(np.uint32)
    chosen = np.stack([each[:, 0, 0], each[:, 1, 0], each[:, 0, 2], each[:, 1, 2]], -1).view(np.uint32)
    wanted = np.concatenate(
        [parts[:, 0] * parts[:, 1], each[:, 0, [0, 2, 1, 3]].astype(np.float32) - 128], -1
    )
    for name in ("own", "plain"):
        with patch.object(half_words, "is_cuda", half_words.is_cuda if name == "own" else lambda: False):
            made, numbers = _results(words, name)
        assert np.array_equal(made, np.concatenate([joined, chosen], -1))
        np.testing.assert_allclose(numbers, wanted, rtol=1e-3)
