"""tinygrad 0.14.0: the modules of renderers that are not used are not imported.

A device's module imports all its renderers. Those for Mesa (LVP on CPUs, NAK on NV) bring its whole interface along:
with the assembler for x86, a tenth of the time that a small model on a CPU takes to its first token. With this fix the
device's module gets classes that stand for them. They are imported if DEV names one.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from engine.fixes import require_tinygrad

_UNUSED = {
    "CPU": {"tinygrad.renderer.nir": "LVPRenderer", "tinygrad.renderer.isa.x86": "X86Renderer"},
    "NV": {"tinygrad.renderer.nir": "NAKRenderer"},
}


def apply(dev: str) -> None:
    """Imports the module of the device of DEV, which has the form [interface+]device[:renderer…]. Raises BackendError
    if another version of tinygrad is installed."""
    require_tinygrad("Renderers that are not imported")
    device, _, renderer = dev.partition(";")[0].rpartition("+")[2].upper().partition(":")
    standing_in = [] if renderer else [
        _stand_in(module, name) for module, name in _UNUSED.get(device, {}).items() if module not in sys.modules
    ]  # fmt: skip
    try:
        if standing_in:
            import_module(f"tinygrad.runtime.ops_{device.lower()}")
    finally:
        for module in standing_in:
            del sys.modules[module]  # whoever needs it later gets the real one


def _stand_in(module: str, name: str) -> str:
    stand_in = ModuleType(module)
    setattr(stand_in, name, type(name, (), {}))
    sys.modules[module] = stand_in
    return module
