"""Changes to tinygrad, one a file. Each says what it changes and why, and which version it is for."""

from __future__ import annotations

import sys
from importlib.metadata import version

from engine.errors import BackendError

TINYGRAD = "0.14.0"


def require_tinygrad(fix: str) -> None:
    """Raises BackendError unless the tinygrad installed is the one that the fixes were written for: they
    reach into its insides."""
    if (found := version("tinygrad")) != TINYGRAD:
        raise BackendError(
            f"{fix} is a change to tinygrad {TINYGRAD}, and tinygrad {found} is installed.",
            f"Install the one this program is made for: pip install tinygrad=={TINYGRAD}",
        )


def applied() -> list[str]:
    """The modules of the changes made in this process."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith(f"{__name__}.")}
    return sorted(name for name, module in modules.items() if getattr(module, "_applied", False))
