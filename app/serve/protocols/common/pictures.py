"""Pictures in requests. They come with the request, in base64: what is not in it, the server does not fetch."""

import binascii
from contextlib import suppress
from typing import Any

from app.serve.errors import ApiError, wrong
from engine.formats.picture_kind import READ, media_type, refusal
from engine.protocol.events import Picture

_OF_ADDRESSES = str.maketrans("-_", "+/")
_ESCAPED = {"%2B": "+", "%2F": "/", "%3D": "=", "%0A": "", "%0D": "", "%20": ""}
"""What addresses write in another way. Python's `unquote` takes ten seconds for a text of megabytes."""
_SCHEME = 10  # characters that hold the scheme of an address
_SEND = "Send the picture itself, as data:image/png;base64 and its bytes."
PICTURES = ("image_url", "input_image", "image")
"""The types of parts that are pictures: OpenAI's chat completions and responses, Anthropic's messages."""
NOTHING_ELSE = "This server reads text and pictures: no sounds, PDFs or other files."
NOT_READ, NOT_SEEN = "(a file that cannot be read here)", "(a picture, and this model sees none)"
"""In place of what a tool returned. A refusal would end the conversation: each further request has the result, too."""


def from_url(url: Any, param: str) -> Picture:
    """The picture of a data: URL. Raises ApiError for any other address: it could lead into the server's own network,
    to a router, a service of this machine or a file."""
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or not (url := url.strip()):
        raise wrong(f"There is no picture. {_SEND}", param)
    scheme = url[:_SCHEME].partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise wrong(
            f"This server fetches nothing: an address could lead into its own network. {_SEND}", param
        )
    if scheme != "data":
        if ":" not in url:  # a picture's base64 alone, as llama-server takes it
            with suppress(ApiError):
                return _of_digits(url, param)
        raise wrong(f"This server opens no files for clients. {_SEND}", param)
    head, _, data = url.partition(",")
    if not head.lower().endswith(";base64"):
        raise wrong(f"A data: URL has its data in base64. {_SEND}", param)
    return _of_digits(data, param)


def from_base64(text: Any, param: str) -> Picture:
    """The picture in a text of base64, or in a data: URL, which some clients put there. Raises ApiError."""
    is_address = isinstance(text, str) and ":" in text[:_SCHEME]
    return (from_url if is_address else _of_digits)(text, param)


def _of_digits(text: Any, param: str) -> Picture:
    try:
        data = decoded(text)
    except ValueError:
        raise wrong("The picture is not valid base64.", param) from None
    if media_type(data) not in READ:
        raise wrong(refusal(data), param)
    return Picture(data=data)


def decoded(text: Any) -> bytes:
    """The bytes of base64, whose alphabet may be that of addresses, and which may lack its padding. Raises
    ValueError."""
    digits = "".join(text.split()).translate(_OF_ADDRESSES) if isinstance(text, str) else ""
    for escape, sign in _ESCAPED.items() if "%" in digits else ():
        digits = digits.replace(escape, sign).replace(escape.lower(), sign)
    if "=" not in digits:
        digits += "=" * (-len(digits) % 4)
    return binascii.a2b_base64(digits, strict_mode=True)


def from_part(part: Any, param: str) -> Picture:
    """The picture of a part of a message, in the form of any protocol: clients mix them up. Raises ApiError."""
    if part.source is not None:
        return from_source(part.source, param)
    return from_url(part.image_url or part.image or part.url, param)


def from_source(source: Any, param: str) -> Picture:
    """The picture of an image block in Anthropic's form. Raises ApiError."""
    match source:
        case {"type": "base64", "data": data}:
            return from_base64(data, param)
        case {"type": "url", "url": url}:
            return from_url(url, param)
    raise wrong(f"There is no picture: a source is of the type base64. {NOTHING_ELSE}", param)


def without_pictures(param: str) -> ApiError:
    """The error for pictures that are sent to a path of plain prompts."""
    return wrong("Pictures go to chats: this path takes texts and tokens.", param)


def unseen(model: str) -> ApiError:
    """The error for pictures that are sent to a model that sees none."""
    return wrong(
        f"{model} sees no pictures: it has no encoder for them. /v1/models says which models do.", "messages"
    )
