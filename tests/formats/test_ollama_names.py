"""Vocabularies that Ollama's converter wrote. Other names of its files: tests/description/test_ollama_files.py."""

from array import array
from base64 import b64encode
from dataclasses import dataclass

import numpy as np

from engine.formats.ollama_names import usual_names
from engine.formats.string_array import StringArray
from engine.formats.tokens.tokenizer import Tokenizer
from tests.formats.vocabularies import NORMAL, UNKNOWN, decode, write

CHARACTERS = "tokenizer.ggml.precompiled_charsmap"


def letters_of(text: bytes) -> StringArray:
    strings = b"".join((1).to_bytes(8, "little") + bytes([letter]) for letter in text)
    return StringArray(strings, array("q", range(0, 9 * len(text) + 1, 9)))


def test_a_table_of_characters_in_letters():
    table = bytes(range(20))
    metadata = {"general.architecture": "bert", CHARACTERS: letters_of(b64encode(table))}
    read, _ = usual_names(metadata, {})
    np.testing.assert_array_equal(read[CHARACTERS], np.frombuffer(table, np.uint8))
    damaged = metadata | {CHARACTERS: letters_of(b"abc")}
    assert usual_names(damaged, {})[0][CHARACTERS] is damaged[CHARACTERS]


def test_values_that_are_no_texts_are_left_to_their_readers():
    numbers = np.arange(2)
    for keys in (
        {"general.architecture": numbers},
        {"general.architecture": "gemma4", "tokenizer.ggml.model": numbers},
    ):
        assert usual_names(keys, {})[0].keys() == keys.keys()


def test_a_pretokenizer_that_is_not_named_is_tekken():
    keys = {"general.architecture": "mistral3", "tokenizer.ggml.pre": "default"}
    assert usual_names(keys, {})[0]["tokenizer.ggml.pre"] == "tekken"
    assert usual_names(keys | {"tokenizer.ggml.pre": "llama-bpe"}, {})[0]["tokenizer.ggml.pre"] == "llama-bpe"


def test_merges_tell_the_vocabulary_of_gemma_4():
    keys = {"general.architecture": "gemma4", "tokenizer.ggml.model": "llama"}
    assert usual_names(keys, {})[0] == keys
    assert usual_names(keys | {"tokenizer.ggml.merges": []}, {})[0]["tokenizer.ggml.model"] == "gemma4"


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...] = (2, 2)
    n_bytes: int = 16


def test_projections_tell_embedding_gemma():
    keys = {"block_count": 2, "attention.causal": True, "rope.local.freq_base": 5.0}
    metadata = {"general.architecture": "gemma3"} | {f"gemma3.{key}": value for key, value in keys.items()}
    tensors = {name: Tensor(name) for name in ("dense.0.weight", "dense.1.weight", "norm.weight")}
    read, renamed = usual_names(metadata, tensors)
    kept = {"block_count": 2, "rope.local.freq_base": 5.0, "rope.freq_base_swa": 5.0}
    architecture = "gemma-embedding"
    assert read == {"general.architecture": architecture} | {
        f"{architecture}.{k}": v for k, v in kept.items()
    }
    names = "dense_2.weight", "dense_3.weight", "output_norm.weight"
    assert renamed == {name: Tensor(name) for name in names}


def test_bytes_that_are_not_marked(tmp_path):
    pieces = [("<unk>", UNKNOWN), *((f"<0x{byte:02X}>", NORMAL) for byte in range(256)), ("a", NORMAL)]
    tokenizer = Tokenizer(write(tmp_path / "v", "llama", pieces, add_space_prefix=False))
    assert decode(tokenizer, tokenizer.encode("aé")) == "aé"
