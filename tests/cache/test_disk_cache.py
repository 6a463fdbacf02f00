"""The disk cache: entries survive a run, and damage, a full disk and other processes do no harm."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from engine.cache import disk_cache
from engine.cache.disk_cache import DiskCache
from tests.paths import ROOT


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "made when needed"


def files(folder):
    return [path for path in folder.iterdir() if path.is_file()]


def test_an_entry_is_there_for_the_next_run(folder):
    assert DiskCache(folder, "here").get("table", ("key", 1)) is None
    DiskCache(folder, "here").put("table", ("key", 1), {"a": [1, 2]})
    assert DiskCache(folder, "here").get("table", ("key", 1)) == {"a": [1, 2]}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_another_key_table_or_environment_is_another_entry(folder):
    DiskCache(folder, "here").put("table", 1, "value")
    assert DiskCache(folder, "here").get("table", 2) is None
    assert DiskCache(folder, "here").get("other", 1) is None
    assert DiskCache(folder, "there").get("table", 1) is None


@pytest.mark.parametrize("device, is_kept", [("CPU", True), ("CUDA", False)])
def test_another_driver_has_other_entries_of_a_gpu_alone(monkeypatch, device, is_kept):
    monkeypatch.setattr("tinygrad.Device", mock.Mock(DEFAULT=device))
    environments = set()
    for version in ("12060", "13020"):
        monkeypatch.setattr(disk_cache.cuda_driver, "version", lambda version=version: version)
        environments.add(disk_cache._environment())
    assert (len(environments) == 1) == is_kept


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"x", lambda data: b""])
def test_a_damaged_entry_is_deleted_and_made_anew(folder, damage):
    cache = DiskCache(folder, "")
    cache.put("table", 1, "value")
    (path,) = files(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("table", 1) is None and not path.exists()
    cache.put("table", 1, "again")
    assert cache.get("table", 1) == "again"


def test_another_users_entry_is_not_loaded(folder, monkeypatch):
    cache = DiskCache(folder, "")
    cache.put("table", 1, "value")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert cache.get("table", 1) is None and files(folder)


def test_a_file_that_another_process_renames_meanwhile_is_no_failure(folder, monkeypatch):
    gone = mock.Mock(is_file=lambda: True, stat=mock.Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(os, "scandir", lambda folder: iter([gone]))
    cache = DiskCache(folder, "")
    for key in (1, 2):
        cache.put("table", key, "value")
    assert cache.get("table", 2) == "value"


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "folder", "")
    cache.put("table", 1, "value")
    assert cache.get("table", 1) is None


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch):
    cache = DiskCache(folder, "")
    cache.put("table", 1, "value")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    cache.put("table", 2, "value")
    assert len(files(folder)) == 1
    monkeypatch.undo()
    cache.put("table", 2, "value")  # is not tried again
    assert cache.get("table", 2) is None and cache.get("table", 1) == "value"


def test_the_least_recently_used_entries_are_deleted_first(folder, monkeypatch):
    cache = DiskCache(folder, "")
    for i in range(4):
        cache.put("table", i, bytes(1000))
        os.utime(cache._path("table", i), (time.time() - 1000 + i,) * 2)
    cache.put("table", 5, bytes(1000))  # in a time that is yet to come, as 3
    for i, days in ((0, -2), (3, 9), (5, 9)):
        os.utime(cache._path("table", i), (time.time() + days * 86400,) * 2)
    assert all(cache.get("table", i) is not None for i in (0, 3))  # and so they are used again
    monkeypatch.setattr(disk_cache, "LIMIT_BYTES", 2500)
    DiskCache(folder, "").put("table", 4, b"")
    assert [i for i in range(6) if cache.get("table", i) is not None] == [0, 3, 4]


WRITER = """
import sys
from pathlib import Path
from engine.cache.disk_cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), "")
for i in range(200):
    cache.put("table", i % 5, [i % 5] * 1000)
    assert cache.get("table", (i + 1) % 5) in (None, [(i + 1) % 5] * 1000)
"""


def test_processes_may_write_at_once(folder):
    root = ROOT
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], cwd=root, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [(b"", 0)] * 3
    assert len(files(folder)) == 5
