"""Packed weights that are kept: used when they are whole and of this file, and never otherwise."""

import os

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.model import cpu_steps, packed
from engine.model.config import ModelConfig
from engine.model.cpu_steps import CoreSteps
from engine.model.weights import Weights
from tests import generated_model


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "folder", lambda: tmp_path / "packed")


@pytest.fixture
def model(tmp_path):
    return generated_model.write(tmp_path / "model.gguf", layers=1, architecture="llama", quant="Q8_0")


def streams(file: GGUF) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(name.encode() * 100, np.uint8) for name in file.tensors}


def test_what_was_written_is_read(model):
    with GGUF(model) as file:
        assert not packed.PackedReader(file, 16)
        assert packed.write(file, 16, streams(file))
        reader = packed.PackedReader(file, 16)
        for name, stream in streams(file).items():
            out = np.zeros_like(stream)
            assert reader.read(name, out)
            np.testing.assert_array_equal(out, stream)
        assert not reader.read("token_embd.weight", np.zeros(3, np.uint8)), "another size"
        assert not packed.PackedReader(file, 8), "for other vectors"
        reader.close()


def test_it_is_listed_and_deleted(model):
    with GGUF(model) as file:
        packed.write(file, 16, streams(file))
    (found,) = packed.kept(model)
    assert (found.model, found.size_bytes) == (model.resolve(), found.path.stat().st_size)
    assert packed.kept() == [found]
    assert packed.forget(model) == found.size_bytes
    assert packed.kept() == [] and packed.forget(model) == 0


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_file_that_was_cut_off_is_none(model, left):
    with GGUF(model) as file:
        packed.write(file, 16, streams(file))
        (found,) = packed.kept()
        os.truncate(found.path, left if left >= 0 else found.size_bytes - 1)
        assert not packed.PackedReader(file, 16)
        assert packed.kept() == []
        assert packed.write(file, 16, streams(file)) and packed.PackedReader(file, 16)


def test_another_state_of_the_file_is_another_file(model):
    with GGUF(model) as file:
        packed.write(file, 16, streams(file))
    os.utime(model, ns=(1, 1))
    with GGUF(model) as file:
        assert not packed.PackedReader(file, 16)
        packed.write(file, 16, streams(file))
    assert len(list(packed.folder().iterdir())) == 1, "the one before is gone"


def test_a_full_disk_leaves_nothing(model, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed.os, "fsync", full)
    with GGUF(model) as file:
        assert not packed.write(file, 16, streams(file))
    assert list(packed.folder().iterdir()) == []


def test_a_model_from_kept_weights_is_the_same(model, monkeypatch):
    def logits() -> np.ndarray:
        with GGUF(model) as file:
            steps = CoreSteps(
                Weights(file, ModelConfig.from_gguf(file), lambda _: None), 64, keep_packed=True
            )
            steps.decode(5, 0)
            return np.array(steps.logits())

    first = logits()
    assert packed.kept(model)

    def fails(*_):
        raise AssertionError("packed again")

    monkeypatch.setattr(cpu_steps, "repack", fails)
    np.testing.assert_array_equal(logits(), first)
