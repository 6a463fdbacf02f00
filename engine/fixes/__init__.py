"""Changes to tinygrad at run time, one in each file, which says what it changes, why, and for which version."""

from __future__ import annotations

import functools
from collections.abc import Callable

from engine.errors import BackendError
from engine.system.invocation import installed_version, pip_install

TINYGRAD = "0.14.0"
_applied: list[str] = []


def require_tinygrad(fix: str) -> None:
    """Raises BackendError unless the installed tinygrad is the one that the fixes were written for: they change its
    internals. `fix` names the change in the message."""
    if (found := installed_version("tinygrad")) != TINYGRAD:
        raise BackendError(
            f"{fix} is a change to tinygrad {TINYGRAD}, and tinygrad {found} is installed.",
            f"Install the one this program is made for: {pip_install(f'tinygrad=={TINYGRAD}')}",
        )


def once(fix: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorates the function `apply` of a fix's module, so that it runs once in a process. It raises BackendError if
    another version of tinygrad is installed. `fix` names the change in that message."""

    def decorate(change: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(change)
        def apply() -> None:
            require_tinygrad(fix)
            if change.__module__ not in _applied:
                _applied.append(change.__module__)
                change()

        return apply

    return decorate


def applied() -> list[str]:
    """The modules whose fixes were applied `once` in this process, in that order, which counts for some."""
    return [*_applied]
