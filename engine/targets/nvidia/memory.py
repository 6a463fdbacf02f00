"""What our kernels for NVIDIA GPUs take of memory."""

from engine.targets.memory import TargetMemory
from engine.targets.nvidia.kernels.weights.matrix_bytes import matrix_bytes

CHUNK_SIZES = (32, 64, 128, 256, 512)
"""Tokens of a prefill step. A prompt of 128 tokens takes twice as long in a step of 512 (Qwen3 1.7B on an H200)."""

MEMORY = TargetMemory(
    matrix_bytes,
    CHUNK_SIZES[-1],
    states=2,  # before and after a step
    checked_states=7,  # with these, one before a check and one after each of its rows
    checks_alone=True,
    repacking=4,
    is_shared=False,
    widens_caches=False,
    reads_tables=False,
)
