"""Changes to tinygrad, one a file. Each says what it changes and why, and which version it is for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version

from engine.errors import BackendError

TINYGRAD = "0.14.0"
_made: set[str] = set()


def require_tinygrad(fix: str) -> None:
    """Raises BackendError unless the tinygrad installed is the one that the fixes were written for: they
    reach into its insides."""
    if (found := version("tinygrad")) != TINYGRAD:
        raise BackendError(
            f"{fix} is a change to tinygrad {TINYGRAD}, and tinygrad {found} is installed.",
            f"Install the one this program is made for: pip install tinygrad=={TINYGRAD}",
        )


def once(fix: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """For the function `apply` of a module: it changes tinygrad once in a process, and raises BackendError where
    another version is installed. `fix` is what it changes, for that error."""

    def decorate(make: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(make)
        def apply() -> None:
            require_tinygrad(fix)
            if make.__module__ not in _made:
                _made.add(make.__module__)
                make()

        return apply

    return decorate


def applied() -> list[str]:
    """The modules of the changes made `once` in this process."""
    return sorted(_made)
