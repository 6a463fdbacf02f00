"""Matrices, buffers and launches for the checks of GPU kernels, and what numpy expects of them."""

import functools
from unittest import mock

import numpy as np
from gguf import GGMLQuantizationType
from tinygrad import dtypes
from tinygrad.dtype import _from_np_dtype

from engine.formats.ggml_types import GGML_TYPES
from engine.formats.quantization import FORMATS
from engine.formats.widening import widened
from engine.kernels.device_memory import device_zeros, to_device
from engine.kernels.target import renderer
from engine.targets.nvidia.kernels.device import launches_early
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.pieces import state_of
from engine.targets.nvidia.kernels.sampling.sampling import Shortlist
from engine.targets.nvidia.kernels.weights.matrix_bytes import UNIT, units_of
from engine.targets.nvidia.kernels.weights.upload import Part, upload
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout, input_scale, permuted_size
from engine.targets.nvidia.kernels.weights.weight_repacking import MatrixSpec, TensorRows, repack
from tests.driver.compiler import SimulatedCompiler
from tests.quantized_blocks import IN_FILES, dequantized

FLOATS = {0: np.float32, 1: np.float16}
PACKED_ROWS = 64
rng = np.random.default_rng()


def begin() -> None:
    """Every check begins with the same random numbers, and packs its matrices on the device itself."""
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state
    _packed.cache_clear()


def brings_to_cache() -> bool:
    """Whether the GPU has the instruction that brings memory to its L2 cache; the simulated one has it."""
    return launches_early() or isinstance(renderer().compiler, SimulatedCompiler)


def random_matrix(ggml_type, rows, cols):
    """(bytes as they are read of a file, the weights as float32)"""
    if ggml_type in FLOATS:
        w = rng.standard_normal((rows, cols)).astype(FLOATS[ggml_type])
        return w.view(np.uint8).reshape(-1), w.astype(np.float32)
    kind = IN_FILES.get(ggml_type, ggml_type)
    format, (_, block, block_bytes) = FORMATS[ggml_type], GGML_TYPES[kind]
    blocks = rng.integers(0, 256, (rows * cols // block, block_bytes), dtype=np.uint8)
    halves = rng.uniform(0.01, 0.02, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind == GGMLQuantizationType.NVFP4:  # scales that stay what they are
        blocks[:, :4] = rng.integers(16, 40, (len(blocks), 4))
    elif format.exponent:
        blocks[:, format.d] = rng.integers(120, 124, len(blocks))
    else:
        blocks[:, format.d : format.d + 2] = halves[:, :2]
    if format.m is not None:
        blocks[:, format.m : format.m + 2] = halves[:, 2:]
    weights = dequantized(kind, blocks.reshape(rows, -1))
    return widened(kind, blocks.reshape(-1)), weights.astype(np.float32)


def packed(ggml_type, rows, cols=256):
    """(planes, weights as float32) of a matrix: the first rows of one that has at least PACKED_ROWS, so that kernels
    that pack are compiled once for many checks. Each plane holds row after row."""
    packed_rows = max(rows, PACKED_ROWS)
    planes, weights = _packed(ggml_type, packed_rows, cols)
    return [buffer(plane.numpy()[: plane.numel() * rows // packed_rows]) for plane in planes], weights[:rows]


@functools.cache
def _packed(ggml_type, rows, cols):
    raw, weights = random_matrix(ggml_type, rows, cols)
    spec = MatrixSpec(WeightLayout(ggml_type), (TensorRows(rows),), cols)
    planes = spec.allocate()
    repack(spec, upload([part_of(raw)]), planes)
    return planes, weights


def short_lists():
    """Runners that are made meanwhile rank so few tokens that the simulated board takes no seconds for it."""
    return mock.patch("engine.targets.nvidia.runner.Shortlist", functools.partial(Shortlist, length=64))


def part_of(values):
    """Bytes to upload, as if they were of a file."""

    def read(start, out):
        out[:] = values.data[start : start + len(out)]

    return Part(values.size, read)


def buffer(values):
    return to_device(values, _from_np_dtype(values.dtype))


def prompt_state(tokens, *pieces, replies=0):
    """The state of a step of pieces: of each the first row, the position, the number of tokens and the sequence."""
    return buffer(state_of(tokens, pieces, replies))


def zeros(n, dtype=dtypes.float32):
    return device_zeros(n, dtype)


def run(kernel, *buffers):
    """Launches a kernel with its buffers in the order of its names."""
    sequence = KernelSequence()
    sequence.add(kernel, **by_name(kernel, buffers))
    sequence.capture()()


def by_name(kernel, buffers):
    """The buffers of a kernel by their names, from those in the order of these."""
    named = {}
    for name, one in zip(kernel.buffers, buffers, strict=True):
        run, _, number = name.partition(".")
        if number:
            named.setdefault(run, []).append(one)
        else:
            named[name] = one
    return named


def places(cols):
    e = np.arange(cols)
    return (e % UNIT // 4 * units_of(cols) + e // UNIT) * 4 + e % 4


def laid_out(x, layout):
    out = np.zeros(permuted_size(x.size), np.float32)
    out[places(x.size)] = x * factors(layout, x.size)
    return buffer(out)


def factors(layout, n):
    return np.tile(input_scale(layout.input_scale_bits), units_of(n))[:n]


def close(got, wanted, tolerance=2e-6):
    error = np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < tolerance, error


def prompt_index(index, *sizes):
    """An index function of kernels as an array over its arguments."""
    grid = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")
    return index(*grid)
