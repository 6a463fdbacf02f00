"""The measurements are found, described and listed."""

import argparse
import re
from importlib import import_module

import pytest

from tests.generated_model import write
from tests.paths import ROOT
from tests.thorough import thorough
from tools.measure import engine_process, kv_fidelity, step_rates
from tools.measure.__main__ import MEASUREMENTS, main


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_each_takes_arguments_and_says_how_it_is_called(name):
    module = import_module(f"tools.measure.{name}")
    module.add_arguments(argparse.ArgumentParser())
    assert callable(module.run) and f"python -m tools.measure {name} " in module.__doc__


def test_the_page_lists_them_all():
    page = (ROOT / "docs" / "measuring.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(MEASUREMENTS)


def test_an_unknown_one_is_refused_and_the_others_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["none"])
    assert "step_rates" in capsys.readouterr().err


@thorough
def test_a_small_model_is_measured(tmp_path):
    path = str(write(tmp_path / "model.gguf", context=256))
    rates = engine_process.alone(step_rates.ours, path, "CPU", [0, 32], [16], 2, "f16")
    assert rates.decode.keys() == {0, 32} and rates.prefill.keys() == {(16, 0), (16, 32)}


@thorough
def test_a_small_models_cache_is_measured(tmp_path):
    path = str(write(tmp_path / "model.gguf", context=256))
    [_, control] = engine_process.alone(kv_fidelity.divergences, path, "CPU", "f16", 40)
    assert re.fullmatch(r"control: mean .*, largest .*, 100% same token", control)
