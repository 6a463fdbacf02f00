"""Files in requests, as parts of messages. Those of text are read; they come with the request, in base64."""

from typing import Any

from app.chat.files import decoded_text
from app.serve.errors import wrong
from app.serve.protocols.common.pictures import NOTHING_ELSE, decoded


def from_file(file: Any, param: str) -> str:
    """The name of a file (`filename`, `file_data`) and its text. Its data are base64, also as a data: URL.
    Raises ApiError for one that is named by an id or an address, or holds no text."""
    given = file.get("file_data") if isinstance(file, dict) else None
    if not isinstance(given, str):
        raise wrong("A file comes with the request, in file_data.", param)
    head, _, data = given.partition(",") if given[:5].lower() == "data:" else (";base64", ",", given)
    if not head.lower().endswith(";base64"):
        raise wrong("A data: URL has its data in base64.", param)
    try:
        text = decoded_text(decoded(data))
    except ValueError:
        text = None
    if text is None:
        raise wrong(NOTHING_ELSE, param)
    name = file.get("filename")
    return f"{name}\n{text}\n" if isinstance(name, str) and name else f"{text}\n"
