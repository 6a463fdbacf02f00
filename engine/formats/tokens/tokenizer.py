"""Text to token ids, with the vocabulary in a model file.

Everything around the merges follows llama.cpp (src/llama-vocab.cpp), so that both give the same ids, with one
difference: names of special tokens in a text are ordinary text unless the caller says otherwise.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from sys import getsizeof
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import SHORTEN, ContextFullError
from engine.formats.gguf import GGUF
from engine.formats.name_pattern import any_name
from engine.formats.tokens.vocabulary import SPACE, USER_DEFINED, Vocabulary

Codes = NDArray[np.uint8] | NDArray[np.uint32]
_SURROGATES = re.compile("[\ud800-\udfff]")
# User-defined tokens that begin like this belong to chat templates; the others are part of any text, and so is HTML,
# which Gemma 3 has tokens for.
_BRACKETS = ("<", "[", "{", "|")
_HTML = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code|a|html|body|img"
    r"|span|bbox|ul|li|div|iframe|footer)>"
)

_REMEMBERED_BYTES = 4 << 20  # of texts and their token ids
_REMEMBERED_TEXTS = 2048  # many short ones would be scattered over the heap, and merging these takes little
_ENTRY_BYTES = 100  # of a dictionary


class Merge(Protocol):
    """Merges the texts of one vocabulary."""

    @property
    def warning(self) -> str:
        """A sentence about damaged merges, or ""."""

    def __call__(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of each of the texts, in which spaces are written as the vocabulary writes them."""


class Tokenizer(Vocabulary):
    """A vocabulary that reads texts. Another process may do `merge`, with the same file. Token ids of recent texts are
    remembered, because a chat sends all its messages with each prompt."""

    def __init__(self, gguf: GGUF, merge: Merge | None = None) -> None:
        super().__init__(gguf)
        special = self.special_tokens
        self._text_tokens = {
            text if self.writes_spaces else text.replace(SPACE, " "): id
            for text, id in special.items()
            if self.types[id] == USER_DEFINED and (not text.startswith(_BRACKETS) or _HTML.fullmatch(text))
        }
        self._in_any_text = any_name(self._text_tokens)
        self._in_special_text = any_name(special.keys() - self._text_tokens.keys())
        # Phi-3's tokenizer.json: such tokens take the white space after them ("rstrip").
        strips = self.sentencepiece and {"<|assistant|>", "<|end|>", "<|placeholder1|>"} <= special.keys()
        kept = (self.bos_id, special.get("<|endoftext|>"), special.get("<unk>"))
        self._strips_after = frozenset(special.values()).difference(kept) if strips else frozenset()
        if merge is None:
            from engine.formats.tokens.merges import Merges  # the library takes long to import

            merge = Merges(gguf, self)
        self.merge = merge
        self._remembered: dict[str, array[int]] = {}  # those that were used last are the last
        self._remembering, self._remembered_bytes = Lock(), 0

    # --- text to ids -------------------------------------------------------------------------------------

    def encode(
        self, text: str, *, special: bool = False, add_special: bool = False, most: int | None = None
    ) -> list[int]:
        """The token ids of `text`. With `special`, the names of special tokens in it become these tokens; else they are
        ordinary text. `add_special` adds BOS before and EOS after the text if the model expects them; a second BOS it
        does not. `most` and what it raises: see `encode_segments`."""
        ids = self.encode_segments([(text, special)], most)
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_special and self.add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def encode_segments(
        self, segments: Iterable[tuple[str, bool]], most: int | None = None, others: int = 0
    ) -> list[int]:
        """The token ids of consecutive segments (text, special). Special tokens are searched within each segment, and
        only if its `special` is true. Plain text merges across segments.

        Raises ContextFullError, before any time and memory are spent, for a text that is certain to have more than
        `most` tokens (see `_fewest`), with so many `others` of the conversation."""
        parts: list[str | int] = []  # plain text or the id of a special token; never two texts in a row
        for segment, special in segments:
            text = _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", segment)
            for i, piece in enumerate(self._in_special_text.split(text) if special else [text]):
                if i % 2:  # split() alternates text and the matched tokens
                    parts.append(self.special_tokens[piece])
                elif parts and isinstance(parts[-1], str):
                    parts[-1] += piece
                elif piece := piece.lstrip() if parts and parts[-1] in self._strips_after else piece:
                    parts.append(piece)

        before = " " if self.add_space_prefix else ""  # such models expect a space before a text
        parts = [part if isinstance(part, int) else before + part for part in parts]
        if (
            most is not None
            and others + sum(1 if isinstance(part, int) else len(part) for part in parts) > most
        ):
            texts = [part for part in parts if isinstance(part, str)]
            self.check_fewest(texts, most, others + len(parts) - len(texts))
            if any(self._goes_beyond(text, most - others) for text in texts):
                raise ContextFullError(
                    f"The conversation has over {most:,} tokens, and the context holds no more.",
                    SHORTEN,
                    tokens=most + 1,
                    most=most,
                )
        return self._ids(parts)

    def check_fewest(self, texts: Sequence[str], most: int, others: int = 0) -> None:
        """Raises ContextFullError if texts that are not next to each other, and so many `others`, are certain to have
        more than `most` tokens."""
        if others + sum(map(len, texts)) <= most:
            return
        if (least := others + self._fewest(texts)) > most:
            raise ContextFullError(
                f"The conversation has at least {least:,} tokens and the context holds {most:,}.",
                SHORTEN,
                tokens=least,
                most=most,
            )

    def _goes_beyond(self, text: str, most: int) -> bool:
        """Whether the beginning of a text that is much longer than `most` tokens usually are has more of them, and some
        to spare: what comes after it can change only its last few. Takes time for a multiple of `most`."""
        length = 8 * most + 1024
        while length < len(text) // 2 and text not in self._remembered:
            if len(self._ids([text[:length]])) > most + most // 16 + 64:
                return True
            length *= 4
        return False

    def _fewest(self, texts: Sequence[str]) -> int:
        """A number of tokens that `texts` have at least; no token has more of `_amounts` than those of the vocabulary
        have at most. The longest token is often a run of spaces, so words and changes tell more of most texts. Of a
        text that is remembered, it is the number of its tokens."""
        known = {text: len(ids) for text in texts if (ids := self._remembered.get(text)) is not None}
        spelled = [self._codes(text) for text in texts if text and text not in known]
        least = sum(known.get(text, 0) for text in texts)
        if spelled and not self.reads_plain:
            starts = np.cumsum([0, *(len(codes) for codes, _ in spelled)])[:-1]
            amounts = _amounts(np.concatenate([codes for codes, _ in spelled]), spelled[0][1], starts)
            least += int((-(-amounts // self._most_in_a_token)).max(axis=1).sum())
        return least

    def _codes(self, text: str) -> tuple[Codes, int]:
        """`text` as numbers, of which a token has as many as its spelling in the vocabulary has characters, and the
        number of a space."""
        if self.writes_spaces:
            return np.frombuffer(text.encode(), np.uint8), ord(" ")
        return _code_points(text.replace(" ", SPACE)), ord(SPACE)

    @cached_property
    def _most_in_a_token(self) -> NDArray[np.int64]:
        """The largest amount in a token, for each of `_amounts`."""
        texts = [text for text in self.tokens if text]
        starts = np.cumsum([0, *map(len, texts)])[:-1]
        space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}" if self.writes_spaces else SPACE
        spelled = _amounts(_code_points("".join(texts)), ord(space), starts)
        named = [_amounts(*self._codes(text), [0]) for text in self._text_tokens]  # as they are in a text
        most: NDArray[np.int64] = np.concatenate([spelled, *named]).max(0, initial=1)
        return most

    def _ids(self, parts: Sequence[str | int]) -> list[int]:
        """The token ids of plain texts and of ids, one after the other."""
        texts = dict.fromkeys(part for part in parts if isinstance(part, str))
        with self._remembering:
            known = {text: ids for text in texts if (ids := self._remembered.get(text)) is not None}
        pieces = {text: self._pieces(text) for text in texts if text not in known}
        words = [piece for of_text in pieces.values() for piece in of_text if isinstance(piece, str)]
        merged = iter(self.merge(words) if words else [])
        for text, of_text in pieces.items():
            known[text] = array(
                "i", (id for piece in of_text for id in ([piece] if isinstance(piece, int) else next(merged)))
            )
        self._remember({text: known[text] for text in texts})
        return [id for part in parts for id in ([part] if isinstance(part, int) else known[part])]

    def _pieces(self, text: str) -> list[str | int]:
        """Words to merge, and the ids of tokens that are part of any text."""
        pieces: list[str | int] = []
        for i, piece in enumerate(self._in_any_text.split(text)):
            if i % 2:
                pieces.append(self._text_tokens[piece])
            elif piece:
                is_as_it_is = self.writes_spaces or self.reads_plain
                pieces.append(piece if is_as_it_is else piece.replace(" ", SPACE))
        return pieces

    def _remember(self, used: dict[str, array[int]]) -> None:
        with self._remembering:
            for text, ids in used.items():
                if self._remembered.pop(text, None) is None:
                    self._remembered_bytes += _bytes(text, ids)
                self._remembered[text] = ids
            while self._remembered_bytes > _REMEMBERED_BYTES or len(self._remembered) > _REMEMBERED_TEXTS:
                oldest = next(iter(self._remembered))
                self._remembered_bytes -= _bytes(oldest, self._remembered.pop(oldest))


def _bytes(text: str, ids: array[int]) -> int:
    """What remembering a text takes."""
    return getsizeof(text) + getsizeof(ids) + _ENTRY_BYTES


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _amounts(codes: Codes, space: int, starts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """How many characters, words and changes from one character to another the texts have that begin at `starts` in
    `codes` and are not empty: (text, 3) int64. A word is what lies between spaces; the first character is a change."""
    starts = np.asarray(starts)
    words = codes != space
    changes = np.ones(len(codes), bool)
    changes[1:] = codes[1:] != codes[:-1]
    begins = words.copy()
    begins[1:] &= ~words[:-1]
    changes[starts], begins[starts] = True, words[starts]
    counts = [np.add.reduceat(each, starts, dtype=np.int64) for each in (begins, changes)]
    return np.stack([np.diff(starts, append=len(codes)), *counts], axis=1)
