"""Which file is a model's drafter."""

from argparse import Namespace

import pytest

from app.chat.settings import Settings
from app.cli.model_file import draft_model
from engine.catalog.drafters import drafter_beside
from engine.errors import UsageError
from tests import generated_model
from tests.generated_assistant import write_assistant


def test_the_one_beside_a_model(tmp_path):
    model = generated_model.write(tmp_path / "m.gguf", architecture="gemma4", layers=4)
    other = generated_model.write(tmp_path / "l.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF gemma4-assistant")
    write_assistant(tmp_path / "a-wider.gguf", width=96)
    asked = Namespace(draft="auto", model=str(model), speculate=None)
    assert drafter_beside(model) is None
    with pytest.raises(UsageError, match="No draft model is known"):
        draft_model(asked, Settings())
    (tmp_path / "MTP").mkdir()
    far = write_assistant(tmp_path / "MTP" / "m.gguf")
    assert drafter_beside(model) == far
    near = write_assistant(tmp_path / "mtp-m.gguf")
    assert drafter_beside(model) in (far, near)
    assert draft_model(asked, Settings()) in (far, near)
    assert drafter_beside(other) is None


def test_the_one_in_a_repository_of_the_hubs_cache(tmp_path):
    snapshot = tmp_path / "models--u--r" / "snapshots" / "0123"
    (snapshot / "Q8_0").mkdir(parents=True)
    model = generated_model.write(snapshot / "Q8_0" / "m.gguf", architecture="gemma4", layers=4)
    drafter = write_assistant(snapshot / "mtp-m.gguf")
    assert drafter_beside(model) == drafter
