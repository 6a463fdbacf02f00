import os
import subprocess
import sys

from tests.paths import ROOT

CONFTEST = "from tests.processes import pytest_addoption, pytest_runtestloop"
FIRST = """
import os, pytest
def test_right(tmp_path): print(os.getpid())
def test_wrong(): assert [1] == [2]
@pytest.mark.skip
def test_left_out(): pass
"""
SECOND = """
import os
def test_before(): pass
def test_dies(): os._exit(3)
def test_after(): pass
"""


def test_what_forked_processes_tell_is_shown_and_no_test_is_lost_with_one(tmp_path):
    (tmp_path / "pytest.ini").touch()
    for name, text in {"conftest": CONFTEST, "test_first": FIRST, "test_second": SECOND}.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "-q",
        "-rA",
    ]
    # Plugins that are installed would be three seconds of imports.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "3 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "At index 0 diff: 1 != 2" in done.stdout
    assert "PASSED test_second.py::test_before" in done.stdout
    for name in ("test_dies", "test_after"):
        assert f"FAILED test_second.py::{name}" in done.stdout
    assert "has not ended. Exit codes of the processes: 0, 3" in done.stdout.replace("3, 0", "0, 3")
    assert done.returncode == 1
