"""The drivers' errors, in sentences that say what to do."""

import errno
import os

from engine.errors import BackendError
from engine.system.invocation import call
from engine.tegra.abi import L4T

# Two bases: the application shows the sentences of a BackendError, tinygrad handles RuntimeError and MemoryError.


class DriverError(BackendError, RuntimeError):
    """A call to nvmap or nvgpu failed. `errno` is the kernel's error number (errno(3)), or 0."""

    errno = 0


class DriverMemoryError(DriverError, MemoryError):
    """The kernel has no memory, address space or file descriptors left. Freeing some may help."""


class HangError(DriverError):
    """The GPU stopped; the message says why, as far as the driver knows. Only a new process can use it again."""

    ends_engine = True


_ACCESS = "Add yourself to the groups that own it (sudo usermod -aG video,render $USER) and log in again."
_NO_NODE = (
    "NV needs a Jetson whose GPU belongs to the driver nvgpu (L4T r36); a container needs "
    "--device /dev/nvmap --device /dev/nvgpu/igpu0/ctrl."
)
_OTHER_ABI = (
    f"The driver has another version of its interface than {L4T}: see `{call('doctor')}`, or take CUDA."
)
_MEMORY = "Close other programs, or take a smaller model or context."
_FILES = "Raise the limit on open files (ulimit -n)."
RESTART = "Restart the engine; the kernel's log (sudo dmesg) has the driver's own messages."
REPORT = f"Please send the report of `{call('doctor --report FILE')}`, or take the CUDA backend."

_ADVICE = {
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.ENOENT: _NO_NODE,
    errno.ENXIO: _NO_NODE,
    errno.ENODEV: _NO_NODE,
    errno.ENOTTY: _OTHER_ABI,
    errno.ENOMEM: _MEMORY,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ETIMEDOUT: RESTART,
    errno.EIO: RESTART,
}


def driver_error(call: str, error: OSError) -> DriverError:
    """The exception for a failed call. `call` is its name, as in "NVMAP_IOC_ALLOC" or "Opening /dev/nvmap"."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    kind = DriverMemoryError if number in (errno.ENOMEM, errno.EMFILE, errno.ENFILE) else DriverError
    made = kind(f"{call} failed: {name} ({os.strerror(number)}).", _ADVICE.get(number, REPORT))
    made.errno = number
    return made
