"""Embeddings of pictures stay on disk."""

import numpy as np
import pytest

from engine.runtime import kept_embeddings, prefix_folder
from engine.runtime.kept_embeddings import KeptEmbeddings
from engine.runtime.pictures import Progress

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


class Encoder:
    """Encodes a picture to its first row."""

    encoded = 0

    def encode(self, rgbs):
        self.encoded += 1
        yield Progress(1, 2)
        return rgbs[0][0].astype(np.float32)

    def preparations(self):
        return []


def result(encoder, rgb=PIXELS):
    work = encoder.encode([rgb])
    try:
        while True:
            next(work)
    except StopIteration as end:
        return end.value


@pytest.fixture
def encoder(monkeypatch):
    monkeypatch.setattr(kept_embeddings, "LEAST_S", 0.0)
    prefix_folder.clear()
    yield Encoder()
    prefix_folder.clear()


def test_what_was_encoded_is_read_by_the_next_run(encoder, monkeypatch):
    first = result(KeptEmbeddings(encoder, "a", 1 << 20))
    assert np.array_equal(result(KeptEmbeddings(encoder, "a", 1 << 20)), first) and encoder.encoded == 1
    result(KeptEmbeddings(encoder, "b", 1 << 20))
    result(KeptEmbeddings(encoder, "a", 1 << 20), PIXELS.reshape(2, 8, 3))
    assert encoder.encoded == 3, "another encoder, another shape"
    [path, *_] = prefix_folder.folder().glob("*.seen")
    assert path.stat().st_mode & 0o777 == 0o600
    for path in prefix_folder.folder().glob("*.seen"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert np.array_equal(result(KeptEmbeddings(encoder, "a", 1 << 20)), first) and encoder.encoded == 4
    prefix_folder.clear()
    result(KeptEmbeddings(encoder, "a", 1 << 20))
    assert encoder.encoded == 5, "they go with a chat that is deleted"


def test_nothing_is_kept_beyond_the_limit_or_of_what_is_quick(encoder, monkeypatch):
    result(KeptEmbeddings(encoder, "a", 16))
    monkeypatch.setattr(kept_embeddings, "LEAST_S", 60.0)
    result(KeptEmbeddings(encoder, "b", 1 << 20))
    assert not list(prefix_folder.folder().glob("*.seen"))
