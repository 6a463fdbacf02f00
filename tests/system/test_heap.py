import ctypes
import subprocess
import sys

import pytest

from tests.paths import ROOT

SCATTERED = """
import os, threading, time
from engine.system import heap
from engine.measure.memory import resident_memory

heap._EVERY_S = 0.05
heap.keep_small()
blocks = []
threads = [threading.Thread(target=lambda: blocks.extend(bytes(2048) for _ in range(10_000))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
held, blocks = resident_memory(os.getpid()).now_bytes, blocks[::100]
deadline = time.monotonic() + 60
while resident_memory(os.getpid()).now_bytes > held - (60 << 20) and time.monotonic() < deadline:
    time.sleep(0.05)
print(held - resident_memory(os.getpid()).now_bytes >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
def test_what_is_free_between_blocks_that_stay_goes_back():
    """80 MB of small blocks, of which each hundredth stays."""
    found = subprocess.run(
        [sys.executable, "-c", SCATTERED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(found.stdout) >= 60
