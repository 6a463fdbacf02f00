"""What our kernels for CPUs take of memory."""

from engine.targets.cpu.kernels.lanes import max_chunk, register_lanes
from engine.targets.cpu.kernels.stream_size import StreamSize
from engine.targets.memory import TargetMemory


def memory_of(lanes: int) -> TargetMemory:
    """What the kernels take of memory, with vectors of `lanes` elements."""

    def matrix_bytes(ggml_type: int, rows: int, cols: int) -> int:
        return StreamSize(ggml_type, lanes).n_bytes(rows, cols)

    return TargetMemory(
        matrix_bytes, max_chunk(lanes), checked_states=4, compilers_bytes=100 << 20, spare_blocks=1
    )


MEMORY = memory_of(register_lanes())
