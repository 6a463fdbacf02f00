"""JSON with half a character: one surrogate without the other, as programs in JavaScript write it that cut a text
within an emoji. No text in UTF-8 can hold that, so readers of JSON refuse all of it."""

import re

MOST_BYTES = 4 << 20
"""Of longer JSON nothing is replaced: it would take as long as the text is, and others wait."""
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.",
    re.DOTALL,
)
"""A whole character in two surrogates, one surrogate, or the beginning of another escape."""
_ONE = len(rb"\ud800")


def without_half_characters(data: bytes | bytearray | memoryview) -> bytes:
    """`data`, which is JSON, with U+FFFD in place of each half character."""
    if len(data) > MOST_BYTES:
        return bytes(data)
    return _ESCAPES.sub(lambda escape: rb"\ufffd" if len(escape[0]) == _ONE else escape[0], data)
