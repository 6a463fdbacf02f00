import subprocess
import sys

from tests.paths import ROOT

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from widgets.terminal.stray_output import stray_errors_to, stray_output_to
print("before", file=sys.stderr)
try:
    with stray_output_to(Path(sys.argv[1]).open("ab")):
        os.write(1, b"stray 1\\n")
        os.write(2, b"a panic\\n")
        subprocess.run(["sh", "-c", "echo a child >&2"])
        print("the screen \\u2713", file=sys.__stderr__)
        print("on stdout")
        raise KeyError
except KeyError:
    os.write(2, b"after\\n")
    print("and after", file=sys.stderr)
sys.stdout.flush()
with stray_errors_to(Path(sys.argv[1]).open("ab")):
    os.write(1, b"a prompt\\n")
    os.write(2, b"another panic\\n")
    print("a warning", file=sys.stderr)
    os.write(sys.stderr.fileno(), b"at once\\n")
sys.stderr = open(os.devnull, "w")
with stray_errors_to(Path(sys.argv[1]).open("ab")):
    os.write(2, b"a caller\\n")
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)  # as a terminal that was closed
sys.stderr = before = open(2, "w", closefd=False)
with stray_errors_to(Path(sys.argv[1]).open("ab")):
    sys.stderr.write("lost")
print(sys.stderr is before)
"""


def test_what_libraries_and_children_print_goes_to_the_log(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8")
    assert run.stderr.split("\n") == [
        "before", "the screen ✓", "after", "and after", "a warning", "at once", "a caller", "",
    ]  # fmt: skip
    assert run.stdout == "on stdout\na prompt\nTrue\n"
    assert (tmp_path / "log").read_text() == "stray 1\na panic\na child\nanother panic\n"
