"""What tensor graphs take of memory."""

from engine.kernels.matrix_bytes import matrix_bytes
from engine.runtime.kv_blocks import BLOCK
from engine.targets.memory import TargetMemory

MEMORY = TargetMemory(
    matrix_bytes, BLOCK, repacking=3, compilers_bytes=100 << 20, has_windows=False, copies_experts=True
)
