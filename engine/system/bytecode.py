"""The bytecode of imported modules, for machines on which Python keeps none."""

import os
import sys
from contextlib import suppress
from pathlib import Path


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
            sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
