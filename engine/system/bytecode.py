"""The bytecode of imported modules, for machines on which Python keeps none."""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

_FOLDER = "orin-chat/bytecode"
_LEAST_FREE_BYTES = 64 << 20
"""With less on the disk nothing is kept: Python would also keep files that a full disk cuts, and then nothing that
needs them starts."""


def keep_bytecode() -> None:
    """Lets Python keep the bytecode of all modules that are imported from now on in the user's cache, for the next
    start, if it keeps none beside them: images of containers forbid it (PYTHONDONTWRITEBYTECODE), and packages that
    root installed without it cannot be written. To compile them anew took half of a start on such a machine.

    `engine.system.child_process` passes this on to children."""
    if __spec__.cached and Path(__spec__.cached).exists():  # Python has just read it, or written it
        return
    import platformdirs

    folder = platformdirs.user_cache_path("orin-chat", appauthor=False) / "bytecode"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What is imported is run. With sudo, this may be the folder of another user.
        if folder.is_absolute() and folder.stat().st_uid == os.getuid():
            sys.pycache_prefix = str(folder)
            sys.dont_write_bytecode = shutil.disk_usage(folder).free < _LEAST_FREE_BYTES


def forget_damaged(error: Exception) -> bool:
    """Deletes what `keep_bytecode` has kept if `error` is that of an import of a file that was cut. Whether it is."""
    prefix = sys.pycache_prefix or ""
    is_cut = isinstance(error, EOFError) and "marshal" in str(error) and Path(prefix).match(_FOLDER)
    if is_cut:
        shutil.rmtree(prefix, ignore_errors=True)
    return is_cut
