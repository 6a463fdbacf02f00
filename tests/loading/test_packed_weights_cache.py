"""The cache of packed weights: used if its file is complete and belongs to this model file, else not."""

import os
from unittest import mock

import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.formats.gguf import GGUF
from engine.loading import packed_weights_cache as cache
from engine.loading.packed_weights_cache import PackedReader
from engine.loading.weights import Weights
from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions
from engine.targets.cpu import weights as cpu_weights
from engine.targets.cpu.runner import CPURunner
from tests import generated_model
from tests.targets.lone_sequence import LoneSequence


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "packed")


@pytest.fixture
def model(tmp_path):
    return generated_model.write(tmp_path / "model.gguf", layers=1, architecture="llama", quant="Q8_0")


def streams(file: GGUF) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(name.encode() * 100, np.uint8) for name in file.tensors}


def test_what_was_written_is_read(model):
    with GGUF(model) as file:
        assert not PackedReader(file, 16)
        assert cache.write(file, 16, streams(file))
        reader = PackedReader(file, 16)
        for name, stream in streams(file).items():
            out = np.zeros_like(stream)
            assert reader.read(name, out)
            np.testing.assert_array_equal(out, stream)
        assert not reader.read("token_embd.weight", np.zeros(3, np.uint8)), "another size"
        assert not PackedReader(file, 8), "for other vectors"
        reader.close()


def test_it_is_listed_and_deleted(model):
    with GGUF(model) as file:
        cache.write(file, 16, streams(file))
    (cached,) = cache.cached_files(model)
    assert cached.size_bytes == cached.path.stat().st_size > 0
    assert list(cache.folder().iterdir()) == [cached.path]
    assert cache.cached_files(model.with_name("other.gguf")) == []
    assert cache.cached_files(model.with_name(os.fsdecode(b"\xff.gguf"))) == []  # a name that is no UTF-8
    assert cache.delete(model) == cached.size_bytes
    assert cache.cached_files(model) == [] and cache.delete(model) == 0
    assert list(cache.folder().iterdir()) == []


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_file_that_was_cut_off_is_none(model, left):
    with GGUF(model) as file:
        cache.write(file, 16, streams(file))
        (cached,) = cache.cached_files(model)
        os.truncate(cached.path, left if left >= 0 else cached.size_bytes - 1)
        assert not PackedReader(file, 16)
        assert cache.cached_files(model) == []
        assert cache.write(file, 16, streams(file)) and PackedReader(file, 16)


def test_another_state_of_the_file_is_another_file(model):
    with GGUF(model) as file:
        cache.write(file, 16, streams(file))
    os.utime(model, ns=(1, 1))
    with GGUF(model) as file:
        assert not PackedReader(file, 16)
        cache.write(file, 16, streams(file))
    assert len(list(cache.folder().iterdir())) == 1, "the one before is gone"


def test_a_full_disk_leaves_nothing(model, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with GGUF(model) as file:
        assert not cache.write(file, 16, streams(file))
    assert list(cache.folder().iterdir()) == []


def test_a_model_from_kept_weights_is_the_same(model, monkeypatch):
    def logits() -> np.ndarray:
        with GGUF(model) as file:
            weights = Weights(file, read_spec(file), lambda _: None)
            text = LoneSequence(CPURunner(weights, 256, keep_packed=True))
            text.decode(5, 0)
            return np.array(text.logits())

    first = logits()
    assert cache.cached_files(model)

    def fails(*_):
        raise AssertionError("packed again")

    monkeypatch.setattr(cpu_weights, "repack", fails)
    np.testing.assert_array_equal(logits(), first)


def test_weights_that_could_not_be_kept_are_said(model, monkeypatch):
    def warnings() -> str:
        options = EngineOptions(model_path=str(model), context_length=256, keep_packed=True)
        return " ".join(TextModel(options, lambda _: None).ready.warnings)

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
        assert "The packed weights are not kept" in warnings()
    assert "packed" not in warnings()
