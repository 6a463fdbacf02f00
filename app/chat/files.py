"""Files in a prompt: `@path`, `@"path with spaces"`, globs, and lines of a file as `@path:10-40`.

A mention counts only if it names something on this machine, since an @ also stands in code and in addresses. What a
file brings is text of the user's message, and the chat template gets it as such: it cannot spell a special token
(`engine/formats/templates/template`). A picture goes along as its file.
"""

import heapq
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from msgspec.structs import replace

from app.chat.file_globs import MOST_ENTRIES, is_glob, matching
from app.chat.mention import LINES, Mention, current_folder, meanings, shown
from app.chat.status import StatusObserver
from engine.catalog.names import local_path
from engine.errors import UsageError
from engine.formats.picture_kind import (
    HEAD_BYTES,
    MAX_BYTES,
    NOT_READ,
    is_binary_picture,
    media_type,
    refusal,
)
from widgets.chat.turn import Attachment, PictureFile
from widgets.text import as_bytes, counted, one_line

LIMIT_BYTES = 4 << 20
"""No context holds more: it is refused before it is read."""
MOST_FILES = 50
MOST_LOOKUPS = 2_000
"""A prompt may be a text of megabytes with an @ at each word: each is looked for on the disk, in a tenth of a
millisecond."""
_MOST_SKIPPED = 1 << 30  # bytes before the lines that a prompt names: a second
_MOST_DROPPED = 10  # lines with paths
_MOST_COMPLETIONS = 200
_MENTION = re.compile(
    r"""(?:(?<=\s)|(?<=[("'])|^)@(?:"(?P<quoted>(?:\\"|[^"\n])+)"(?P<of_quoted>:\d+(?:-\d+)?)?|(?P<bare>[^\s"'@]+))"""
)
_CHARS_A_TOKEN = 5  # more than texts have
_AFTER = ".,;:!?)]}>"  # punctuation that may follow a mention


def mentions(prompt: str, known: Callable[[Path], bool] = lambda path: False) -> list[Mention]:
    """The files that `prompt` names, each once. `known` says of a file that is gone whether it counts all the same.

    Raises UsageError for more than MOST_FILES, and for a search through too many."""
    found: dict[Mention, None] = {}
    for text, named in _looked_up(prompt, known):
        found |= dict.fromkeys(named)
        if len(found) > MOST_FILES:
            raise UsageError(f"@{one_line(text)} makes more than {MOST_FILES} files.", "Name fewer.")
    return list(found)


def missing(prompt: str, known: Callable[[Path], bool] = lambda path: False) -> list[str]:
    """The mentions in `prompt` that name nothing, and so are text: @nosuchfile. Parameters: see `mentions`."""
    looked_up = _looked_up(prompt, known)
    return list(dict.fromkeys(f"@{one_line(text)[:40]}" for text, named in looked_up if text and not named))


def said_missing(names: Sequence[str]) -> str:
    """A sentence on mentions that name nothing; "" if there are none."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    verb = "names" if len(names) == 1 else "name"
    return f"{', '.join(names[:3])}{more} {verb} no file, and went as text" if names else ""


def _looked_up(prompt: str, known: Callable[[Path], bool]) -> Iterator[tuple[str, list[Mention]]]:
    """What stands after each @ in `prompt`, once, and what it names. What comes after MOST_LOOKUPS names nothing."""
    lookups, entries, folder = MOST_LOOKUPS, iter(range(MOST_ENTRIES)), current_folder()
    for match in {match[0]: match for match in _MENTION.finditer(prompt)}.values():
        quoted = _unquoted(match["quoted"] or "")
        text = quoted + (match["of_quoted"] or "") if quoted else match["bare"]
        shortest = quoted or text.rstrip(_AFTER)
        named: list[Mention] = []
        for end in range(len(text), max(len(text if quoted else shortest), 1) - 1, -1):
            if named or not lookups:
                break
            lookups -= 1
            named = _named(text[:end], folder, known, entries)
        yield shortest, named


def _named(text: str, folder: Path, known: Callable[[Path], bool], entries: Iterator[int]) -> list[Mention]:
    """What a mention names; nothing if that does not exist. `entries`: see `matching`."""
    for path, first, last in meanings(text):
        try:
            full = folder / path.expanduser()
            if full.exists() or known(full):
                return [Mention(full, first, last)]
        except (OSError, ValueError, RuntimeError):  # a name that no file can have, or no home folder
            continue
        if is_glob(str(path)) and (paths := _matching(full, entries)):
            return [Mention(each, first, last) for each in paths]
    return []


def _matching(pattern: Path, entries: Iterator[int]) -> list[Path]:
    """The files that a glob finds, at most one too many. Raises UsageError if it goes through too many."""
    found: dict[Path, None] = {}
    for path in matching(pattern, entries):
        found[path] = None
        if len(found) > MOST_FILES:
            break
    return sorted(found)


def read(mention: Mention) -> Attachment:
    """The text of a file, or of some of its lines, or a picture, which is not decoded. Raises UsageError if it is
    neither, too long, or cannot be read."""
    path, name = mention.path, mention.name
    if path.is_dir():
        raise UsageError(f"{name} is a folder.", f"@{name}/* takes the files in it.")
    try:
        # A pipe would block when it is opened.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 1 << 20) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise UsageError(f"{name} is a pipe or a device, not a file.")
            head = b"" if mention.first else file.read(HEAD_BYTES) or b""
            is_picture = is_binary_picture(head)
            data = _lines(file, mention) if mention.first else _all(file, name, head, state.st_size)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}.") from None
    if mention.first and not data:
        where = f" in its first {as_bytes(_MOST_SKIPPED)}" if state.st_size > _MOST_SKIPPED else ""
        raise UsageError(f"{name} has no such lines{where}.")
    file_of = partial(Attachment, name=name, path=str(path.absolute()), stamp=_stamp(state))
    if is_picture:
        return file_of(text="", picture=PictureFile(data=data))
    if (text := decoded_text(data)) is None:
        size = as_bytes(state.st_size)
        raise UsageError(
            f"{name} is no text and no picture ({size}).", "No sounds, videos, PDFs or archives are read."
        )
    return file_of(text=text, first=mention.first, last=mention.last)


def read_picture(name: str) -> Attachment:
    """The picture in a file. Raises UsageError if it is none, too large, or cannot be read."""
    file = read(Mention(Path(name).expanduser()))
    if file.picture is None:
        raise UsageError(f"{file.name} is not a picture.", "Name it without --image, or with @.")
    return file


def _all(file: BinaryIO, name: str, head: bytes, size: int) -> bytes:
    """All of a file whose `head` was read. Its `size` is not what counts: files of the system say that it is zero, have
    no end or, for now, nothing to be read (None), and others grow. Raises UsageError if it is too long."""
    is_picture = is_binary_picture(head)
    most = MAX_BYTES if is_picture else LIMIT_BYTES
    data = head if size > most else head + (file.read(most + 1 - len(head)) or b"")
    if max(size, len(data)) <= most:
        return data
    has = as_bytes(size) if size > most else f"more than {as_bytes(most)}"
    if media_type(head) in NOT_READ:
        raise UsageError(f"{name}: {refusal(head)}")
    if is_picture:
        raise UsageError(f"{name} has {has}: pictures of at most {as_bytes(most)} are read.")
    raise UsageError(
        f"{name} has {has}: no context holds that much.", f"@{name}:1-200 takes some of its lines."
    )


def _lines(file: BinaryIO, mention: Mention) -> bytes:
    """The lines that a mention asks for, at most about LIMIT_BYTES."""
    number, taken, size, skipped = 1, [], 0, 0
    for part in iter(lambda: file.readline(LIMIT_BYTES), b""):  # of a long line
        if number > max(mention.first, mention.last) or size > LIMIT_BYTES or skipped > _MOST_SKIPPED:
            break
        skipped += len(part)
        if number >= mention.first:
            taken.append(part)
            size += len(part)
        number += part.endswith(b"\n")
    return b"".join(taken)


def decoded_text(data: bytes) -> str | None:
    """The text in `data`: UTF-8, or UTF-16 with its mark; None if it is none, as a PDF whose parts happen to be."""
    if data.startswith(b"%PDF-"):
        return None
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")


def stamp(path: Path) -> str:
    """What changes when a file does; "" if there is none."""
    try:
        return _stamp(path.stat())
    except (OSError, ValueError):
        return ""


def _stamp(state: os.stat_result) -> str:
    return f"{state.st_mtime_ns}:{state.st_size}"


def changed(attachments: Sequence[Attachment]) -> list[Attachment]:
    """The attachments whose files have changed since they were read. A file that is gone has not."""
    stamps = ((attachment, stamp(Path(attachment.path))) for attachment in attachments)
    return [attachment for attachment, now in stamps if now not in ("", attachment.stamp)]


def require_room(attachments: Sequence[Attachment], tokens: int, room: int) -> None:
    """Raises UsageError if files of `tokens` do not fit into a context that has `room` for them (0: not known)."""
    if attachments and 0 < room < tokens:
        names = attachments[0].name if len(attachments) == 1 else counted(len(attachments), "file")
        have = "has" if len(attachments) == 1 else "have"
        raise UsageError(
            f"{names} {have} {counted(tokens, 'token')}, and the context has room for {room:,}.",
            _less(max(attachments, key=lambda file: file.tokens or 0), tokens - room),
        )


def fewer_lines(read: Sequence[Attachment], tokens: int, most: int) -> str:
    """Which lines of the longest file to name, where a prompt of about `tokens`, most of it of the files `read`, is to
    have `most`; "" if that is not known, or no line fits. A quarter of `most` is left for the reply."""
    if not read or not 0 < most < tokens:
        return ""
    longest = max(read, key=lambda file: len(file.text))
    share = len(longest.text) / max(1, sum(len(file.text) for file in read))
    # The count may have ended early.
    about = max(tokens, sum(len(file.text) for file in read) // _CHARS_A_TOKEN)
    longest = replace(longest, tokens=round(about * share))
    return _less(longest, about - most * 3 // 4).removeprefix("@")


def refuse_pictures(attachments: Sequence[Attachment], status: StatusObserver) -> None:
    """Raises UsageError if there are pictures, and the model is known to see none."""
    if not status.sees and any(file.picture for file in attachments):
        raise UsageError(
            f"{one_line(status.snapshot().ready.model.name)} sees no pictures.",
            "A model does that has its encoder beside it, such as gemma3:4b; `orin-chat pull` gets both.",
        )


# --- what is typed and pasted -----------------------------------------------------------------------------


def _less(file: Attachment, surplus: int) -> str:
    """How to name `file` so that it has so many tokens less, and a tenth of what is left; "" if that is nothing."""
    share = 0.9 * (1 - surplus / (file.tokens or 1))
    first, lines = file.first or 1, int(share * len(file.text.splitlines()))
    name = f"{LINES.sub('', file.name)}:{first}-{first + lines - 1}"
    return f"{mention_of(name)} takes as many lines as fit." if lines > 0 else ""


def mention_of(name: str) -> str:
    """The text that mentions a file. A quotation mark in a name has a backslash before it."""
    if not re.search(r"""[\s"'@]""", name):
        return f"@{name}"
    lines = LINES.search(name)
    path, of = (name[: lines.start()], lines[0]) if lines else (name, "")
    quoted = path.replace('"', '\\"')
    return f'@"{quoted}"{of}'


def _unquoted(name: str) -> str:
    return name.replace('\\"', '"')


def pasted(text: str) -> str:
    """What a pasted text becomes: mentions, if it consists of nothing but absolute paths of files, as terminals write
    them where files are dropped, and file managers where they are copied; else the text itself."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > _MOST_DROPPED:  # rather a list of files than files
        return text
    try:
        paths = [path for line in lines for path in _dropped(line.strip())]
        if not paths or not all(path.is_absolute() and path.is_file() for path in paths):
            return text
    except (OSError, ValueError, RuntimeError):
        return text
    return " ".join(mention_of(shown(path)) for path in paths) + " "


def _dropped(line: str) -> list[Path]:
    """The paths in a line: one that is written plainly, or some as a shell takes them. Raises ValueError."""
    if not line.startswith(("/", "~/", "'/", '"/', "file://")):
        raise ValueError
    words = [line] if line[0] in "/~" and Path(line).expanduser().is_file() else shlex.split(line)
    return [Path(local_path(word)).expanduser() for word in words]


def completions(text: str) -> tuple[int, list[str]]:
    """How the mention at the end of `text` could go on: the index at which it begins, and whole mentions. Folders end
    in "/". Those whose names begin with what was typed come first. No mention: (-1, [])."""
    match = re.search(r'(?:^|(?<=[\s("\']))@(?:"((?:\\"|[^"\n])*)|([^\s"@]*))$', text)
    if match is None:
        return -1, []
    typed = _unquoted(match[1]) if match[1] is not None else match[2]
    if LINES.search(typed) or is_glob(typed):
        return -1, []
    head, slash, name = typed.rpartition("/")
    start, low = head + slash if typed != "~" else "~/", name.lower() if typed != "~" else ""

    def fits(each: str) -> bool:
        return low in each.lower() and (name.startswith(".") or not each.startswith("."))

    try:
        parent = Path.cwd() / Path(head + slash).expanduser() if typed != "~" else Path.home()
        with os.scandir(parent) as entries:
            names = [entry.name + ("/" if entry.is_dir() else "") for entry in entries if fits(entry.name)]
    except (OSError, ValueError, RuntimeError):
        return -1, []
    first = heapq.nsmallest(
        _MOST_COMPLETIONS,
        names,
        lambda each: (not each.lower().startswith(low), not each.endswith("/"), each.lower()),
    )
    return match.start(), [_unfinished(start + each) for each in first if one_line(each) == each]


def _unfinished(name: str) -> str:
    """The mention of a name that may go on: of a folder, without the closing quote."""
    return mention_of(name).removesuffix('"') if name.endswith("/") else mention_of(name)
