"""Libraries are the ones that tinygrad finds, and no other files of their folders are looked at."""

import ctypes
from pathlib import Path

import pytest
from tinygrad.runtime.support.c import DLL

import engine.fixes
from engine.errors import BackendError
from engine.fixes import library_search

stock = library_search._stock_find


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of LD_LIBRARY_PATH, after one that is not there."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/none:{tmp_path}")
    monkeypatch.delenv("STRANGE_PATH", raising=False)
    library_search._names.cache_clear()
    for name in ("libstrange.so.1.2", "libstrange.sol", "libstranger.so", "strange.so"):
        (tmp_path / name).write_bytes(b"\x7fELF")
    (tmp_path / "libstrange.so").write_text("GROUP ( libstrange.so.1 )")  # a script of the linker
    return tmp_path


def test_a_library_is_found_by_its_name(folder):
    assert library_search._find("strange", ["strange"]) is None is stock("strange", ["strange"])
    (folder / "libstrange.so.1").write_bytes(b"\x7fELF")
    library_search._names.cache_clear()
    wanted = str(folder / "libstrange.so.1")
    assert (
        library_search._find("strange", ["other", "strange"])
        == wanted
        == stock("strange", ["other", "strange"])
    )


def test_paths_and_a_variable_go_first(folder, monkeypatch):
    path = str(folder / "strange.so")
    assert (
        library_search._find("strange", ["/nowhere.so", path])
        == path
        == stock("strange", ["/nowhere.so", path])
    )
    monkeypatch.setenv("STRANGE_PATH", path)
    assert library_search._find("strange", ["libc"]) == path


@pytest.mark.parametrize("name", ["c", "m", "gcc_s", "z", "nvrtc", "cuda"])
def test_the_systems_libraries_are_the_same_and_few_files_are_asked_for(name, monkeypatch):
    wanted, asked, is_file = stock(name, [name]), [], Path.is_file
    library_search._names.cache_clear()
    monkeypatch.setattr(Path, "is_file", lambda path: asked.append(path) or is_file(path))
    assert library_search._find(name, [name]) == wanted
    ours = len(asked)
    stock(name, [name])
    assert ours < 10 < len(asked) - ours


def test_it_is_in_the_place_of_tinygrads_search(monkeypatch):
    library_search.apply()
    assert DLL.findlib is library_search._find
    monkeypatch.setattr(engine.fixes, "TINYGRAD", "0.13.0")
    with pytest.raises(BackendError):
        library_search.apply()


def test_functions_are_bound_without_what_they_stand_for() -> None:
    library_search.apply()
    library = DLL("c", "c")

    @library.bind(ctypes.c_size_t, ctypes.c_char_p)
    def strlen(text: bytes) -> int: ...

    assert strlen(b"abc") == 3 and strlen.__name__ == "strlen" and strlen.argtypes == (ctypes.c_char_p,)
    assert not hasattr(strlen, "__wrapped__")  # tinygrad's own has it
