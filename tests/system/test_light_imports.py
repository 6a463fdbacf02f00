import subprocess
import sys

from tests.paths import ROOT

_SCRIPT = """
import sys
from engine.system.light_imports import import_msgspec
import_msgspec()
assert "msgspec" in sys.modules and "typing_extensions" not in sys.modules
from engine.protocol.events import EngineOptions
import typing_extensions
import_msgspec()
assert sys.modules["typing_extensions"] is typing_extensions
"""


def test_msgspec_does_without_typing_extensions_which_others_may_import():
    subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, check=True)
