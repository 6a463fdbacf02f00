"""Going back in a conversation of a model with recurrent state."""

import numpy as np
import pytest

from engine.events import EngineOptions, Generate, Profile, Sampling, TokenIds
from engine.model import checkpoints
from engine.model.generate import TextModel
from tests import generated_model

CONTEXT = 400


@pytest.fixture(scope="module", params=["graph"])
def model(request, tmp_path_factory):
    path = generated_model.write(
        tmp_path_factory.mktemp("model") / "m.gguf", architecture="qwen35", layers=4, context=CONTEXT
    )
    options = EngineOptions(model_path=str(path), context_length=CONTEXT, kernels=request.param)
    return TextModel(options, lambda _: None)


def answer(model, ids, stop_after=None, **request):
    """The tokens of the reply with their log-probabilities, and how many of the prompt were not computed."""
    tokens, asked = [], iter(range(CONTEXT))
    request = {"sampling": Sampling(temperature=0), "max_tokens": 8, "ignore_eos": True} | request
    end = model.generate(
        Generate(request_id=1, prompt=TokenIds(ids=tuple(ids)), logprobs=1, **request),
        tokens.append,
        lambda: stop_after is not None and next(asked) >= stop_after,
    )
    said = [t for t in tokens if hasattr(t, "logprob")]
    return [t.id for t in said], [t.logprob for t in said], end.cached_n


def test_what_follows_is_what_follows_in_a_new_conversation(model, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 8)
    assert model.ready.state_bytes
    draw = np.random.default_rng(0)
    text = draw.integers(0, 200, 150).tolist()
    first, _, _ = answer(model, text, fresh=True)
    kinds = {
        "regenerated": (text, 149),
        "edited": ([*text[:120], *draw.integers(0, 200, 20).tolist()], 96),
        "goes on": ([*text, *first, 7, 8], 157),
        "stopped": ([*text, *first[:3]], 148),
    }
    for kind, (prompt, known) in kinds.items():
        answer(model, text, fresh=True)
        if kind == "stopped":
            answer(model, text, stop_after=9, max_tokens=20)
        if kind == "edited":
            model.profile(Profile(request_id=2), lambda: False)
        ids, logprobs, cached = answer(model, prompt)
        assert known <= cached < len(prompt), kind
        wanted, wanted_logprobs, none = answer(model, prompt, fresh=True)
        assert none == 0 and ids == wanted, kind
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=1e-4)
