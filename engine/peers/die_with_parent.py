"""Runs a program that the kernel kills when its parent dies, also when the parent itself is killed.

    python -I -S die_with_parent.py PARENT_PID PROGRAM ARGUMENT...

The program replaces this script: it keeps the process id. Only Linux has this (PR_SET_PDEATHSIG in prctl(2)); on other
systems the program runs without it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
