"""A module of this program in a fork of this process: it has at once what this one has imported, and Python itself."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from engine.system.child_process import module_command

_TASKS = Path("/proc/self/task")
_DESCRIPTORS = Path("/proc/self/fd")
_STATUS, _MEMORY = Path("/proc/self/stat"), Path("/proc/self/mem")


def may_fork() -> bool:
    """Whether this process has a single thread: others could hold locks that a child would wait for. False where the
    system does not tell."""
    try:
        return len(list(_TASKS.iterdir())) == 1
    except OSError:
        return False


def fork_module(
    name: str, module: str, environment: Mapping[str, str], descriptor: int, log: int
) -> tuple[int, Callable[[], int]]:
    """Runs `main` of a module as `module_command(module, str(descriptor))` would in a session of its own: with this
    environment, no open file but that descriptor, and its output in the file `log`. Lists of processes show `name` as
    its command, not this process's arguments, which may be a prompt. Returns the id of the process, and what waits for
    its end and returns its exit status, negative for a signal. To be called while this process `may_fork`. Raises
    OSError."""
    sys.stdout.flush()
    if not (pid := os.fork()):
        # The callers' frames stay until the end, so that nothing of theirs is closed or freed meanwhile.
        try:
            _become(name, module, environment, descriptor, log)
            threading._shutdown()  # type: ignore[attr-defined] # as Python ends: threads, then what is registered
            atexit._run_exitfuncs()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid, lambda: _wait(pid)


def _wait(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # it has ended, and how is not kept: who started this program ignores SIGCHLD
        return 0  # as subprocess does


def _become(name: str, module: str, environment: Mapping[str, str], descriptor: int, log: int) -> None:
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for opened in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        if opened not in (0, 1, 2, descriptor):
            with suppress(OSError):  # that of the listing
                os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    command = module_command(module, str(descriptor))
    try:
        _show_as(name)
    except (OSError, ValueError, IndexError):
        # A kernel that does not allow it. What begins without a fork has arguments of its own.
        os.set_inheritable(descriptor, True)
        os.execv(command[0], command)
    sys.orig_argv[:], sys.argv[:] = command, [module, str(descriptor)]
    # What `command` says by -P: of this process by its path, of its children by the variable, as they get its flags.
    os.environ["PYTHONSAFEPATH"] = "1"
    if not sys.flags.safe_path:
        sys.path[0] = environment["PYTHONPATH"].split(os.pathsep)[0]
    sys.modules["__main__"] = main = importlib.import_module(module)
    main.main()


def _show_as(name: str) -> None:
    """Writes `name` over the arguments with which this process started, as far as there is room. Raises OSError,
    ValueError or IndexError if it cannot."""
    # Those after the name begin with the third (proc_pid_stat(5)).
    fields = _STATUS.read_text(errors="replace").rpartition(")")[2].split()
    start, end = int(fields[48 - 3]), int(fields[49 - 3])
    if not 0 < start < end:
        raise ValueError("The arguments are at no known place.")
    with _MEMORY.open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(name.encode()[: end - start - 1].ljust(end - start, b"\0"))
