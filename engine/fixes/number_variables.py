"""tinygrad 0.14.0: environment variables that are to be numbers and are none.

tinygrad takes DEBUG, NO_COLOR, PROFILE, IMAGE, THREADS and some hundred more from the environment, and cannot be
imported where one is no number. But other programs have variables of these names, and set DEBUG=app:* or NO_COLOR="yes"
(https://no-color.org).

With this fix such a variable leaves the environment of this process, and of those that it starts, when it is read, and
the default counts. It changes `os.getenv`, by which tinygrad reads them, before tinygrad is imported.
"""

from __future__ import annotations

import os
from typing import Any

from engine.fixes import once

_getenv = os.getenv


@once("How variables of the environment are read")
def apply() -> None:
    """Changes `os.getenv` in this process."""
    os.getenv = _number_or_default


def _number_or_default(key: str, default: Any = None) -> Any:
    value = _getenv(key, default)
    if isinstance(value, str) and isinstance(default, int | float):
        try:
            type(default)(value)
        except ValueError:
            del os.environ[key]
            return default
    return value
