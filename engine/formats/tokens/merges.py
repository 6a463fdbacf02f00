"""Words to tokens, with the merges of a model file: byte-level BPE, SentencePiece, Gemma 4's BPE, or without merges
WordPiece, unigrams and the longest tokens (`longest`). The library `tokenizers` merges. To build its object takes most
of the time that a tokenizer takes to be made."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Merger

from engine.formats.gguf import GGUF, damaged
from engine.formats.string_array import StringArray
from engine.formats.tokens.cheapest import CheapestTokens
from engine.formats.tokens.longest import LongestTokens
from engine.formats.tokens.vocabulary import BYTE, NORMAL, SPACE, UNKNOWN, Vocabulary

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else the library has threads of its own

_MAX_PIECE = 512  # characters; merges never produce a longer SentencePiece piece


def _fails(error: BaseException) -> bool:
    """Whether the library could not use what it was given. It has no class for that, and panics at what it does not
    expect."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Blames the file if the library fails. Raises ModelFileError."""
    try:
        yield
    except BaseException as error:
        if not _fails(error):
            raise
        raise damaged(path, "the texts or numbers of its tokenizer cannot be used") from None


class Merges:
    """Implements `tokenizer.Merge`."""

    def __init__(self, gguf: GGUF, vocabulary: Vocabulary) -> None:
        self.warning = ""
        self._spelled: dict[int, list[int]] = {}  # ids after the vocabulary: see `_in_bytes`
        self._vocabulary = vocabulary
        self._alone: LongestTokens | CheapestTokens | None = None
        known = [id for id, kind in enumerate(vocabulary.types) if kind == NORMAL]
        if vocabulary.longest:
            self._alone = LongestTokens({vocabulary.piece(id): id for id in known})
            return
        if vocabulary.cheapest:
            self._alone = self._cheapest(gguf, {vocabulary.text(id): id for id in known})
            return
        texts = [*vocabulary.tokens]
        numbers = reversed(range(len(texts)))
        ids = dict(zip(reversed(texts), numbers, strict=True))  # if two are equal, the first counts
        for text in vocabulary.special_tokens:
            del ids[text]
        self._path = gguf.path
        with _reading(self._path):
            if vocabulary.wordpiece:
                self.merger = self._wordpiece(gguf, texts)
            elif vocabulary.unigrams:
                self.merger = self._unigrams(gguf, texts)
            elif vocabulary.sentencepiece:
                self.merger = self._sentencepiece(gguf, ids)
            else:
                self.merger = self._bpe(gguf, ids)

    def __call__(self, words: Sequence[str]) -> list[list[int]]:
        """Other threads run meanwhile: the library lets them only if it is given a batch. Raises ModelFileError."""
        if self._alone:
            return self._alone(words)
        with _reading(self._path):
            found = self.merger.encode_batch_fast([*words], add_special_tokens=False)
        merged = [each.ids for each in found]
        if not self._spelled:
            return merged
        return [[part for id in ids for part in self._spelled.get(id, (id,))] for ids in merged]

    def _cheapest(self, gguf: GGUF, ids: Mapping[str, int]) -> CheapestTokens:
        v = self._vocabulary
        spelled = ((v.piece(id), id) for id in np.flatnonzero(v.types == BYTE).tolist())
        of_bytes = {piece[0]: id for piece, id in spelled if len(piece) == 1}
        if len(of_bytes) < 256:
            raise damaged(gguf.path, f"its vocabulary has {len(of_bytes)} of 256 bytes")
        return CheapestTokens(ids, v.numbers(gguf, "scores", np.float32, 0).tolist(), of_bytes)

    def _bpe(self, gguf: GGUF, ids: dict[str, int]) -> Merger:
        v, merge_lines = self._vocabulary, gguf.get("tokenizer.ggml.merges", StringArray)
        merges = [(left, right) for left, _, right in (line.partition(" ") for line in merge_lines)]
        options = {"ignore_merges": v.pretokenizer.whole_words, "byte_fallback": v.joins_words}
        try:
            model = models.BPE(ids, merges, **options)
        except BaseException as error:
            # Merges longer than all tokens: a panic.
            if not isinstance(error, Exception) and not _fails(error):
                raise
            # A merge has tokens that are not in the vocabulary.
            valid = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
            self.warning = (
                f"{len(merges) - len(valid)} merges of the vocabulary are damaged and were left out."
            )
            model = models.BPE(ids, valid, **options)
        merger = Merger(model)
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in v.pretokenizer.patterns
        ]
        if not v.joins_words:
            splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        merger.pre_tokenizer = pre_tokenizers.Sequence(splits)
        return merger

    def _sentencepiece(self, gguf: GGUF, ids: dict[str, int]) -> Merger:
        """SentencePiece joins the two neighbouring pieces whose join has the highest score. As BPE, that is a list of
        merges ranked by the score of their result, one for each way to cut a piece into two known pieces."""
        v = self._vocabulary
        scores = v.numbers(gguf, "scores", np.float32, 0).tolist()
        pieces = [text for text, id in ids.items() if 1 < len(text) <= _MAX_PIECE and v.types[id] != BYTE]
        pieces.sort(key=lambda text: (-scores[ids[text]], ids[text]))
        spelled = sorted({character for text in pieces for character in text} - ids.keys())
        self._spelled = {v.vocab_size + n: self._in_bytes(c, ids) for n, c in enumerate(spelled)}
        known = ids | {character: v.vocab_size + n for n, character in enumerate(spelled)}
        merges = [
            (text[:cut], text[cut:])
            for text in pieces
            for cut in range(1, len(text))
            if text[:cut] in known and text[cut:] in known
        ]
        unknown = next((text for text, id in v.special_tokens.items() if v.types[id] == UNKNOWN), None)
        if unknown is not None:  # no merge leads to it: it stands for characters without a token
            known[unknown] = v.special_tokens[unknown]
        return Merger(models.BPE(known, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))

    def _wordpiece(self, gguf: GGUF, texts: list[str]) -> Merger:
        """In the file, tokens that begin a word begin with SPACE, and others have no "##". Words that have no tokens
        are [UNK]."""
        ids = {}
        for id, text in reversed([*enumerate(texts)]):
            is_special = text in self._vocabulary.special_tokens or re.fullmatch(r"\[.+\]", text)
            ids[text[1:] if text.startswith(SPACE) else text if is_special else f"##{text}"] = id
        unknown = gguf.get("tokenizer.ggml.unknown_token_id", int, ids.get("[UNK]", 100))
        if not 0 <= unknown < len(texts):
            raise damaged(gguf.path, f"its token for unknown words is {unknown}, of {len(texts)}")
        ids[name := texts[unknown]] = unknown
        merger = Merger(models.WordPiece(ids, unk_token=name))
        lowercase = gguf.get("tokenizer.ggml.normalizer.lowercase", bool, True)
        merger.normalizer = normalizers.BertNormalizer(
            strip_accents=gguf.get("tokenizer.ggml.normalizer.strip_accents", bool, lowercase),
            lowercase=lowercase,
        )
        merger.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return merger

    def _unigrams(self, gguf: GGUF, texts: list[str]) -> Merger:
        """The most probable tokens: the scores are logarithms of their probabilities."""
        v = self._vocabulary
        unknown = next((id for id, kind in enumerate(v.types) if kind == UNKNOWN), 0)
        special = {*v.special_tokens.values()} - {unknown}
        named = [f"\0{id}" if id in special else text for id, text in enumerate(texts)]  # in no text
        scores = v.numbers(gguf, "scores", np.float32, 0).tolist()
        merger = Merger(models.Unigram([*zip(named, scores, strict=True)], unknown))
        steps: list[normalizers.Normalizer] = []
        charsmap = gguf.get("tokenizer.ggml.precompiled_charsmap", np.ndarray, None)
        if charsmap is not None:
            characters = charsmap.astype(np.uint8).tobytes()
            # They begin with the bytes of a table, for which the library takes memory before it looks.
            if int.from_bytes(characters[:4], "little") > len(characters) - 4:
                raise damaged(self._path, "the table of characters of its tokenizer is cut")
            steps.append(normalizers.Precompiled(characters))
        if gguf.get("tokenizer.ggml.remove_extra_whitespaces", bool, True):
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        merger.normalizer = normalizers.Sequence(steps)
        begins = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
        merger.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if begins else "never")
        return merger

    def _in_bytes(self, character: str, ids: Mapping[str, int]) -> list[int]:
        """The byte tokens of a character that is in pieces, but is none itself."""
        names = [f"<0x{byte:02X}>" for byte in character.encode("utf-8", "replace")]
        return [ids[name] for name in names if name in ids]
