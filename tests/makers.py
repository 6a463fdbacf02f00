"""The scripts beside the checkout that make models and encoders of pictures, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_maker(shared: Path, script: str) -> ModuleType:
    """A script of the `shared` files, such as `make_model`. Each call loads it anew, so what a test changes in it stays
    its own."""
    spec = importlib.util.spec_from_file_location(script, shared / "models" / f"{script}.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    sys.modules[script] = maker  # its dataclasses look there
    spec.loader.exec_module(maker)
    return maker
