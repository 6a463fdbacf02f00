"""Bytecode is kept in the user's cache where Python keeps none."""

import json
import marshal
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.system import bytecode
from engine.system.child_process import module_environment
from tests.paths import ROOT

_SCRIPT = """
import json, os, sys
from engine.system.bytecode import keep_bytecode
keep_bytecode()
import engine.system.heap  # stands for all that is imported later
from engine.system.child_process import module_environment
child = module_environment()
names = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
assert "PYTHONIOENCODING" not in child
print(json.dumps([sys.pycache_prefix, sys.dont_write_bytecode, *map(child.get, names)]))
"""


def _run(cache, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), **variables}
    environment["PYTHONIOENCODING"] = "latin-1"
    output = subprocess.check_output([sys.executable, "-P", "-c", _SCRIPT], env=environment, text=True)
    return json.loads(output), list(cache.rglob("heap.*.pyc"))


def test_bytecode_is_kept_where_python_may_not_write_it(tmp_path):
    nowhere = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "none")}
    state, kept = _run(tmp_path, **nowhere)
    folder = str(tmp_path / "orin-chat" / "bytecode")
    assert state == [folder, False, None, folder]
    assert len(kept) == 1 and str(kept[0]).startswith(folder)


def test_a_full_disk_gets_no_bytecode_of_which_it_would_keep_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(bytecode, "__spec__", SimpleNamespace(cached=""))
    monkeypatch.setattr(bytecode.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    bytecode.keep_bytecode()
    assert sys.dont_write_bytecode and module_environment()["PYTHONDONTWRITEBYTECODE"] == "1"
    kept = Path(sys.pycache_prefix, "module.pyc")
    kept.write_bytes(b"a part")
    assert not bytecode.forget_damaged(EOFError("a pipe")) and kept.exists()
    with pytest.raises(EOFError) as cut:
        marshal.loads(marshal.dumps(test_bytecode_that_python_keeps_stays_where_it_is.__code__)[:40])
    assert bytecode.forget_damaged(cut.value) and not kept.exists()


def test_bytecode_that_python_keeps_stays_where_it_is(tmp_path):
    kept_here = str(tmp_path / "here")
    state, kept = _run(tmp_path / "cache", PYTHONPYCACHEPREFIX=kept_here)
    assert state == [kept_here, False, None, kept_here] and not kept


def test_a_folder_that_cannot_be_made_changes_nothing(tmp_path):
    (tmp_path / "orin-chat").write_text("a file")
    state, kept = _run(tmp_path, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(tmp_path / "none"))
    assert state == [str(tmp_path / "none"), True, "1", str(tmp_path / "none")] and not kept
