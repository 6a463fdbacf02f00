"""Going back in a conversation of a model with recurrent state."""

import numpy as np
import pytest

from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Profile, Sampling, Token, TokenIds
from engine.runtime import checkpoints
from tests import generated_model
from tests.targets.layers import CONTEXT
from tests.thorough import rarely


@pytest.fixture(
    scope="module", params=["qwen35", *map(rarely, ("lfm2", "granitehybrid", "mamba", "rwkv7", "qwen4exp"))]
)
def path(request, tmp_path_factory):
    where = tmp_path_factory.mktemp("model") / "m.gguf"
    return generated_model.write(where, architecture=request.param, quant="F32", layers=3, rotated=8)


@pytest.fixture(scope="module")
def model(path):
    return opened(path)


def opened(path, **options):
    options = EngineOptions(model_path=str(path), context_length=CONTEXT, **options)
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
    ready = model.ready
    states, rest = divmod(ready.states_bytes, ready.state_bytes)
    assert (
        rest == 0 < states - ready.checkpoints in (1, 1 + 4)
    )  # four for guesses, which tensor graphs do not check
    draw = np.random.default_rng(0)
    text = draw.integers(0, 200, 150).tolist()
    first, _, _ = answer(model, text, fresh=True)
    kinds = {
        "regenerated": (text, 149),
        "edited": ([*text[:120], *draw.integers(0, 200, 20).tolist()], 64),
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


def test_conversations_share_what_they_begin_with(path, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 8)
    model, draw = opened(path, parallel=3), np.random.default_rng(1)
    assert model.ready.parallel == 3
    system = draw.integers(0, 200, 130).tolist()
    prompts = [[*system, *draw.integers(0, 200, n).tolist()] for n in (1, 9, 40, 17)]
    prompts += [[*prompts[2], *draw.integers(0, 200, 5).tolist()], system[:100]]

    def replies(prompts, fresh):
        said, ends = [[] for _ in prompts], []
        for events, prompt in zip(said, prompts, strict=True):
            request = Generate(
                request_id=1, prompt=TokenIds(ids=tuple(prompt)), sampling=Sampling(temperature=0), max_tokens=9,
                ignore_eos=True, fresh=fresh,
            )  # fmt: skip
            model.scheduler.add(model.begin(request, events.append), lambda: False, ends.append)
        while model.scheduler.busy:
            model.scheduler.step()
        assert all(end.reason == "length" for end in ends)
        return [[e.id for e in events if isinstance(e, Token)] for events in said], sum(
            e.cached_n for e in ends
        )

    wanted, none = replies(prompts, fresh=True)
    assert none == 0
    got, cached = replies(prompts, fresh=False)
    assert got == wanted and cached > 0.9 * sum(map(len, prompts))
