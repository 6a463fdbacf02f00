"""How many rows of a matrix and how many tokens the kernels of a CPU take at a time."""

import functools
import platform
from math import ceil
from pathlib import Path

MOST_LANES = 16
MAX_TILES = 8  # of `lanes` tokens of a prompt
MOST_TILES = 40
"""The same of pictures: 320 tokens of 8 lanes."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The words in which Linux says what the CPU is and has."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def register_lanes() -> int:
    """float32 elements of a vector: 16 with AVX-512; otherwise 8, an AVX2 register or two of NEON."""
    return MOST_LANES if "avx512f" in cpu_flags() else 8


def adds_pairs() -> bool:
    """Whether products of two pairs of 16-bit integers are added by the same instruction: on x86."""
    return platform.machine().lower() in ("x86_64", "amd64")


def looks_up() -> bool:
    """Whether a table of 16-bit numbers that is indexed by a vector takes a few instructions: one with AVX-512, seven
    with AVX2. For Arm, compilers take the elements one by one."""
    return "avx2" in cpu_flags()


def max_chunk(lanes: int, whole: int = 0) -> int:
    """The most tokens of a prompt in a step, at least `whole`."""
    return max(MAX_TILES, ceil(whole / lanes)) * lanes
