"""JSON with half a character: one surrogate without the other, as programs in JavaScript write it that cut a text
within an emoji. No text in UTF-8 can hold that, so readers of JSON refuse all of it."""

import re

MOST_BYTES = 4 << 20
"""Of longer JSON nothing is replaced: it would take as long as the text is, and others wait."""
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""A whole character in two surrogates, or one surrogate."""
_UNKNOWN = rb"\ufffd"  # which is as long as a surrogate


def without_half_characters(data: bytes | bytearray | memoryview) -> bytes:
    """`data`, which is JSON, with U+FFFD in place of each half character."""
    if len(data) > MOST_BYTES:
        return bytes(data)
    whole = bytearray(data)
    readable = whole.replace(rb"\\", b"  ")  # after a backslash that is text, no escape begins
    for escape in _ESCAPES.finditer(readable):
        if len(escape[0]) == len(_UNKNOWN):
            whole[escape.start() : escape.end()] = _UNKNOWN
    return bytes(whole)
