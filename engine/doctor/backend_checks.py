"""Runs backends in child processes: a driver may hang, or take the process down with it."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence

import msgspec

from engine.backends import unusable_because
from engine.devices import cuda_driver
from engine.devices.nvidia import why_not_nv
from engine.doctor import Finding, bad, good, note
from engine.doctor.checks import CheckResult
from engine.errors import start_hint
from engine.system.child_process import how_it_ended, module_command, module_environment, signal_group
from engine.system.invocation import call

TIMEOUT_S = 120.0
_KILL_AFTER_S = 15.0  # by then the endless stress check is launching kernels


def run_check(
    backend: str, check: str = "quick", *, timeout_s: float = TIMEOUT_S, command: Sequence[str] = ()
) -> CheckResult:
    """Runs a check of "CPU", "CUDA" or "NV". A crash and a hang are results too. `command`: another program."""

    def failed(text: str, advice: str) -> CheckResult:
        return CheckResult(backend=backend, ok=False, text=text, advice=advice)

    try:
        with _started(command or _command(check, backend)) as process:
            out, err = process.communicate(timeout=timeout_s)
    except OSError as error:
        text = f"its process cannot be started: {error.strerror}"
        return failed(text, start_hint(error))
    except subprocess.TimeoutExpired:
        text = f"no answer within {timeout_s:.0f} s"
        return failed(text, "See what its driver says in the kernel's log: sudo dmesg")
    with contextlib.suppress(msgspec.MsgspecError, IndexError):
        return msgspec.json.decode(out.splitlines()[-1], type=CheckResult)
    last_line = err.decode(errors="replace").strip().splitlines()[-1:]
    ended = f"its process ended with {how_it_ended(process.returncode)}"
    advice = f"This is not expected: please send the report of {call('doctor --report FILE')}."
    return failed(": ".join([ended, *(line[:200] for line in last_line)]), advice)


def as_finding(result: CheckResult) -> Finding:
    if result.ok:
        return good(result.backend, result.text)
    return bad(result.backend, result.text, result.advice)


def driver_check() -> Finding:
    """Whether a Jetson's drivers have the interface that NV was written for."""
    return as_finding(run_check("nvgpu", "driver"))


def stress_check(backend: str) -> list[Finding]:
    """Many dependent kernels, many GiB of buffers, and a process that is killed while it computes. None of it can be
    shown by a simulated driver."""
    stressed = as_finding(run_check(backend, "stress"))
    try:
        with _started(_command("endless", backend)) as process:
            process.communicate(timeout=_KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        afterwards = run_check(backend)
    else:
        advice = "See the result of its quick check."
        return [stressed, bad(backend, "the endless stress check ended by itself", advice)]
    if afterwards.ok:
        return [stressed, good(backend, "works at once after a process was killed while it computed")]
    text = f"does not work after a process was killed while it computed: {afterwards.text}"
    return [stressed, bad(backend, text, afterwards.advice)]


def _command(check: str, backend: str) -> list[str]:
    return module_command("engine.doctor.checks", check, backend)


@contextlib.contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which is killed with the compilers that it started when the body ends. It ends itself, too, when this
    one is killed: then nobody holds the other end of its standard input. Raises OSError."""
    read_end, held_end = os.pipe()
    with os.fdopen(held_end, "wb"), os.fdopen(read_end, "rb") as stdin:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=module_environment(),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            signal_group(process.pid, signal.SIGKILL)
            process.wait()


def why_skipped(backend: str, gpus: Sequence[str], *, jetson: bool) -> Finding | None:
    """Why `backend` is not checked on a machine whose GPUs have these names; None if it is."""
    if backend == "CPU":
        return None
    if not (gpus or jetson):
        if unusable_because("CUDA") == cuda_driver.NO_ANSWER:
            return bad(
                backend, f"not tried: {cuda_driver.NO_ANSWER}", "Restart the machine; dmesg may say why."
            )
        return note(backend, "not tried: there is no NVIDIA GPU")
    if backend == "CUDA":
        return None  # only its driver can say what is wrong with it
    if why := why_not_nv(list(gpus)):
        return note(backend, f"not tried: {why}")
    if why := unusable_because(backend):
        return bad(backend, f"not tried: {why}", "See above for what to do about it.")
    return None
