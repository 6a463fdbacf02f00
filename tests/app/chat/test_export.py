import contextlib
import os
import resource
import tempfile
from pathlib import Path

import pytest

from app.chat.export import write_new_file
from engine.errors import OrinError


@contextlib.contextmanager
def full_disk():
    """A file may have four bytes; as short as can be, since pytest's own output may be a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_chat_is_written_under_its_title_and_never_over_another():
    paths = [write_new_file("Why is *this*?", text) for text in ("one", "two")]
    assert [(path.name, path.read_text()) for path in paths] == [
        ("why-is-this.md", "one"),
        ("why-is-this-2.md", "two"),
    ]


def test_half_a_file_is_not_left_on_a_full_disk(tmp_path):
    with full_disk(), pytest.raises(OrinError, match="cannot be written"):
        write_new_file("Why?", "more than four bytes")
    assert not list(tmp_path.iterdir())


def test_where_the_current_folder_cannot_be_written_it_goes_elsewhere(folder, home, monkeypatch):
    monkeypatch.setattr(Path, "cwd", lambda: Path(os.devnull))
    assert write_new_file("A", "text") == home / "a.md"
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert write_new_file("A", "text").read_text() == "text"
    assert (folder / "a.md").exists()


def test_a_document_is_for_its_owner_only():
    assert write_new_file("A", "text").stat().st_mode & 0o777 == 0o600
