"""How this process gets memory from the system and gives it back."""

import ctypes
import threading
import time

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h
_EVERY_S = 60.0


def keep_small() -> None:
    """Lets blocks of 1 MiB and more be memory of their own, which the system gets back: without a limit that is set,
    glibc raises its own with the first long text, and keeps the memory of the others for ever (mallopt(3)). Threads
    share two arenas: else each thread has one (up to eight for each core), and what is free in it is of no use to the
    others. Once a minute the system gets what is free in these. To be called before other threads begin."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
        libc.mallopt(_ARENA_MAX, 2)
        threading.Thread(target=_give_back_often, name="heap", daemon=True).start()


def give_back() -> None:
    """Gives the system what is free now: the many small blocks of a long text, too (malloc_trim(3))."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _give_back_often() -> None:
    while True:
        time.sleep(_EVERY_S)
        give_back()
