"""Which experts a model chooses, counted where it computes and reported while it answers."""

import numpy as np
import pytest

from engine.events import EngineOptions, ExpertChoices, Finished, Generate, Profile, Sampling, TokenIds
from engine.measure import profile
from engine.model import choice_reporter
from engine.model.generate import TextModel
from tests import generated_model

PROMPT, LAYERS, DIM = tuple(range(30, 50)), 2, 64
COUNT, USED, WIDTH = generated_model.EXPERTS.values()


@pytest.fixture(scope="module", params=["auto"])
def model(request, tmp_path_factory):
    path = generated_model.write(
        tmp_path_factory.mktemp("model") / "m.gguf", architecture="qwen3moe", layers=LAYERS, dim=DIM
    )
    options = EngineOptions(model_path=str(path), context_length=64, kernels=request.param)
    return TextModel(options, lambda _: None)


def reported(model, fresh=True):
    """The choices that an answer of four tokens reports, and its other events."""
    events = []
    request = Generate(
        request_id=5, prompt=TokenIds(ids=PROMPT), sampling=Sampling(temperature=0), max_tokens=4,
        ignore_eos=True, fresh=fresh,
    )  # fmt: skip
    events.append(model.generate(request, events.append, lambda: False))
    choices = [event for event in events if isinstance(event, ExpertChoices)]
    return choices, [event for event in events if event not in choices]


def captures(model):
    for _ in range(3):
        model._runner.decode(0, 0)
        yield


def test_every_choice_of_a_request_is_reported_once(model, monkeypatch):
    assert (model.ready.experts, model.ready.experts_used) == (COUNT, USED)
    monkeypatch.setattr(choice_reporter, "INTERVAL_S", 0.0)
    monkeypatch.setattr(profile, "ROUNDS_S", 0.0)
    for fresh, tokens in ((True, len(PROMPT) + 3), (False, 4)):  # the second prompt is in the cache
        choices, _ = reported(model, fresh)
        assert len(choices) >= 4 and {event.request_id for event in choices} == {5}
        counts = np.sum([event.layers for event in choices], axis=0)
        assert counts.shape == (LAYERS, COUNT)
        assert (counts.sum(-1) == tokens * USED).all() and (counts <= tokens).all()
        model.profile(
            Profile(request_id=1), lambda: False
        )  # whose choices are nobody's, as those of a warm-up
        model._cached.clear()
        model._captures = captures(model)
        model.warm_up(lambda: False)
        model._cached[:] = PROMPT[:-1]


def test_they_are_reported_seldom_and_at_the_end(model):
    choices, others = reported(model)
    assert len(choices) == 1 and isinstance(others[-1], Finished)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_bytes_are_those_of_the_chosen_experts(model, monkeypatch, step):
    monkeypatch.setattr(profile, "ROUNDS_S", 0.0)
    made = model.profile(Profile(request_id=1, step=step), lambda: False)
    matrix, width = DIM * WIDTH * 34 // 32, made.tokens * USED * (DIM + 2 * WIDTH) * 4  # Q8_0
    read = COUNT if step == "prefill" else USED  # more tokens than experts: all of them
    for role, matrices in (("experts gate+up", 2), ("experts down", 1)):
        kernels = [kernel for kernel in made.kernels if kernel.role == role]
        excess = sum(kernel.bytes for kernel in kernels) - LAYERS * matrices * read * matrix
        assert 0 <= excess < 4 * LAYERS * width, role
    router = sum(kernel.bytes for kernel in made.kernels if kernel.role == "router")
    lanes = 16 * DIM * 4  # the router's rows, filled up
    assert LAYERS * COUNT * DIM * 4 <= router < LAYERS * (lanes + made.tokens * (DIM + COUNT) * 16)
    chooses = [kernel.role for kernel in made.kernels if "choose_experts" in kernel.name]
    assert chooses == ["router"]


def test_a_model_without_experts_reports_none(tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", layers=1)
    dense = TextModel(EngineOptions(model_path=str(path), context_length=64), lambda _: None)
    assert dense.ready.experts == 0 and not reported(dense)[0]
