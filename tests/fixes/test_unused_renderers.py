"""Renderers that a device does not use are not imported."""

import os
import subprocess
import sys

from tests.paths import ROOT
from tests.thorough import thorough

CODE = """
import sys
from engine.fixes import unused_renderers
if {fixed}: unused_renderers.apply("{dev}")
from tinygrad import Tensor
assert Tensor([1, 2]).add(1).tolist() == [2, 3]
print([name for name in ("nir", "isa.x86") if "tinygrad.renderer." + name in sys.modules])
from tinygrad.renderer.nir import LVPRenderer
assert LVPRenderer.__module__ == "tinygrad.renderer.nir"
"""


def imported(fixed, dev="CPU"):
    env = {**os.environ, "DEV": "CPU"}
    code = CODE.format(fixed=fixed, dev=dev)
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@thorough
def test_a_cpu_computes_without_them_and_others_may_import_them_later():
    assert imported(True) == "[]"
    assert imported(False) == "['nir', 'isa.x86']"


@thorough
def test_a_renderer_that_is_named_is_imported():
    assert imported(True, "CPU:LVP") == "['nir', 'isa.x86']"
