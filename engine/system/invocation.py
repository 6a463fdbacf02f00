"""How this program is called on this machine, and what it lacks installed, for sentences that name a command."""

import contextlib
import functools
import shlex
import shutil
import sys
from pathlib import Path

_NAME = "orin-chat"


@functools.cache
def installed_version(package: str) -> str:
    """The version of a Python package that this program needs, from the name of the folder that pip leaves beside it:
    importlib.metadata, which is asked if there is none, takes twenty times as long. Raises PackageNotFoundError."""
    for folder in filter(None, sys.path):
        names = [path.name for path in Path(folder).glob(f"{package}-*.dist-info")]
        if len(names) == 1:
            return names[0].removeprefix(f"{package}-").removesuffix(".dist-info")
    from importlib.metadata import version

    return version(package)


def own_version() -> str:
    """The version of this program; "checkout" if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # takes a while

    try:
        return version(_NAME)
    except PackageNotFoundError:
        return "checkout"


def call(arguments: str) -> str:
    """The command line that runs this program with `arguments`: "models" → orin-chat models.

    Where `orin-chat` is not on the PATH, as after `make chat`, the script beside this Python is named, and where it is
    not installed either, `python -m app`. A path below the current folder is written without that folder."""
    if shutil.which(_NAME):
        return f"{_NAME} {arguments}"
    script = Path(sys.executable).with_name(_NAME)
    if script.is_file():
        return f"{_from_here(script)} {arguments}"
    return f"{_from_here(Path(sys.executable))} -m app {arguments}"


def pip_install(*packages: str) -> str:
    """The command line that installs `packages` for the Python that runs this program: another one's pip, which a
    plain `pip` may be, would not."""
    return f"{_from_here(Path(sys.executable))} -m pip install {shlex.join(packages)}"


def _from_here(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):  # OSError: the current folder is gone
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))
