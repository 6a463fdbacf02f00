"""How this process gets memory from the system and gives it back."""

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def return_large_blocks() -> None:
    """Lets blocks of 1 MiB and more be memory of their own, which the system gets back. Without a limit that is set,
    glibc raises its own with the first long text, and keeps the memory of the others for ever (mallopt(3))."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 1 << 20)


def give_back() -> None:
    """Gives the system what is free now: the many small blocks of a long text, too (malloc_trim(3))."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
