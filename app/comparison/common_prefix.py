"""How far two streams of tokens are the same."""

from collections.abc import Sequence

from engine.protocol.events import Token


class CommonPrefix:
    """The common prefix of two growing answers: `length` in tokens. `ended`: the tokens after it differ.

    A server may not report the id of a token (-1). Such tokens are compared by their text, together with that of
    the next token whose ids are known."""

    def __init__(self) -> None:
        self.length = 0
        self.ended = False

    def update(self, a: Sequence[Token], b: Sequence[Token]) -> None:
        """Extends the prefix. `a` and `b` are the answers so far, each an extension of what it was before."""
        shorter = min(len(a), len(b))
        while not self.ended and self.length < shorter:
            known = (i for i in range(self.length, shorter) if -1 not in (a[i].id, b[i].id))
            if (last := next(known, None)) is None:
                return
            run = slice(self.length, last + 1)
            if a[last].id == b[last].id and (last == self.length or _text(a[run]) == _text(b[run])):
                self.length = last + 1
            else:
                self.ended = True


def _text(tokens: Sequence[Token]) -> str:
    """Leaves U+FFFD out: engines differ in how many of them they print for a broken character."""
    return "".join(token.text for token in tokens).replace("\N{REPLACEMENT CHARACTER}", "")
