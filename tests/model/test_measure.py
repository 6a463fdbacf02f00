"""What a loaded model measures of itself, and that it costs no conversation its cache."""

import pytest

from engine.model import text_model as generate
from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Measure, Sampling, TokenIds
from tests import generated_model

CONTEXT, LAYERS = 16, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = generated_model.write(tmp_path_factory.mktemp("model") / "m.gguf", layers=LAYERS)
    return TextModel(EngineOptions(model_path=str(path), context_length=CONTEXT), lambda _: None)


@pytest.fixture(autouse=True)
def _no_copies(monkeypatch):
    monkeypatch.setattr(generate, "copy_gbps", {"CPU": 12.5}.get)


def answer(model, n_prompt, **fields):
    tokens = []
    request = Generate(
        request_id=1,
        prompt=TokenIds(ids=tuple(range(30, 30 + n_prompt))),
        sampling=Sampling(temperature=0),
        max_tokens=4,
        ignore_eos=True,
        **fields,
    )
    end = model.generate(request, tokens.append, lambda: False)
    return [token.id for token in tokens if hasattr(token, "id")], end.cached_n


def test_figures(model):
    measured = model.measure(Measure(request_id=3))
    assert measured.request_id == 3
    assert measured.copy_gbps == 12.5
    assert measured.kernels_per_token == 1 + LAYERS * 13 + 2  # embedding, layers, output head
    ready = model.ready
    assert measured.device_bytes >= ready.weight_bytes_per_token + CONTEXT * ready.kv_bytes_per_token


@pytest.mark.parametrize("n_prompt", [8, 16])  # the second fills the context
def test_measuring_changes_no_answer(model, n_prompt):
    before, _ = answer(model, n_prompt, fresh=True)
    model.measure(Measure(request_id=1))
    after, cached = answer(model, n_prompt)
    assert after == before
    assert cached == n_prompt - 1


def test_a_fresh_prompt_is_computed_whole(model):
    first, _ = answer(model, 8)
    again, cached = answer(model, 8, fresh=True)
    assert (again, cached) == (first, 0)
