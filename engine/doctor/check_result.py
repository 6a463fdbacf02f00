"""The result of a check that ran in a child process, and how the child hands it over: a line of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from engine.errors import OrinError, one_line


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """If it is not `ok`, `text` says why and `advice` what to do. `arch` is as "sm_87"; the other figures are those
    of the quick check."""

    backend: str
    ok: bool
    text: str
    advice: str = ""
    device: str = ""
    arch: str = ""
    first_kernel_s: float | None = None
    launch_us: float | None = None
    copy_gbps: float | None = None


def wrong_results(backend: str, text: str) -> CheckResult:
    """For a backend that computes something else than it should."""
    return CheckResult(backend=backend, ok=False, text=text, advice="Do not use it; please send the report.")


def write_result(backend: str, check: Callable[[str], CheckResult]) -> None:
    """Runs `check` and writes its result to standard output, also if the check raises."""
    try:
        result = check(backend)
    except OrinError as error:
        result = CheckResult(backend=backend, ok=False, text=error.message.rstrip("."), advice=error.hint)
    except Exception as error:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        result = CheckResult(
            backend=backend,
            ok=False,
            text=one_line("; ".join(f"{type(e).__name__}: {e}" for e in causes), 300),
            advice="Choose another backend that works; please send the report if you expected this one to.",
        )
    sys.stdout.write("\n" + msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
