"""Drafters of Gemma 4: the files of their own beside models and in their repositories."""

import contextlib
from pathlib import Path

from engine.catalog.encoders import snapshot_of
from engine.errors import ModelFileError
from engine.system.whole_file import open_file

_HEAD_BYTES = 200


def drafter_beside(model: Path) -> Path | None:
    """The drafter for a model's file: the first one by name that is as wide, in its folder or the folder MTP in that
    or, in the hub's cache, anywhere in its repository. None if there is none."""
    snapshot = snapshot_of(model)
    folder, patterns = snapshot or model.parent, ("**/*.gguf",) if snapshot else ("*.gguf", "MTP/*.gguf")
    with contextlib.suppress(OSError):
        files = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        return next((path for path in files if _begins_as_drafter(path) and _fits(path, model)), None)
    return None


def _begins_as_drafter(path: Path) -> bool:
    """Whether a file names the architecture of drafters where writers of GGUF put it: first."""
    from engine.description.file_kind import ASSISTANT  # imports numpy

    with contextlib.suppress(OSError), open_file(path) as file:
        head = file.read(_HEAD_BYTES)
        return head.startswith(b"GGUF") and ASSISTANT.encode() in head
    return False


def _fits(drafter: Path, model: Path) -> bool:
    """Whether a drafter reads as many numbers of a token as a model has. Reads the heads of both files."""
    from engine.description.file_kind import ASSISTANT  # imports numpy
    from engine.formats.gguf import GGUF

    with contextlib.suppress(ModelFileError, OSError), GGUF(drafter) as draft, GGUF(model) as file:
        architecture = file.get("general.architecture", str, "")
        width = file.get(f"{architecture}.embedding_length", int, 0)
        return architecture == "gemma4" and draft.get(f"{ASSISTANT}.embedding_length_out", int, -1) == width
    return False
