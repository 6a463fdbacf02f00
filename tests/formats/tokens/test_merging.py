"""Merging in a process of its own."""

import os
import signal

import pytest

from engine.formats.gguf import GGUF
from engine.formats.tokens.merging import MergingProcess
from engine.formats.tokens.tokenizer import Tokenizer
from tests.formats.vocabularies import byte_level, sentencepiece

TEXTS = ["", "abba", "a b\n\n\u00e9 \u4e16\u754c \x00\u2028", "ab" * 5000]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: byte_level(path, merges=["a b", "b a"]),
        lambda path: sentencepiece(path, {"a": -1.0, "b": -1.5, "ab": -2.0, "ba": -3.0}),
    ],
)
def test_another_process_merges_alike_and_its_death_changes_nothing(tmp_path, make):
    make(path := tmp_path / "a model \u00e9")
    merge = MergingProcess(path)
    with GGUF(path) as file:
        own, apart = Tokenizer(file), Tokenizer(file, merge)
    expected = [own.encode(text, add_special=True) for text in TEXTS]
    assert [apart.encode(text, add_special=True) for text in TEXTS] == expected
    assert merge._own is None and merge.warning == own.merge.warning
    assert merge._process
    os.kill(merge._process.pid, signal.SIGKILL)
    others = [f"b{text}a" for text in TEXTS]
    assert list(map(apart.encode, others)) == list(map(own.encode, others)) and merge._own is not None


def test_the_process_ends_with_its_object(tmp_path):
    byte_level(tmp_path / "v")
    merge = MergingProcess(tmp_path / "v")
    process = merge._process
    assert process and merge(["a"])
    del merge
    assert process.wait(10) == -signal.SIGKILL


def test_damaged_merges_are_told_from_there_too(tmp_path):
    byte_level(tmp_path / "v", merges=["a b", "a nothing"])
    merge = MergingProcess(tmp_path / "v")
    assert merge.warning == "1 merges of the vocabulary are damaged and were left out."


def test_a_process_that_cannot_start_is_not_needed(tmp_path, monkeypatch):
    def no_memory(*args, **kwargs):
        raise OSError("no memory")

    monkeypatch.setattr("subprocess.Popen", no_memory)
    byte_level(tmp_path / "v", merges=["a b"])
    merge = MergingProcess(tmp_path / "v")
    assert merge.warning == "" and merge(["ab", "a"]) == [merge(["ab"])[0], merge(["a"])[0]]
