"""The folder of the tests lasts as long as the process that made it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT


def test_a_process_that_inherits_the_folder_does_not_delete_it():
    folder = Path(os.environ["ORIN_TESTS_FOLDER"])
    code = "from tests import environment; environment.enter(); environment.leave()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert folder.is_dir()


def test_the_process_that_made_the_folder_deletes_it():
    code = """
import os
from tests import environment

environment.enter()
print(os.environ["ORIN_TESTS_FOLDER"])
environment.leave()
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ORIN_TESTS")}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean, check=True, capture_output=True, text=True
    )
    assert ran.stdout.strip() and not Path(ran.stdout.strip()).exists()
