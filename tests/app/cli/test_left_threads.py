import subprocess
import sys

from tests.paths import ROOT

PROGRAM = """
import asyncio, threading
from app.cli import left_threads
left_threads.PATIENCE_S = 0.02
async def main():
    left_threads.leave_threads()
    began = threading.Event()
    waits = asyncio.ensure_future(asyncio.to_thread(lambda: (began.set(), threading.Event().wait())))
    assert await asyncio.to_thread(began.wait)
    print("done")
asyncio.run(main())
left_threads.end_without_left_threads(3)
"""


def test_a_thread_that_waits_does_not_keep_the_program():
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, timeout=60)
    assert (run.returncode, run.stdout) == (3, b"done\n"), run.stderr
