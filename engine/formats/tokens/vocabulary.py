"""The tokens of a model file: their bytes, which are special, and which end a reply. No library is needed for this."""

import codecs
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged, printable
from engine.formats.string_array import StringArray
from engine.formats.thinking import MARK_TOKENS
from engine.formats.tokens.longest import unescaped
from engine.formats.tokens.pretokenizers import DEFAULT, GEMMA4, LINES, PRETOKENIZERS, UNSAID
from engine.formats.tools.forms import CALL_TOKENS

# tokenizer.ggml.token_type: enum llama_token_type in include/llama.h
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# Tokens that end a reply. They are known by their text, because files seldom name more than one of them.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>",
    "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    "<|eot|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<reponame>", "<|file_sep|>",
)  # fmt: skip

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes it for a space

MOST_SPECIAL = 2 << 20
"""Characters of the names of all special tokens: to look for them in a text takes 160 bytes of memory for each. Gemma 3
has 80,000 of them."""


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's encoder.py, bytes_to_unicode: each byte is written as one printable character. Code point -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE = re.compile(rb"<0x[0-9A-Fa-f]{2}>")


_KINDS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece",
    "gemma4": "the BPE of Gemma 4",
    "bert": "WordPiece",
    "t5": "unigrams",
    "rwkv": "RWKV's longest tokens",
    "plamo2": "PLaMo's cheapest tokens",
}


def check_tokenizer(file: GGUF) -> None:
    """Raises ModelFileError if the file has no vocabulary, or one of a kind that `Tokenizer` does not know. Fast."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind not in _KINDS:
        kinds = ", ".join(f'{what} ("{name}")' for name, what in _KINDS.items())
        raise ModelFileError(
            f'{printable(file.path.name)} has a tokenizer of the kind "{printable(kind)}"; orin-chat supports {kinds}.',
            "Choose a model of another family.",
        )
    file.get("tokenizer.ggml.tokens", StringArray)
    if kind in ("gpt2", "gemma4"):
        file.get("tokenizer.ggml.merges", StringArray)


def _embedded(gguf: GGUF) -> int | None:
    """How many tokens the model has an embedding of; None if the file has no weights. Vocabularies may be longer: files
    of Gemma 3 have a token for a picture that is none of the model's."""
    table = gguf.tensors.get("token_embd.weight")
    return table.shape[0] if table and table.shape else None


class Vocabulary:
    """The tokens of a model file. The file needs no weights.

    `bos_id` and `eos_id` are None if the file has none. `eos_ids` are all tokens that end a reply; `add_bos` and
    `add_eos` say which tokens the model expects around a text. `special_tokens` maps names to ids, and `types` are
    those of tokenizer.ggml.token_type. `writes_spaces`: whether tokens have spaces and bytes as GPT-2 writes them;
    else `SPACE` stands for a space, and <0xNN> for a byte. `reads_plain`: whether texts are read as they are, spaces
    included. `longest`: whether a token is the longest one that fits, spelled as `engine.formats.tokens.longest` says.
    `cheapest`: whether scores choose them, as `engine.formats.tokens.cheapest` says. `joins_words`: whether merges go
    across words. `warning` is a sentence about anything unexpected in the file, or "". Raises ModelFileError if the
    file has no vocabulary, or one of an unknown kind.
    """

    def __init__(self, gguf: GGUF) -> None:
        check_tokenizer(gguf)
        kind = gguf.get("tokenizer.ggml.model", str)
        self.warning = ""
        self.sentencepiece = kind == "llama"
        self.wordpiece, self.unigrams = (kind == name for name in ("bert", "t5"))
        pre = gguf.get("tokenizer.ggml.pre", str, "")
        self.joins_words = kind == "gemma4" or (kind == "gpt2" and pre in LINES)
        self.longest, self.cheapest = (kind == name for name in ("rwkv", "plamo2"))
        self.reads_plain = self.wordpiece or self.unigrams or self.longest or self.cheapest
        self.writes_spaces = kind == "gpt2" and not self.joins_words
        self.tokens = gguf.get("tokenizer.ggml.tokens", StringArray).head(_embedded(gguf))
        if not len(self.tokens):
            raise damaged(gguf.path, "its vocabulary has no tokens")
        self.vocab_size = len(self.tokens)
        self.types = self.numbers(gguf, "token_type", np.int32, NORMAL)

        # Files of Ollama do not say which tokens are bytes.
        if self.sentencepiece and not (self.types == BYTE).any():
            named = [id for id in self.tokens.beginning_with(b"<") if _BYTE.fullmatch(self.tokens.raw(id))]
            self.types[named] = BYTE
        ends = self._ends(gguf)
        self.types[list(ends)] = CONTROL
        self._set_special_ids(gguf, ends)
        self._set_pretokenizer(pre)
        self._set_additions(gguf)

        special_ids = np.flatnonzero(np.isin(self.types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
        special = {text: i for i in reversed(special_ids) if (text := self.text(i))}
        if sum(map(len, special)) > MOST_SPECIAL:
            raise damaged(
                gguf.path, f"the names of its special tokens have more than {MOST_SPECIAL:,} characters"
            )
        hidden = np.flatnonzero(np.isin(self.types, (UNKNOWN, CONTROL))).tolist()
        shown = {special[mark] for mark in (MARK_TOKENS | CALL_TOKENS) & special.keys()} - self.eos_ids
        self._hidden = frozenset(hidden) - shown  # `thinking` and `tools.calls` look for the marks
        self.special_tokens: Mapping[str, int] = special

    def _ends(self, gguf: GGUF) -> set[int]:
        """The tokens whose text says that they end a reply."""
        beginnings = bytes({text.encode()[0] for text in _END_TEXTS})
        # The first counts
        ids = {self.tokens.raw(id): id for id in reversed(self.tokens.beginning_with(beginnings))}
        known = {text: ids[text.encode()] for text in _END_TEXTS if text.encode() in ids}
        ends = {id for text, id in known.items() if not self._is_ordinary(text, id, gguf)}
        if {"<|return|>", "<|call|>"} <= known.keys():  # gpt-oss: its <|end|> ends only a part of a reply
            ends.discard(known.get("<|end|>", -1))
        if "<eos>" in known:  # Gemma: its </s> ends struck-out text in HTML
            ends.discard(known.get("</s>", -1))
        return ends

    def _is_ordinary(self, text: str, id: int, gguf: GGUF) -> bool:
        """Whether a token with the text of a special one is an ordinary token, made by merges: "</s>" in Qwen."""
        if self.sentencepiece or self.types[id] in (UNKNOWN, CONTROL, USER_DEFINED):
            return False
        if self.longest or self.cheapest:
            return True
        merges = gguf.get("tokenizer.ggml.merges", StringArray)
        return any(merges.has(f"{text[:cut]} {text[cut:]}") for cut in range(1, len(text)))

    def numbers(self, gguf: GGUF, name: str, dtype: type, default: int) -> NDArray[Any]:
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
            """What the file says, or the default if that is no token, as in llama.cpp."""
            ids = gguf.get(f"tokenizer.ggml.{name}_token_id", int, default), default
            return next((id for id in ids if id is not None and 0 <= id < self.vocab_size), None)

        has_usual = self.sentencepiece or self.cheapest
        self.bos_id = special_id("bos", 1 if has_usual else None)
        self.eos_id = special_id("eos", 2 if has_usual else None)
        if self.wordpiece:  # llama.cpp's numbers where the file has none, as older ones
            cls = special_id("cls", 101)
            self.bos_id, self.eos_id = special_id("bos", cls), special_id("seperator", 102)
        end_ids = (self.eos_id, special_id("eot"), special_id("eom"))
        listed = gguf.get("tokenizer.ggml.eos_token_ids", np.ndarray, None)  # in files of Ollama
        more = [] if listed is None else [int(id) for id in listed.ravel() if 0 <= id < self.vocab_size]
        self.eos_ids = frozenset(ends.union(id for id in (*end_ids, *more) if id is not None))

    def _set_pretokenizer(self, pre: str) -> None:
        """`pre`: its name in the file, "" if that has none."""
        if pre in ("", "default"):
            pre = next((name for text, name in UNSAID.items() if self.tokens.has(text)), pre)
        self.pretokenizer = LINES.get(pre, GEMMA4) if self.joins_words else PRETOKENIZERS.get(pre, DEFAULT)
        if not (self.joins_words or self.sentencepiece or self.reads_plain) and pre not in PRETOKENIZERS:
            named = f'an unknown pre-tokenizer, "{printable(pre)}"' if pre else "no pre-tokenizer"
            self.warning = f"The model file names {named}; answers may be worse than the model can give."

    def _set_additions(self, gguf: GGUF) -> None:
        """What the model expects around a text."""
        add_bos = self.sentencepiece or self.pretokenizer.add_bos
        always = self.pretokenizer.always_bos or self.wordpiece
        wants_bos = always or gguf.get("tokenizer.ggml.add_bos_token", bool, add_bos)
        self.add_bos = wants_bos and self.bos_id is not None
        wants_eos = self.wordpiece or gguf.get("tokenizer.ggml.add_eos_token", bool, self.unigrams)
        self.add_eos = wants_eos and self.eos_id is not None
        prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool, self.sentencepiece)
        self.add_space_prefix = self.sentencepiece and prefix

    def text(self, id: int | None) -> str:
        """A token as the vocabulary has it, as in a template's `bos_token`; "" for None."""
        return "" if id is None else self.tokens[id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens: their `piece`s, with U+FFFD for bytes that are no UTF-8."""
        return b"".join(map(functools.cache(self.piece), ids)).decode("utf-8", "replace")

    def piece(self, id: int) -> bytes:
        """The bytes that a token stands for. For a special token these are its name; for an id after the vocabulary
        b"", because models pad their output."""
        if not 0 <= id < self.vocab_size:
            return b""
        raw, kind = self.tokens.raw(id), self.types[id]
        if kind == BYTE and _BYTE.fullmatch(raw):
            return bytes([int(raw[3:5], 16)])
        if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and self.writes_spaces):
            return raw
        if self.longest:
            return unescaped(raw) if kind == NORMAL else raw
        if self.cheapest:
            return raw
        if not self.writes_spaces:
            return raw.replace(SPACE.encode(), b" ")
        try:
            return bytes(_BYTE_OF[ord(c)] for c in raw.decode())
        except (KeyError, UnicodeDecodeError):  # not in the byte alphabet
            return raw

    def is_hidden(self, id: int) -> bool:
        """Whether a token is not part of a reply's text: control tokens, except the marks around thinking."""
        return id in self._hidden


class StreamDecoder:
    """Decodes a reply one token at a time. Bytes of an incomplete character are held back until it is complete; bytes
    that are no character become U+FFFD. Hidden tokens have no text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = vocabulary.add_space_prefix  # `Tokenizer.encode_segments` added it before the text

    def feed(self, id: int) -> str:
        """The text that a token completes; may be ""."""
        if self._vocabulary.is_hidden(id):
            return ""
        text = self._utf8.decode(self._vocabulary.piece(id))
        if text and self._drop_space:
            self._drop_space = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """The rest of the text: U+FFFD if the last character is incomplete, else ""."""
        return self._utf8.decode(b"", final=True)
