"""The `context` of Ollama's `/api/generate`: the conversation so far as numbers, which a client sends with its next
prompt. The encoding is this server's own, since clients only send it back: compressed JSON, a number for each byte."""

import zlib
from collections.abc import Sequence

import msgspec

from app.serve.errors import wrong

Turn = tuple[str, str]
"""A role and a text."""
_GROWS_BY, _SPARE_BYTES = 8, 32 << 10
"""A context may unpack to so many times its length, and so many bytes more: 28 kB can hold a million turns, and other
clients would wait for them."""


def packed(turns: Sequence[Turn]) -> list[int]:
    data = msgspec.json.encode(turns)
    compressed = zlib.compress(data)
    return [*(compressed if len(data) <= _most_bytes(len(compressed)) else zlib.compress(data, level=0))]


def turns(context: Sequence[int], system: str) -> list[Turn]:
    """The turns of a `context`, perhaps none. `system`: the system text of the request, which takes the place of an
    earlier one; "" if there is none. Raises ApiError."""
    before: list[Turn] = []
    if context:
        try:
            data = zlib.decompressobj().decompress(bytes(context), _most_bytes(len(context)))
            before = msgspec.json.decode(data, type=list[Turn])
        except (ValueError, zlib.error):
            raise wrong("This context is not one that this server gave.", "context") from None
    if not system:
        return before
    return [("system", system), *(turn for turn in before if turn[0] != "system")]


def _most_bytes(n: int) -> int:
    """How long the JSON of a context of n bytes may be."""
    return _GROWS_BY * n + _SPARE_BYTES
