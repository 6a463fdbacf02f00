"""What tests.workers makes of tests that pass, fail and end their process."""

import subprocess
import sys

from tests.paths import ROOT

_TESTS = """
import os, pytest
def test_passes(): pass
def test_ends_its_process(): os._exit(3)
def test_fails(): print("was said"); assert [1] == [2]
@pytest.mark.skip
def test_is_left_out(): pass
"""


def test_each_is_reported_once_and_a_process_that_ends_fails_only_one(tmp_path):
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "/dev/null",
        "-p",
        "no:xdist",
        "-p",
        "tests.workers",
    ]
    done = subprocess.run(
        [*command, "-p", "no:textual-snapshot", "-p", "no:hypothesispytest", "-n", "2", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "4 failed, 2 passed, 2 skipped" in done.stdout
    assert done.stdout.count("The process ended: 3") == 2 and done.stdout.count("\nwas said\n") == 2
    assert done.stdout.count("At index 0 diff: 1 != 2") == 2
