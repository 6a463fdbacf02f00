"""Backends tried, each in a process of its own, since a driver may hang or take a process with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Sequence

import msgspec

from engine.backends import flaw
from engine.child_process import how_it_ended, module_command, module_environment, signal_group
from engine.devices.nvidia import why_not_nv
from engine.doctor import Finding, bad, good, note

TIMEOUT_S = 120.0
_TRIAL, _INTERFACE, _ENDURANCE = (
    module_command(f"engine.doctor.{name}") for name in ("trial", "interface", "endurance")
)
_WORKS_S = 15.0  # until an endless trial is surely at work


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a small computation on a backend. Where it is not `ok`, `text` says why and `advice` what to do."""

    backend: str
    ok: bool
    text: str
    advice: str = ""
    device: str = ""
    arch: str = ""
    first_kernel_s: float | None = None
    launch_us: float | None = None
    copy_gbps: float | None = None

    def finding(self) -> Finding:
        return good(self.backend, self.text) if self.ok else bad(self.backend, self.text, self.advice)


def attempt(backend: str, *, timeout_s: float = TIMEOUT_S, command: Sequence[str] = _TRIAL) -> Trial:
    """Tries CPU, CUDA or NV."""
    try:
        process = _start([*command, backend])
    except OSError as error:
        return Trial(
            backend=backend,
            ok=False,
            text=f"no process can be started: {error.strerror}",
            advice="Free some memory, or install orin-chat again.",
        )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Trial(
            backend=backend,
            ok=False,
            text=f"no answer within {timeout_s:.0f} s",
            advice="Look into the kernel's log (sudo dmesg) for what its driver says.",
        )
    finally:
        _end(process)
    with contextlib.suppress(msgspec.MsgspecError, IndexError):
        return msgspec.json.decode(out.splitlines()[-1], type=Trial)
    last = err.decode(errors="replace").strip().splitlines()[-1:]
    said = f": {last[0][:200]}" if last else ""
    return Trial(
        backend=backend,
        ok=False,
        text=f"the process ended with {how_it_ended(process.returncode)}{said}",
        advice="This is not expected: please send the report of orin-chat doctor --report FILE.",
    )


def interface() -> Finding:
    """Whether a Jetson's drivers and NV speak the same language."""
    return attempt("nvgpu", command=_INTERFACE).finding()


def endurance(backend: str) -> list[Finding]:
    """Many dependent kernels, buffers of many GiB, and a process that is killed in the middle of its work: all that a
    simulated driver cannot show."""
    found = attempt(backend, command=_ENDURANCE).finding()
    process = _start([*_ENDURANCE, backend, "endless"])
    try:
        process.communicate(timeout=_WORKS_S)
    except subprocess.TimeoutExpired:
        _end(process)
        again = attempt(backend)
    else:
        advice = "See what came of its trial."
        return [found, bad(backend, "an endless run ended by itself", advice)]
    if again.ok:
        return [found, good(backend, "works again at once after its process was killed at work")]
    return [found, bad(backend, f"after its process was killed at work: {again.text}", again.advice)]


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=module_environment(),
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills it, and its compilers too."""
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


def possible(backend: str, names: Sequence[str], *, jetson: bool) -> Finding | None:
    """Why a backend is not to be tried on a machine with GPUs of these names; None where it is."""
    if backend == "CPU":
        return None
    if not (names or jetson):
        return note(backend, "not tried: there is no NVIDIA GPU")
    if backend == "CUDA":
        return None  # what keeps it from working only its driver can say
    if why := why_not_nv(list(names)):
        return note(backend, f"not tried: {why}")
    if why := flaw(backend):
        return bad(backend, f"not tried: {why}", "See above for what to do about it.")
    return None
