"""What a loaded model measures of itself, and that it costs no conversation its cache."""

import pytest

from engine.events import EngineOptions, Generate, Measure, Sampling, TokenIds
from engine.measure import bandwidth
from engine.model.generate import TextModel
from tests import generated_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = generated_model.write(tmp_path_factory.mktemp("model") / "m.gguf")
    return TextModel(EngineOptions(model_path=str(path), context_length=16), lambda _: None)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(bandwidth, "HOST_BYTES", 16 << 20)


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
    assert measured.copy_gbps > 0.5
    assert 10 < measured.kernels_per_token < 1000
    assert measured.device_bytes > 100_000


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
