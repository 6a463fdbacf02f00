"""Small vocabularies in real GGUF files, for the tests of tokenizers and templates."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import gguf as peer
import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.formats.string_array import StringArray
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tokens.vocabulary import StreamDecoder
from tests.makers import load_maker
from tests.paths import SHARED

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"


def byte_characters() -> list[str]:
    """GPT-2's printable character of each byte, by the rule in its paper's code: printable Latin-1 stands for
    itself, the rest follow from U+0100 on."""
    itself = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in itself else chr(next(rest)) for byte in range(256)]


def write(
    path: Path,
    model: str,
    tokens: list[tuple[str | bytes, int]],
    *,
    pre: str | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    architecture: str = "llama",
    types: bool = True,
    template: str | None = None,
    **keys: int | bool | list[int],
) -> GGUF:
    """A vocabulary-only file; `keys` are metadata under tokenizer.ggml."""
    w = peer.GGUFWriter(str(path), architecture)
    w.add_tokenizer_model(model)
    if pre is not None:
        w.add_tokenizer_pre(pre)
    w.add_token_list([text for text, _ in tokens])
    if types:
        w.add_token_types([kind for _, kind in tokens])
    if merges is not None:
        w.add_array("tokenizer.ggml.merges", merges)
    if scores is not None:
        w.add_token_scores(scores)
    for key, value in keys.items():
        add = (
            w.add_bool if isinstance(value, bool) else w.add_uint32 if isinstance(value, int) else w.add_array
        )
        add(f"tokenizer.ggml.{key}", value)
    if template is not None:
        w.add_chat_template(template)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return GGUF(path)


def byte_level(
    path: Path, special: tuple[tuple[str, int], ...] = (), merges: list[str] | None = None, **more
) -> GGUF:
    """All bytes, what the merges make of them, then the special tokens."""
    merges = merges or ["~ ~"]  # a file cannot have an empty list
    texts = [*byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    tokens = [(text, NORMAL) for text in texts] + list(special)
    return write(path, "gpt2", tokens, merges=merges, **({"pre": "gpt-2"} | more))


def sentencepiece(
    path: Path, pieces: dict[str, float], special: tuple[tuple[str, int], ...] = (), **more
) -> GGUF:
    """<unk>, <s> and </s>, all bytes, the pieces with their scores, then the special tokens."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    scores = [0.0] * len(tokens) + list(pieces.values()) + [0.0] * len(special)
    tokens += [(piece, NORMAL) for piece in pieces] + list(special)
    return write(path, "llama", tokens, scores=scores, **more)


def gemma4(
    path: Path, merges: list[str], special: tuple[tuple[str, int], ...] = (), kind: str = "gemma4", **more
) -> GGUF:
    """<pad>, <eos> and <bos>, all bytes, the characters and results of the merges, then the special tokens."""
    texts = dict.fromkeys([part for merge in merges for part in merge.split(" ")])
    texts |= dict.fromkeys(merge.replace(" ", "", 1) for merge in merges)
    tokens = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(text, NORMAL) for text in texts] + list(special)
    keys = {"bos_token_id": 2, "eos_token_id": 1} | more
    return write(path, kind, tokens, merges=merges, **keys)


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of a reply of these tokens."""
    stream = StreamDecoder(tokenizer)
    return "".join([stream.feed(id) for id in ids]) + stream.flush()


def names(t: Tokenizer, text: str, **options) -> list[str]:
    return [t.text(id) for id in t.encode(text, **options)]


def spelled_out(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of tokens with the names of all special tokens."""
    text = b"".join(map(tokenizer.piece, ids)).decode("utf-8", "replace")
    return text.removeprefix(" ") if tokenizer.add_space_prefix else text


@cache
def maker() -> ModuleType:
    """The maker of models beside the checkout. Skips the test if there is none."""
    if not (SHARED / "models/make_model.py").is_file():
        pytest.skip(f"there is no test data at {SHARED} (ORIN_SHARED names another place)")
    module = load_maker(SHARED, "make_model")
    module.GGUFReader = _Reader  # the library's own takes many seconds
    return module


class _Reader:
    """As much of gguf.GGUFReader as the maker uses for vocabularies."""

    def __init__(self, path: str) -> None:
        with GGUF(Path(path)) as file:
            self.fields = {key: _Field(value) for key, value in file.metadata.items()}


class _Field:
    def __init__(self, value: object) -> None:
        self._value = value

    def contents(self) -> object:
        if isinstance(self._value, np.ndarray):
            return self._value.tolist()
        return list(self._value) if isinstance(self._value, StringArray) else self._value


def of_shape(shape: str, path: Path) -> GGUF:
    """The vocabulary and the chat template of one of the maker's models."""
    folder, of = SHARED / "models/vocab", maker().SHAPES[shape]
    w = peer.GGUFWriter(str(path), of.arch)
    maker().write_vocab(w, of, folder)
    w.add_chat_template((folder / f"{of.template}.jinja").read_text())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return GGUF(path)
