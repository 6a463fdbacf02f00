"""tinygrad 0.14.0: variables of the environment that are meant for other programs.

tinygrad takes DEBUG, IMAGE, PROFILE, THREADS, MAX_BUFFER_SIZE, DEFAULT_FLOAT and some two hundred more from the
environment, for its developers. Other programs have variables of these names: with DEBUG=app:* tinygrad cannot be
imported, with MAX_BUFFER_SIZE=100 nothing can be allocated, and with VIZ=1 it starts a server.

With this fix tinygrad reads the variables that this program sets or documents, as far as they are of the kind that it
expects, and otherwise its defaults. What does not count leaves the environment of this process and of those that it
starts. The fix changes `os.getenv`, by which tinygrad reads them, before tinygrad is imported.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from engine.fixes import once

_OURS = re.compile(
    "DEV|CC|PARALLEL|JIT_BATCH_SIZE|ALLOW_HALF8|NOOPT|(JIT)?BEAM|(BEAM|MV)_.*|MV|CACHELEVEL|CACHEDB|"
    "HCQDEV_WAIT_TIMEOUT_MS|HCQ_VISIBLE_DEVICES|CUDA_PATH|XDG_CACHE_HOME"
)
_getenv = os.getenv


@once("How variables of the environment are read")
def apply() -> None:
    """Changes `os.getenv` in this process."""
    os.getenv = _own_or_default


def _own_or_default(key: str, default: Any = None) -> Any:
    value = _getenv(key, default)
    is_read_by_tinygrad = sys._getframe(1).f_globals.get("__name__") == "tinygrad.helpers"
    if key in os.environ and is_read_by_tinygrad and not (_OURS.fullmatch(key) and _is_like(value, default)):
        del os.environ[key]
        return default
    return value


def _is_like(value: str, default: Any) -> bool:
    """Whether a text is a number if a number is expected."""
    try:
        type(default)(value)
    except ValueError:
        return False
    return True
