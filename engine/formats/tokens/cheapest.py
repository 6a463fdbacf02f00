"""PLaMo's tokenizer: of all ways to cut a text into tokens, the one whose scores have the largest sum
(llm_tokenizer_plamo2 in src/llama-vocab.cpp of llama.cpp)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from engine.formats.tokens.longest import MOST

_UNIT = 10_000  # scores are compared as integers
_UNKNOWN = 1_000 * _UNIT
"""What a character costs that no token has."""
_LEFT_OUT = 2 * _UNKNOWN
"""Tokens that cost so much are in no text."""
_BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"


class CheapestTokens:
    """Reads texts with the tokens of a vocabulary."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], of_bytes: Mapping[int, int]) -> None:
        """`ids`: those of the tokens, by their texts; `scores`: of all ids; `of_bytes`: the tokens of single bytes."""
        self._of_bytes, self._tokens = of_bytes, dict[str, tuple[int, int]]()
        lengths = defaultdict[str, set[int]](set)
        for text, id in ids.items():
            score = scores[id] * _UNIT
            if 0 < len(text) <= MOST and abs(score) < _LEFT_OUT:  # nor is NaN
                self._tokens[text] = int(0.5 - score) if score < 0 else -int(score + 0.5), id
                lengths[text[:2]].add(len(text))
        self._lengths = {begin: sorted(of, reverse=True) for begin, of in lengths.items()}
        """Of the tokens that begin with two characters, the longest first."""

    def __call__(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of each of the texts. Of a character without a token there are those of its bytes."""
        return [self._read(word.removeprefix(_BOM)) for word in words]

    def _read(self, text: str) -> list[int]:
        costs, best = [0] * (len(text) + 1), [("", -1)] * len(text)
        for i in reversed(range(len(text))):
            least, chosen = costs[i + 1] + _UNKNOWN, (text[i], -1)
            two = text[i : i + 2]
            lengths = (*self._lengths.get(two, ()), *(self._lengths.get(text[i], ()) if len(two) > 1 else ()))
            for length in lengths:
                piece = text[i : i + length]
                if (token := self._tokens.get(piece)) and len(piece) == length:
                    cost = costs[i + length] + token[0]
                    if cost < least or (cost == least and chosen[1] < 0):
                        least, chosen = cost, (piece, token[1])
            costs[i], best[i] = least, chosen
        found, place = [], 0
        while place < len(text):
            piece, id = best[place]
            found += [id] if id >= 0 else [self._of_bytes[byte] for byte in piece.encode()]
            place += len(piece)
        return found
