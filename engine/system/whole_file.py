"""Writes files whole or not at all: a full disk or a crash leaves what was there before. Reads only files: a pipe that
stands in place of one would be waited for."""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LONGEST_TEXT = 1 << 18
"""Bytes of settings and presets: what reads them takes long for each key."""
MOST_NAMES = 100
"""Names with dots between them in a key of these: what reads them looks at each with all before it, so that 40,000 took
half a minute."""
_TOML_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL
)


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replaces a file by one with these permissions: by default only its owner can read it. Makes its folder. A link to
    a file stays, as those of people who keep their settings elsewhere. Raises OSError, also for a link to a device,
    which root could replace."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise _no_file(path.stat().st_mode, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)
        set_mode(Path(file.name), mode)


def set_mode(path: Path, mode: int) -> None:
    """Gives a file these permissions. On a disk that knows none, such as VFAT, those of our files stay as they are.
    Raises OSError."""
    try:
        path.chmod(mode)
    except OSError as error:
        is_refused = error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
        if not is_refused or path.stat().st_uid != os.geteuid():
            raise


def free_bytes(folder: Path) -> int | None:
    """How much more the disk of a folder holds; None if it does not say, as those that lie elsewhere."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


def open_file(path: Path) -> IO[bytes]:
    """A file, for reading. Raises OSError, also for a pipe or a device, whose opening or reading may wait for ever."""
    return _only_a_file(path, os.O_RDONLY, "rb")


def open_to_append(path: Path) -> IO[bytes]:
    """A file, for writing to its end. Raises OSError as `open_file`."""
    return _only_a_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab")


def _only_a_file(path: Path, flags: int, mode: str) -> IO[bytes]:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(descriptor, mode)
    os.close(descriptor)
    raise _no_file(kind, path)


def _no_file(kind: int, path: Path) -> OSError:
    """What is wrong with a path at which something else than a file is, of such a `st_mode`."""
    if stat.S_ISDIR(kind):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The text of a file that a user has written: UTF-8, perhaps after a byte order mark, as editors on Windows write
    it. Raises OSError as `open_file`, and ValueError if it is another encoding, longer than LONGEST_TEXT, or has a key
    of more than MOST_NAMES, if it is TOML."""
    with open_file(path) as file:
        if len(content := file.read(LONGEST_TEXT + 1)) > LONGEST_TEXT:
            raise ValueError(f"it has more than {LONGEST_TEXT:,} bytes")
    text = content.decode("utf-8-sig")
    if any(part.count(".") >= MOST_NAMES for part in re.split(r"[\n=,]", _TOML_STRING.sub("", text))):
        raise ValueError(f"it has a key of more than {MOST_NAMES} names")
    return text


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file for the body to write, which then takes the place of `path`. Only its owner can read it. If the body
    raises, nothing is left of it. Its name meanwhile begins with that of `path`. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}-", delete=False) as file:
        new = Path(file.name)
        try:
            yield file
            file.flush()
            new.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
