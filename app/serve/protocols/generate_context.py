"""The `context` of Ollama's `/api/generate`: the conversation so far as numbers, which a client sends with its next
prompt. The encoding is this server's own, since clients only send it back: compressed JSON, a number for each byte."""

import zlib
from collections.abc import Sequence

import msgspec

from app.serve.bodies import MAX_BODY_BYTES
from app.serve.errors import wrong

Turn = tuple[str, str]
"""A role and a text."""


def packed(turns: Sequence[Turn]) -> list[int]:
    return [*zlib.compress(msgspec.json.encode(turns))]


def turns(context: Sequence[int], system: str) -> list[Turn]:
    """Those of a `context`, which may have none. `system`: the system text that the request has, if any, in place of
    an earlier one. Raises ApiError."""
    before: list[Turn] = []
    if context:
        try:
            data = zlib.decompressobj().decompress(bytes(context), MAX_BODY_BYTES)
            before = msgspec.json.decode(data, type=list[Turn])
        except (ValueError, zlib.error):
            raise wrong("This context is not one that this server gave.", "context") from None
    if not system:
        return before
    return [("system", system), *(turn for turn in before if turn[0] != "system")]
