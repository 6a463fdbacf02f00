"""Which experts a model chooses, counted where it computes and reported while it answers."""

import numpy as np
import pytest

from engine.measure import profile
from engine.model.text_model import TextModel
from engine.protocol.events import (
    EngineOptions,
    ExpertChoices,
    Generate,
    Profile,
    Sampling,
    Slot,
    Slots,
    TokenIds,
)
from engine.runtime import choice_reporter, scheduler
from engine.runtime.kv_blocks import KVBlocks
from tests import generated_families, generated_model

PROMPT, LAYERS, DIM = tuple(range(30, 50)), 2, 64
COUNT, USED, WIDTH = generated_families.EXPERTS.values()
SLOT = Slot(request_id=1, client="", phase="decode", prompt_done=1, prompt_n=1, predicted_n=1, rate=1.0)


@pytest.fixture(scope="module")
def events():
    """What the engine reports that belongs to no request."""
    return []


@pytest.fixture(scope="module")
def model(tmp_path_factory, events):
    path = generated_model.write(
        tmp_path_factory.mktemp("model") / "m.gguf", architecture="qwen3moe", layers=LAYERS, dim=DIM
    )
    options = EngineOptions(model_path=str(path), context_length=256, speculate="off")
    return TextModel(options, events.append)


def answer(model, fresh=True):
    """Makes the model answer with four tokens."""
    request = Generate(
        request_id=5, prompt=TokenIds(ids=PROMPT), sampling=Sampling(temperature=0), max_tokens=4,
        ignore_eos=True, fresh=fresh,
    )  # fmt: skip
    model.generate(request, lambda _: None, lambda: False)


def captures(model):
    for _ in range(3):
        model._capture._run(1, 0)
        yield


def forget(model):
    """Empties the KV cache."""
    model.scheduler.blocks = KVBlocks(model._runner)


def test_every_choice_for_a_request_is_reported_once(model, events, monkeypatch):
    assert (model.ready.experts, model.ready.experts_used) == (COUNT, USED)
    monkeypatch.setattr(choice_reporter, "INTERVAL_S", 0.0)
    monkeypatch.setattr(scheduler, "REPORT_S", 0.0)
    monkeypatch.setattr(profile, "ROUNDS_S", 0.0)
    for fresh, tokens in ((True, len(PROMPT) + 3), (False, 4)):  # the second prompt is in the cache
        events.clear()
        answer(model, fresh)
        chosen = [event.layers for event in events if isinstance(event, ExpertChoices)]
        assert len(chosen) >= 3
        counts = np.sum(chosen, axis=0)
        assert counts.shape == (LAYERS, COUNT)
        by_layer = np.array([tokens, 4])  # of a prompt, the last layer computes the last token alone
        assert (counts.sum(-1) == by_layer * USED).all() and (counts <= by_layer[:, None]).all()
        # What a profile and a warm-up choose is nobody's.
        model.profile(Profile(request_id=1), lambda: False)
        kept = model.scheduler.blocks
        forget(model)
        model._capture._left = captures(model)
        model.warm_up(lambda: False)
        model.scheduler.blocks = kept


def test_they_are_reported_seldom_and_at_the_end(model, events):
    events.clear()
    answer(model)
    assert [type(event) for event in events if not isinstance(event, Slots)] == [ExpertChoices]


def test_those_of_several_conversations_are_reported_too(model, events):
    events.clear()
    answering, idle = (Slots(slots=(slot,), waiting=0, blocks=()) for slot in (SLOT, None))
    for slots in (answering, idle, idle):
        model._capture._run(1, 0)
        model._report_slots(slots, events.append)
    assert [type(event) for event in events] == [Slots, Slots, ExpertChoices, Slots, ExpertChoices]
    assert [sum(event.layers[0]) for event in events[2::2]] == [2 * USED, USED]


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_bytes_are_those_of_the_chosen_experts(model, monkeypatch, step):
    monkeypatch.setattr(profile, "ROUNDS_S", 0.0)
    made = model.profile(Profile(request_id=1, step=step), lambda: False)
    layers = LAYERS - (step == "prefill")  # the last one's experts change nothing that later tokens read
    matrix, width = DIM * WIDTH * 34 // 32, made.tokens * USED * (DIM + 2 * WIDTH) * 4  # Q8_0
    read = COUNT if step == "prefill" else USED  # more tokens than experts: all of them
    for role, matrices in (("experts gate+up", 2), ("experts down", 1)):
        kernels = [kernel for kernel in made.kernels if kernel.role == role]
        excess = sum(kernel.bytes for kernel in kernels) - layers * matrices * read * matrix
        assert 0 <= excess < 4 * layers * width, role
    router = sum(kernel.bytes for kernel in made.kernels if kernel.role == "router")
    lanes = 16 * DIM * 4  # the router's rows, filled up
    assert layers * COUNT * DIM * 4 <= router < layers * (lanes + made.tokens * (DIM + COUNT) * 16)
    chooses = [kernel.role for kernel in made.kernels if "choose_experts" in kernel.name]
    assert chooses == ["router"]


def test_a_model_without_experts_reports_none(tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", layers=1)
    events = []
    dense = TextModel(EngineOptions(model_path=str(path), context_length=256), events.append)
    answer(dense)
    assert dense.ready.experts == 0 and not any(isinstance(event, ExpertChoices) for event in events)
