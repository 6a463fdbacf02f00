"""GGUF files in several parts."""

import struct
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from tests.formats.test_gguf import entry, header, padded, tensor, write

__all__ = ["write"]


def split_part(no: int, count: int, total: int, names: list[str], **more: int) -> bytes:
    entries = [
        entry("split.no", 2, struct.pack("<H", no)),
        entry("split.count", 2, struct.pack("<H", count)),
        entry("split.tensors.count", 5, struct.pack("<i", total)),
        *(entry(key, 4, struct.pack("<I", value)) for key, value in more.items()),
    ]
    infos = b"".join(tensor(name, [8], 0, 32 * i) for i, name in enumerate(names))
    data = b"".join(np.full(8, no * 10 + i, np.float32).tobytes() for i in range(len(names)))
    return padded(header(len(names), entries) + infos, data)


@pytest.fixture
def split(write):
    parts = [
        write(split_part(0, 3, 3, ["a"], answer=42), "m-00001-of-00003.gguf"),
        write(split_part(1, 3, 3, ["b", "c"]), "m-00002-of-00003.gguf"),
        write(split_part(2, 3, 3, []), "m-00003-of-00003.gguf"),
    ]
    return parts


@pytest.mark.parametrize("opened", range(3))
def test_any_part_opens_all(split, opened):
    g = GGUF(split[opened])
    assert g.metadata["answer"] == 42 and g.file_bytes == sum(p.stat().st_size for p in split)
    assert {n: t.data.view(np.float32)[0] for n, t in g.tensors.items()} == {"a": 0, "b": 10, "c": 11}


def test_names_in_capitals_are_parts_too(split):
    renamed = [part.rename(part.with_suffix(".GGUF")) for part in split]
    assert len(GGUF(renamed[2]).tensors) == 3


def test_parts_behind_links_are_found_beside_the_link(split, tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for i, part in enumerate(split):
        blob = part.rename(tmp_path / f"blob{i}")
        (folder / part.name).symlink_to(blob)
    assert len(GGUF(folder / split[1].name).tensors) == 3


def test_damaged_splits_are_refused(split, write):
    def refused(part: Path, match: str) -> None:
        with pytest.raises(ModelFileError, match=match) as e:
            GGUF(part)
        assert e.value.hint

    original = split[1].read_bytes()
    split[1].unlink()
    refused(split[0], "is one of 3 parts, and m-00002-of-00003.gguf is not beside it")
    split[1].write_bytes(split_part(2, 3, 3, ["b", "c"]))
    refused(split[0], "m-00002-of-00003.gguf is not the part")
    split[1].write_bytes(split_part(1, 3, 3, ["b", "a"]))
    refused(split[0], 'second tensor named "a"')
    split[1].write_bytes(split_part(1, 3, 3, ["b"]))
    refused(split[0], "promises 3 tensors; its parts have 2")
    split[1].write_bytes(original)
    refused(write(original, "renamed.gguf"), "is one part of 3")


def test_a_split_name_alone_makes_no_split(write):
    assert GGUF(write(header(0, []), "x-00001-of-00002.gguf")).metadata == {}
