"""Libraries without what they import and this program does not need, for starts."""

import importlib
import sys


def import_msgspec() -> None:
    """Imports msgspec without typing_extensions, which it prefers to Python's own typing where it is installed. Since
    Python 3.11 both have what it takes from there, and typing_extensions takes longer to import than msgspec itself."""
    if "typing_extensions" in sys.modules:
        return
    sys.modules["typing_extensions"] = None  # type: ignore[assignment] # as if it were not installed
    try:
        importlib.import_module("msgspec")
    finally:
        del sys.modules["typing_extensions"]
