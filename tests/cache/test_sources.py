import os
import threading

import pytest

from engine.cache import sources
from engine.system import forked_call


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch):
    for name, empty in (("_files", {}), ("_digests", {}), ("_ahead", [])):
        monkeypatch.setattr(sources, name, empty)
    sources.source_digest.cache_clear()


def test_sources_are_all_that_lies_below_a_folder(tmp_path):
    for name, text in (("b.py", "1"), ("a/c.py", "2"), ("a/d.txt", "3"), ("a/e/f.py", "4")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names = [str(tmp_path / name) for name in ("a/c.py", "a/e/f.py", "b.py")]
    assert list(sources._sources(str(tmp_path))) == names
    assert len({sources._file_digest(name) for name in names}) == 3
    assert len({sources.source_digest(*folders) for folders in ((), ("kernels",), ("formats",))}) == 3


def test_a_fork_reads_sources_ahead(monkeypatch):
    monkeypatch.setattr(forked_call, "may_fork", lambda: True)
    sources.read_ahead()
    ahead = sources.source_digest("formats"), sources.source_digest("cache/sources.py")
    assert any("formats" in path for path in sources._digests) and len(sources._digests) > 100
    for known in (sources._files, sources._digests):
        known.clear()
    sources.source_digest.cache_clear()
    assert ahead == (sources.source_digest("formats"), sources.source_digest("cache/sources.py"))


def test_without_a_fork_or_if_it_fails_sources_are_read_here(monkeypatch):
    stays = threading.Event()
    other = threading.Thread(target=stays.wait)
    other.start()
    sources.read_ahead()  # others could hold locks
    expected = sources.source_digest("cache")
    stays.set()
    other.join()
    monkeypatch.setattr(forked_call, "may_fork", lambda: True)
    failing = forked_call.call_in_fork(lambda: os._exit(3))
    assert failing() == b""
    sources.source_digest.cache_clear()
    sources._ahead.append(lambda: b"")
    assert sources.source_digest("cache") == expected
