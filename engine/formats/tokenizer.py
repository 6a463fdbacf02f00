"""From text to token ids and back: byte-level BPE and SentencePiece vocabularies out of GGUF metadata.

The merging is done by the `tokenizers` library. What surrounds it follows llama.cpp (src/llama-vocab.cpp), so
that both give the same ids, but for one thing: text has no special tokens in it unless its caller says so.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Merger

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, StringArray, shown
from engine.formats.pretokenizers import DEFAULT, PRETOKENIZERS

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

# Tokens that end a reply, known by their text, since files seldom name more than one of them.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>",
    "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<｜end▁of▁sentence｜>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
_THINK_MARKS = ("<think>", "</think>")  # shown even where they are control tokens: `thinking` looks for them

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
_LONGEST_PIECE = 512  # characters; a longer SentencePiece piece is never produced
_SURROGATES = re.compile("[\ud800-\udfff]")


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's one printable character per byte: code point -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """The vocabulary of a model file, which need not have any weights.

    `bos_id` and `eos_id` may be missing in a file. `eos_ids` are all tokens that end a reply, `add_bos` and
    `add_eos` what the model expects around a text. `warning` says in a sentence what was not as expected.
    Raises ModelFileError if the file has no vocabulary or one of an unknown kind.
    """

    def __init__(self, gguf: GGUF) -> None:
        kind = gguf.get("tokenizer.ggml.model", str)
        if kind not in ("gpt2", "llama"):
            raise ModelFileError(
                f'{shown(gguf.path.name)} has a tokenizer of the kind "{shown(kind)}"; '
                'byte-level BPE ("gpt2") and SentencePiece ("llama") can be used.',
                "Choose a model of another family.",
            )
        self.warning = ""
        self.sentencepiece = kind == "llama"
        self._raw = gguf.get("tokenizer.ggml.tokens", StringArray).raws()
        texts = [raw.decode("utf-8", "replace") for raw in self._raw]
        self.vocab_size = len(texts)
        self._types = self._numbers(gguf, "token_type", np.int32, 1)

        ids = {text: id for id, text in reversed([*enumerate(texts)])}  # of equal ones the first counts
        merges = [] if self.sentencepiece else list(gguf.get("tokenizer.ggml.merges", StringArray))
        ends = {ids[text] for text in _END_TEXTS if text in ids and not self._spelled(text, ids, merges)}
        if {"<|return|>", "<|call|>"} <= ids.keys():  # there, <|end|> ends only a part of a reply
            ends.discard(ids.get("<|end|>", -1))
        self._types[list(ends)] = _CONTROL
        self._set_special_ids(gguf, ends)

        special_ids = np.flatnonzero(np.isin(self._types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
        special = {texts[i]: i for i in reversed(special_ids) if texts[i]}
        hidden = np.flatnonzero(np.isin(self._types, (_UNKNOWN, _CONTROL))).tolist()
        self._hidden = frozenset(hidden) - {special.get(mark) for mark in _THINK_MARKS}
        self.special_tokens: Mapping[str, int] = special
        # User-defined runs of spaces and line breaks are how some models write plain text.
        self._in_any_text = _alternatives(text for text in special if text.isspace())
        self._in_special_text = _alternatives(special)

        for text in special:
            del ids[text]
        self._merger = self._sentencepiece(gguf, ids) if self.sentencepiece else self._byte_level(ids, merges)

    def _spelled(self, text: str, ids: Mapping[str, int], merges: Sequence[str]) -> bool:
        """Whether a token that looks special is ordinary text, as "</s>" is to Qwen: merges lead to it."""
        ordinary = self._types[ids[text]] not in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        return ordinary and any(f"{text[:cut]} {text[cut:]}" in merges for cut in range(1, len(text)))

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Self:
        """The tokenizer of a model file, as `ChatTemplate.from_gguf` is its template."""
        return cls(gguf)

    def _numbers(self, gguf: GGUF, name: str, dtype: type, default: int) -> np.ndarray[Any, Any]:
        key = f"tokenizer.ggml.{name}"
        numbers = gguf.get(key, np.ndarray, None)
        if numbers is None:
            return np.full(self.vocab_size, default, dtype)
        if len(numbers) < self.vocab_size:
            raise ModelFileError(
                f"{shown(gguf.path.name)} is damaged: {key} has {len(numbers)} entries for "
                f"{self.vocab_size} tokens.",
                "Download it again.",
            )
        return numbers[: self.vocab_size].astype(dtype)

    def _set_special_ids(self, gguf: GGUF, ends: set[int]) -> None:
        def special_id(name: str, default: int | None = None) -> int | None:
            id = gguf.get(f"tokenizer.ggml.{name}_token_id", int, default)
            return id if id is not None and 0 <= id < self.vocab_size else None

        self.bos_id = special_id("bos", 1 if self.sentencepiece else None)
        self.eos_id = special_id("eos", 2 if self.sentencepiece else None)
        named = (self.eos_id, special_id("eot"), special_id("eom"))
        self.eos_ids = frozenset(ends.union(id for id in named if id is not None))
        pre = gguf.get("tokenizer.ggml.pre", str, "")
        self.pretokenizer = PRETOKENIZERS.get(pre, DEFAULT)
        if not self.sentencepiece and pre not in PRETOKENIZERS:
            what = f'an unknown pre-tokenizer, "{shown(pre)}"' if pre else "no pre-tokenizer"
            self.warning = f"The model file names {what}; answers may be worse than the model's own."
        add_bos = self.sentencepiece or self.pretokenizer.add_bos
        self.add_bos = gguf.get("tokenizer.ggml.add_bos_token", bool, add_bos) and self.bos_id is not None
        self.add_eos = gguf.get("tokenizer.ggml.add_eos_token", bool, False) and self.eos_id is not None
        prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool, self.sentencepiece)
        self.add_space_prefix = self.sentencepiece and prefix

    def _byte_level(self, ids: dict[str, int], lines: Sequence[str]) -> Merger:
        merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
        options = {"ignore_merges": self.pretokenizer.whole_words}
        try:
            model = models.BPE(ids, merges, **options)
        except Exception:  # the library's own type: a merge of something that is not in the vocabulary
            known = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
            self.warning = (
                f"{len(merges) - len(known)} merges of the vocabulary are damaged and were left out."
            )
            model = models.BPE(ids, known, **options)
        merger = Merger(model)
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.pretokenizer.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        merger.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        return merger

    def _sentencepiece(self, gguf: GGUF, ids: dict[str, int]) -> Merger:
        """SentencePiece joins the two neighbours whose join has the highest score; as BPE, these are merges
        ranked by score, one for each way to cut a piece in two known ones."""
        scores = self._numbers(gguf, "scores", np.float32, 0).tolist()
        produced = [
            text for text, id in ids.items() if 1 < len(text) <= _LONGEST_PIECE and self._types[id] != _BYTE
        ]
        produced.sort(key=lambda text: (-scores[ids[text]], ids[text]))
        merges = [
            (text[:cut], text[cut:])
            for text in produced
            for cut in range(1, len(text))
            if text[:cut] in ids and text[cut:] in ids
        ]
        unknown = next(
            (text for text, id in self.special_tokens.items() if self._types[id] == _UNKNOWN), None
        )
        if unknown is not None:  # nothing merges to it: it stands for characters that no token can spell
            ids = ids | {unknown: self.special_tokens[unknown]}
        return Merger(models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))

    # --- text to ids -------------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = False, add_special: bool = False) -> list[int]:
        """The token ids of `text`. With `special`, names of special tokens in it become these tokens; if not,
        nothing in it does. `add_special` puts BOS before and EOS after it where the model expects them."""
        ids = self.encode_segments([(text, special)])
        if add_special and self.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special and self.add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """The token ids of segments (text, special) that follow each other. Special tokens are looked for in
        each segment by itself and only where `special` is true; plain text merges across segments."""
        parts: list[str | int] = []  # plain text or a special token's id, no two texts in a row
        for segment, special in segments:
            pattern = self._in_special_text if special else self._in_any_text
            for i, text in enumerate(pattern.split(_SURROGATES.sub("\N{REPLACEMENT CHARACTER}", segment))):
                if i % 2:  # the split alternates text and special token
                    parts.append(self.special_tokens[text])
                elif parts and isinstance(parts[-1], str):
                    parts[-1] += text
                elif text:
                    parts.append(text)

        ids: list[int] = []
        after_special = True  # SentencePiece models put a space before a text, but not between two texts
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                if self.sentencepiece:
                    part = (_SPACE if self.add_space_prefix and after_special else "") + part.replace(
                        " ", _SPACE
                    )
                ids += self._merger.encode(part, add_special_tokens=False).ids
            after_special = isinstance(part, int)
        return ids

    # --- ids to text -------------------------------------------------------------------------------------

    def text(self, id: int | None) -> str:
        """A token as the vocabulary writes it ("" for None): what a template calls `bos_token`."""
        return "" if id is None else self._raw[id].decode("utf-8", "replace")

    def piece(self, id: int) -> bytes:
        """The bytes that a token stands for; for a special token those of its name, b"" for an id past the
        vocabulary (models pad their output)."""
        if not 0 <= id < self.vocab_size:
            return b""
        raw, kind = self._raw[id], self._types[id]
        if kind == _BYTE and re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", raw):
            return bytes([int(raw[3:5], 16)])
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            return raw
        if self.sentencepiece:
            return raw.replace(_SPACE.encode(), b" ")
        try:
            return bytes(_BYTE_OF[ord(c)] for c in raw.decode())
        except (KeyError, UnicodeDecodeError):  # not in the byte alphabet
            return raw

    @cached_property
    def pieces(self) -> Sequence[bytes]:
        """`piece` of every token."""
        return [self.piece(id) for id in range(self.vocab_size)]

    def hides(self, id: int) -> bool:
        """Whether a token is no text of a reply: control tokens, but not the marks around thinking."""
        return id in self._hidden

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; `special` shows the names of control tokens in it."""
        stream = StreamDecoder(self, special=special)
        return "".join([stream.feed(id) for id in ids]) + stream.flush()


class StreamDecoder:
    """Turns tokens into text one at a time. A character that is not complete is held back until it is; bytes
    that cannot become one are U+FFFD. `special` shows the names of control tokens."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.add_space_prefix  # the one that encoding put before the text

    def feed(self, id: int) -> str:
        """The text that a token completes: possibly ""."""
        if self._tokenizer.hides(id) and not self._special:
            return ""
        text = self._utf8.decode(self._tokenizer.piece(id))
        if text and self._drop_space:
            self._drop_space = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD if a character was not completed."""
        return self._utf8.decode(b"", final=True)


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the longest first, in a group; nothing if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"((?!))")
