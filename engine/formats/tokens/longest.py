"""RWKV's tokenizer: at each place of a text, the longest token that fits (src/llama-vocab.cpp of llama.cpp)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

MOST = 256
"""Bytes or characters of a token. Longer ones are not used: at each place of a text all lengths are tried, so with some
thousands of them a text of a page would take an hour."""
_ESCAPED = {ord("t"): b"\t", ord("n"): b"\n", ord("r"): b"\r"}


def unescaped(spelled: bytes) -> bytes:
    r"""The bytes of a token, which a file spells as Python does: \t, \n, \r, \xHH, and other characters after \."""
    first, *rest = spelled.split(b"\\")
    parts, after_backslash = [first], False
    for part in rest:
        if after_backslash:  # the second one of two
            parts.append(part)
            after_backslash = False
        elif not part:
            parts.append(b"\\")
            after_backslash = True
        elif part[:1] == b"x":
            with_code = part[1:3]
            parts += [bytes.fromhex(with_code.decode()) if _is_code(with_code) else with_code, part[3:]]
        else:
            parts += [_ESCAPED.get(part[0], part[:1]), part[1:]]
    return b"".join(parts)


def _is_code(digits: bytes) -> bool:
    return len(digits) == 2 and all(digit in b"0123456789abcdefABCDEF" for digit in digits)


class LongestTokens:
    """Reads texts with the tokens of a vocabulary."""

    def __init__(self, ids: Mapping[bytes, int]) -> None:
        """`ids`: those of the tokens, by their bytes."""
        lengths = defaultdict[bytes, set[int]](set)
        for piece in (piece for piece in ids if len(piece) <= MOST):
            lengths[piece[:2]].add(len(piece))
        self._ids = ids
        self._lengths = {begin: sorted(of, reverse=True) for begin, of in lengths.items()}
        """Of the tokens that begin with two bytes, the longest first."""

    def __call__(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of each of the texts. Bytes that no token has are left out."""
        return [self._read(word.encode()) for word in words]

    def _read(self, text: bytes) -> list[int]:
        found, place, ids = [], 0, self._ids
        while place < len(text):
            for length in self._lengths.get(text[place : place + 2], ()):
                if (id := ids.get(text[place : place + length])) is not None:
                    found.append(id)
                    place += length
                    break
            else:
                if (id := ids.get(text[place : place + 1])) is not None:
                    found.append(id)
                place += 1
        return found
