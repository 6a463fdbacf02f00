"""Text to token ids and back, with the vocabulary in a model file: byte-level BPE, SentencePiece, or Gemma 4's BPE.

The library `tokenizers` merges. Everything around that follows llama.cpp (src/llama-vocab.cpp), so that both give the
same ids, with one difference: names of special tokens in a text are ordinary text unless the caller says otherwise.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Merger

from engine.errors import SHORTEN, ContextFullError, ModelFileError
from engine.formats.gguf import GGUF, StringArray, damaged, printable
from engine.formats.pretokenizers import DEFAULT, GEMMA4, PRETOKENIZERS
from engine.formats.thinking import MARK_TOKENS
from engine.formats.tool_calls import CALL_TOKENS

# tokenizer.ggml.token_type: enum llama_token_type in include/llama.h
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# Tokens that end a reply. They are known by their text, because files seldom name more than one of them.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>",
    "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<reponame>", "<|file_sep|>",
)  # fmt: skip

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes it for a space
_MAX_PIECE = 512  # characters; merges never produce a longer SentencePiece piece
_SURROGATES = re.compile("[\ud800-\udfff]")
# User-defined tokens that begin like this belong to chat templates; the others are part of any text, and so is HTML,
# which Gemma 3 has tokens for.
_BRACKETS = ("<", "[", "{", "|")
_HTML = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code|a|html|body|img"
    r"|span|bbox|ul|li|div|iframe|footer)>"
)


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's encoder.py, bytes_to_unicode: each byte is written as one printable character. Code point -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def check_tokenizer(file: GGUF) -> None:
    """Raises ModelFileError if the file has no vocabulary, or one of a kind that `Tokenizer` does not know. Fast."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ModelFileError(
            f'{printable(file.path.name)} has a tokenizer of the kind "{printable(kind)}"; orin-chat supports '
            'byte-level BPE ("gpt2"), SentencePiece ("llama") and the BPE of Gemma 4 ("gemma4").',
            "Choose a model of another family.",
        )
    file.get("tokenizer.ggml.tokens", StringArray)
    if kind != "llama":
        file.get("tokenizer.ggml.merges", StringArray)


class Tokenizer:
    """The tokenizer of a model file. The file needs no weights.

    `bos_id` and `eos_id` are None if the file has none. `eos_ids` are all tokens that end a reply; `add_bos` and
    `add_eos` say which tokens the model expects around a text. `special_tokens` maps names to ids. `warning` is a
    sentence about anything unexpected in the file, or "". Raises ModelFileError if the file has no vocabulary, or one
    of an unknown kind.
    """

    def __init__(self, gguf: GGUF) -> None:
        check_tokenizer(gguf)
        kind = gguf.get("tokenizer.ggml.model", str)
        self.warning = ""
        self.sentencepiece = kind == "llama"
        self._gemma4 = kind == "gemma4"
        self._spelled: dict[int, list[int]] = {}  # ids after the vocabulary: see `_in_bytes`
        self._writes_spaces = kind == "gpt2"  # the others write `_SPACE` for them, and <0xNN> for bytes
        self._raw = gguf.get("tokenizer.ggml.tokens", StringArray).raws()
        texts = [raw.decode("utf-8", "replace") for raw in self._raw]
        self.vocab_size = len(texts)
        self._types = self._numbers(gguf, "token_type", np.int32, _NORMAL)

        ids = {text: id for id, text in reversed([*enumerate(texts)])}  # if two are equal, the first counts
        merges = [] if self.sentencepiece else list(gguf.get("tokenizer.ggml.merges", StringArray))
        ends = self._ends(ids, merges)
        self._types[list(ends)] = _CONTROL
        self._set_special_ids(gguf, ends)

        special_ids = np.flatnonzero(np.isin(self._types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
        special = {texts[i]: i for i in reversed(special_ids) if texts[i]}
        hidden = np.flatnonzero(np.isin(self._types, (_UNKNOWN, _CONTROL))).tolist()
        shown = {special[mark] for mark in (MARK_TOKENS | CALL_TOKENS) & special.keys()} - self.eos_ids
        self._hidden = frozenset(hidden) - shown  # `thinking` and `tool_calls` look for the marks
        self.special_tokens: Mapping[str, int] = special
        self._text_tokens = {
            self._spaced(text): id
            for text, id in special.items()
            if self._types[id] == _USER_DEFINED and (not text.startswith(_BRACKETS) or _HTML.fullmatch(text))
        }
        self._in_any_text = _alternatives(self._text_tokens)
        self._in_special_text = _alternatives(special.keys() - self._text_tokens.keys())
        # Phi-3's tokenizer.json: such tokens take the white space after them ("rstrip").
        strips = self.sentencepiece and {"<|assistant|>", "<|end|>", "<|placeholder1|>"} <= special.keys()
        kept = (self.bos_id, special.get("<|endoftext|>"), special.get("<unk>"))
        self._strips_after = frozenset(special.values()).difference(kept) if strips else frozenset()

        for text in special:
            del ids[text]
        self._merger = self._sentencepiece(gguf, ids) if self.sentencepiece else self._bpe(ids, merges)

    def _ends(self, ids: Mapping[str, int], merges: Sequence[str]) -> set[int]:
        """The tokens whose text says that they end a reply."""
        ends = {ids[text] for text in _END_TEXTS if text in ids and not self._is_ordinary(text, ids, merges)}
        if {"<|return|>", "<|call|>"} <= ids.keys():  # gpt-oss: its <|end|> ends only a part of a reply
            ends.discard(ids.get("<|end|>", -1))
        if "<eos>" in ids:  # Gemma: its </s> ends struck-out text in HTML
            ends.discard(ids.get("</s>", -1))
        return ends

    def _spaced(self, text: str) -> str:
        return text if self._writes_spaces else text.replace(_SPACE, " ")

    def _is_ordinary(self, text: str, ids: Mapping[str, int], merges: Sequence[str]) -> bool:
        """Whether a token with the text of a special one is an ordinary token, made by merges: "</s>" in Qwen."""
        special = self._types[ids[text]] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        return not special and any(f"{text[:cut]} {text[cut:]}" in merges for cut in range(1, len(text)))

    def _numbers(self, gguf: GGUF, name: str, dtype: type, default: int) -> NDArray[Any]:
        """The array `name` of the metadata, one number a token; `default` for each if the file does not have it."""
        key = f"tokenizer.ggml.{name}"
        numbers = gguf.get(key, np.ndarray, None)
        if numbers is None:
            return np.full(self.vocab_size, default, dtype)
        if len(numbers) < self.vocab_size:
            raise damaged(gguf.path, f"{key} has {len(numbers)} entries for {self.vocab_size} tokens")
        return numbers[: self.vocab_size].astype(dtype)

    def _set_special_ids(self, gguf: GGUF, ends: set[int]) -> None:
        def special_id(name: str, default: int | None = None) -> int | None:
            id = gguf.get(f"tokenizer.ggml.{name}_token_id", int, default)
            return id if id is not None and 0 <= id < self.vocab_size else None

        self.bos_id = special_id("bos", 1 if self.sentencepiece else None)
        self.eos_id = special_id("eos", 2 if self.sentencepiece else None)
        end_ids = (self.eos_id, special_id("eot"), special_id("eom"))
        self.eos_ids = frozenset(ends.union(id for id in end_ids if id is not None))
        pre = gguf.get("tokenizer.ggml.pre", str, "")
        self.pretokenizer = PRETOKENIZERS.get(pre, DEFAULT)
        if self._gemma4:
            self.pretokenizer = GEMMA4
        elif not self.sentencepiece and pre not in PRETOKENIZERS:
            named = f'an unknown pre-tokenizer, "{printable(pre)}"' if pre else "no pre-tokenizer"
            self.warning = f"The model file names {named}; answers may be worse than the model can give."
        add_bos = self.sentencepiece or self.pretokenizer.add_bos
        wants_bos = self._gemma4 or gguf.get("tokenizer.ggml.add_bos_token", bool, add_bos)
        self.add_bos = wants_bos and self.bos_id is not None
        self.add_eos = gguf.get("tokenizer.ggml.add_eos_token", bool, False) and self.eos_id is not None
        prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool, self.sentencepiece)
        self.add_space_prefix = self.sentencepiece and prefix

    def _bpe(self, ids: dict[str, int], merge_lines: Sequence[str]) -> Merger:
        merges = [(left, right) for left, _, right in (line.partition(" ") for line in merge_lines)]
        options = {"ignore_merges": self.pretokenizer.whole_words, "byte_fallback": self._gemma4}
        try:
            model = models.BPE(ids, merges, **options)
        except Exception:  # the library has no class for it
            # A merge has tokens that are not in the vocabulary.
            valid = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
            self.warning = (
                f"{len(merges) - len(valid)} merges of the vocabulary are damaged and were left out."
            )
            model = models.BPE(ids, valid, **options)
        merger = Merger(model)
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.pretokenizer.patterns
        ]
        if not self._gemma4:
            splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        merger.pre_tokenizer = pre_tokenizers.Sequence(splits)
        return merger

    def _sentencepiece(self, gguf: GGUF, ids: dict[str, int]) -> Merger:
        """SentencePiece joins the two neighbouring pieces whose join has the highest score. As BPE, that is a list of
        merges ranked by the score of their result, one for each way to cut a piece into two known pieces."""
        scores = self._numbers(gguf, "scores", np.float32, 0).tolist()
        pieces = [
            text for text, id in ids.items() if 1 < len(text) <= _MAX_PIECE and self._types[id] != _BYTE
        ]
        pieces.sort(key=lambda text: (-scores[ids[text]], ids[text]))
        spelled = sorted({character for text in pieces for character in text} - ids.keys())
        self._spelled = {self.vocab_size + n: self._in_bytes(c, ids) for n, c in enumerate(spelled)}
        known = ids | {character: self.vocab_size + n for n, character in enumerate(spelled)}
        merges = [
            (text[:cut], text[cut:])
            for text in pieces
            for cut in range(1, len(text))
            if text[:cut] in known and text[cut:] in known
        ]
        unknown = next(
            (text for text, id in self.special_tokens.items() if self._types[id] == _UNKNOWN), None
        )
        if unknown is not None:  # no merge leads to it: it stands for characters without a token
            known[unknown] = self.special_tokens[unknown]
        return Merger(models.BPE(known, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))

    def _in_bytes(self, character: str, ids: Mapping[str, int]) -> list[int]:
        """The byte tokens of a character that is in pieces, but is none itself."""
        names = [f"<0x{byte:02X}>" for byte in character.encode("utf-8", "replace")]
        return [ids[name] for name in names if name in ids]

    # --- text to ids -------------------------------------------------------------------------------------

    def encode(
        self, text: str, *, special: bool = False, add_special: bool = False, most: int | None = None
    ) -> list[int]:
        """The token ids of `text`. With `special`, the names of special tokens in it become these tokens; else they are
        ordinary text. `add_special` adds BOS before and EOS after the text if the model expects them. `most` and what
        it raises: see `encode_segments`."""
        ids = self.encode_segments([(text, special)], most)
        if add_special and self.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special and self.add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]], most: int | None = None) -> list[int]:
        """The token ids of consecutive segments (text, special). Special tokens are searched within each segment, and
        only if its `special` is true. Plain text merges across segments.

        Raises ContextFullError, before any time and memory are spent, for a text that is certain to have more than
        `most` tokens (see `_fewest`)."""
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

        if most is not None and sum(1 if isinstance(part, int) else len(part) for part in parts) > most:
            least = sum(1 if isinstance(part, int) else self._fewest(part) for part in parts if part != "")
            if least > most:
                raise ContextFullError(
                    f"The conversation has at least {least} tokens and the context holds {most}.",
                    SHORTEN,
                )
            if any(self._goes_beyond(part, most) for part in parts if isinstance(part, str)):
                raise ContextFullError(
                    f"The conversation has over {most} tokens, and the context holds no more.", SHORTEN
                )
        ids: list[int] = []
        before = " " if self.add_space_prefix else ""  # such models expect a space before a text
        for part in parts:
            ids += [part] if isinstance(part, int) else self._encode_text(before + part)
        return ids

    def _goes_beyond(self, text: str, most: int) -> bool:
        """Whether the beginning of a text that is much longer than `most` tokens usually are has more of them, and some
        to spare: what comes after it can change only its last few. Takes time for a multiple of `most`."""
        length = 8 * most + 1024
        while length < len(text) // 2:
            if len(self._encode_text(text[:length])) > most + most // 16 + 64:
                return True
            length *= 4
        return False

    def _fewest(self, text: str) -> int:
        """A number of tokens that `text` has at least: no token has more of `_amounts` than those of the vocabulary
        have at most. The longest token is often a run of spaces, so words and changes tell more of most texts."""
        amounts = _amounts(*self._codes(text), [0])[0]
        return int((-(-amounts // self._most_in_a_token)).max())

    def _codes(self, text: str) -> tuple[NDArray[Any], int]:
        """`text` as numbers, of which a token has as many as its spelling in the vocabulary has characters, and the
        number of a space."""
        if self._writes_spaces:
            return np.frombuffer(text.encode(), np.uint8), ord(" ")
        return _code_points(text.replace(" ", _SPACE)), ord(_SPACE)

    @cached_property
    def _most_in_a_token(self) -> NDArray[Any]:
        """The most that a token has of each of `_amounts`."""
        texts = [text for raw in self._raw if (text := raw.decode("utf-8", "replace"))]
        starts = np.cumsum([0, *map(len, texts)])[:-1]
        space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}" if self._writes_spaces else _SPACE
        spelled = _amounts(_code_points("".join(texts)), ord(space), starts)
        named = [_amounts(*self._codes(text), [0]) for text in self._text_tokens]  # as they are in a text
        most: NDArray[Any] = np.concatenate([spelled, *named]).max(0, initial=1)
        return most

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(self._in_any_text.split(text)):
            if i % 2:
                ids.append(self._text_tokens[piece])
            elif piece:
                words = piece if self._writes_spaces else piece.replace(" ", _SPACE)
                for id in self._merger.encode(words, add_special_tokens=False).ids:
                    ids += self._spelled.get(id, (id,))
        return ids

    # --- ids to text -------------------------------------------------------------------------------------

    def text(self, id: int | None) -> str:
        """A token as the vocabulary has it, as in a template's `bos_token`; "" for None."""
        return "" if id is None else self._raw[id].decode("utf-8", "replace")

    def piece(self, id: int) -> bytes:
        """The bytes that a token stands for. For a special token these are its name; for an id after the vocabulary
        b"", because models pad their output."""
        if not 0 <= id < self.vocab_size:
            return b""
        raw, kind = self._raw[id], self._types[id]
        if kind == _BYTE and re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", raw):
            return bytes([int(raw[3:5], 16)])
        if kind in (_UNKNOWN, _CONTROL) or (kind == _USER_DEFINED and self._writes_spaces):
            return raw
        if not self._writes_spaces:
            return raw.replace(_SPACE.encode(), b" ")
        try:
            return bytes(_BYTE_OF[ord(c)] for c in raw.decode())
        except (KeyError, UnicodeDecodeError):  # not in the byte alphabet
            return raw

    def is_hidden(self, id: int) -> bool:
        """Whether a token is not part of a reply's text: control tokens, except the marks around thinking."""
        return id in self._hidden


def _code_points(text: str) -> NDArray[Any]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _amounts(codes: NDArray[Any], space: int, starts: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
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


class StreamDecoder:
    """Decodes a reply one token at a time. Bytes of an incomplete character are held back until it is complete; bytes
    that are no character become U+FFFD. Hidden tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.add_space_prefix  # `encode_segments` added it before the text

    def feed(self, id: int) -> str:
        """The text that a token completes; may be ""."""
        if self._tokenizer.is_hidden(id):
            return ""
        text = self._utf8.decode(self._tokenizer.piece(id))
        if text and self._drop_space:
            self._drop_space = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """The rest of the text: U+FFFD if the last character is incomplete, else ""."""
        return self._utf8.decode(b"", final=True)


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern with one group that matches any of `texts`, the longest first; nothing if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"((?!))")
