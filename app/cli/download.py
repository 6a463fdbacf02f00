"""Downloads a model by name, with progress on a line or as JSON."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from app.chat.download import progress_text
from app.cli.progress import ProgressLine, say
from engine.catalog import cache
from engine.catalog.downloads import download
from engine.catalog.files import quantization_of
from engine.catalog.names import HubModel, WebFile, parse
from engine.catalog.progress import Cancelled, Progress
from engine.description import file_summary
from engine.errors import ModelFileError, UsageError
from engine.formats.gguf import GGUF
from widgets.text import clean

KEPT = "The next try goes on with what has arrived."


def obtain(
    name: str,
    aliases: Mapping[str, str],
    messages: TextIO,
    *,
    quiet: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """The file of the model `name`, downloaded if it is not on this machine. Names the file on `messages`; if `quiet`,
    only after a download. A path is returned as it is, even if there is no file. `aliases`: see `Settings.names`.

    Raises UsageError and ModelFileError."""
    source = parse(name, aliases)
    if isinstance(source, Path):
        return source
    path = cache.find(source)
    if path is None or not quiet:
        path = path or fetch(source, messages, cancelled=cancelled)
        say(messages, f"{name} is {path.name} ({_quantization(path)}).")
    return path


def fetch(
    source: HubModel | WebFile,
    messages: TextIO,
    *,
    as_json: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Downloads a file and shows the progress on a line of `messages`, or as lines of JSON. Raises what `download`
    does, but UsageError soon after `cancelled` returns true."""
    line, has_arrived = ProgressLine(messages), False

    def report(progress: Progress) -> None:
        nonlocal has_arrived
        has_arrived = progress.done_bytes > 0
        if as_json:
            fields = {name: getattr(progress, name) for name in progress.__dataclass_fields__}
            write_json(messages, {"event": "progress", **fields})
        else:
            line.show(progress_text(progress))

    if not as_json:
        say(messages, f"Downloading {source}.")
    try:
        return download(source, report, cancelled)
    except Cancelled:
        raise UsageError("Stopped.", KEPT if has_arrived else "") from None
    except KeyboardInterrupt:
        line.clear()
        say(messages, "Stopped.", KEPT if has_arrived else "")
        raise
    finally:
        line.clear()


def write_json(out: TextIO, value: object) -> None:
    print(clean(json.dumps(value)), file=out, flush=True)


def _quantization(path: Path) -> str:
    try:
        with GGUF(path) as file:
            return file_summary.quantization(file)
    except ModelFileError:
        return quantization_of(path.name)
