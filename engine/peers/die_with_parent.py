"""Starts a program that ends when its parent does, even one that is killed: run as a script.

    python -I -S die_with_parent.py PARENT_PID PROGRAM ARGUMENT...

It becomes the program: same process, same number. Linux alone can do this; elsewhere it only runs it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
