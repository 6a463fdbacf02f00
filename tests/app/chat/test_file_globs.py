"""Patterns of files: what they find, and where they end."""

import glob
from itertools import count
from pathlib import Path

import pytest

from app.chat.file_globs import matching
from engine.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    for name in ("a.py", "b.txt", ".hidden.py", "x/c.py", "x/y/d.py", ".git/e.py", "x/[z]/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.py").symlink_to("a.py")
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        "*.py",
        "**/*.py",
        "**",
        "**/**/d.py",
        "x/**/*.py",
        ".*",
        "*/c.py",
        "?.[pt]*",
        "x/[[]z]/*",
        "*",
        "n/*",
        "x/../*.py",
    ],
)
def test_the_same_files_as_the_library_finds(folder, pattern):
    found = map(Path, glob.iglob(f"{folder}/{pattern}", recursive=True))  # noqa: PTH207 (Path.glob finds hidden ones)
    assert {*matching(folder / pattern, count())} == {path for path in found if path.is_file()}


def test_folders_that_link_to_themselves_end(folder):
    for name in ("one", "two", "three"):
        (folder / name).symlink_to(folder)
    assert [*matching(folder / "**/nosuch", iter(range(5000)))] == []  # 3^40 paths
    with pytest.raises(UsageError, match="goes through more than 50,000 files"):
        list(matching(folder / ("*/" * 20) / "nosuch", iter(range(5000))))


def test_names_that_no_file_can_have_are_not_found(folder):
    assert [*matching(folder / "*" / ("y" * 300), count())] == []
