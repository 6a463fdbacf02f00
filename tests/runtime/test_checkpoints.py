"""Texts that are gone back to, with a model whose state has no positions."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Sampling, Token, TokenIds
from engine.runtime import checkpoints
from engine.runtime.checkpoints import EVERY
from engine.runtime.scheduler import Scheduler
from tests import generated_model
from tests.runtime.fake_state_runner import FakeStateRunner, next_token
from tests.thorough import THOROUGH, thorough


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = generated_model.write(tmp_path_factory.mktemp("model") / "m.gguf", layers=1, context=20_000)
    return TextModel(EngineOptions(model_path=str(path), context_length=20_000), lambda _: None)


def answer(model, prompt, n=8, stop_after=None, ignore_eos=True):
    """The reply, and how many tokens of the prompt were not computed."""
    events, asked = [], iter(range(10**6))
    request = Generate(
        request_id=1,
        prompt=TokenIds(ids=tuple(prompt)),
        sampling=Sampling(temperature=0),
        max_tokens=n,
        ignore_eos=ignore_eos,
    )
    stop = lambda: stop_after is not None and next(asked) >= stop_after
    end = model.generate(request, events.append, stop)
    return [e.id for e in events if isinstance(e, Token)], end.cached_n


def reply(prompt, n, eos=()):
    """What a new conversation gets."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + n and not (len(tokens) > len(prompt) and tokens[-1] in eos):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def with_states(model, slots=8):
    runner = FakeStateRunner(slots)
    model.scheduler = Scheduler(runner, lambda _: None)
    return runner


TURN = st.tuples(
    st.floats(0, 1) | st.integers(-12, 0),  # how much of the text before is kept
    st.lists(st.integers(0, 255), min_size=1, max_size=40),  # what comes then
    st.integers(1, 30),  # the tokens of the reply
    st.none() | st.integers(0, 20),  # when it is stopped
    st.booleans(),  # whether the step is profiled afterwards
)


@mock.patch.multiple(checkpoints, EVERY=8, WORTH_A_STEP=12, WORTH_AN_EDIT=3)
@settings(max_examples=150 if THOROUGH else 40, deadline=None)
@given(st.lists(TURN, max_size=12), st.integers(1, 9))
def test_a_conversation_goes_on_anywhere_as_a_new_one_would(model, turns, slots):
    runner, eos, text = with_states(model, slots), model.tokenizer.eos_ids, [5]
    for kept, new, n, stop_after, is_profiled in turns:
        keep = len(text) + kept if isinstance(kept, int) else int(kept * len(text))
        prompt = [*text[: max(0, keep)], *new]
        said, cached = answer(model, prompt, n, stop_after, ignore_eos=False)
        wanted = reply(prompt, n, eos)
        assert said == (wanted if stop_after is None else wanted[: len(said)])
        assert cached < len(prompt) and len(runner.saved) <= slots
        text = prompt + said
        if is_profiled:
            with model.scheduler.room_after_last(1, model.context_length) as position:
                runner.replay("decode", position)


@thorough
def test_a_long_conversation_is_not_computed_again(model):
    """Regenerating, editing the last message, going on with a stopped reply."""
    runner, [eos] = with_states(model), list(model.tokenizer.eos_ids)[:1]
    draw = lambda n, seed: [(i * i + seed) % 97 + 100 for i in range(n)]
    text, n = [], 300
    for turn in range(12):
        start = len(text)
        text += [*draw(40 + 30 * turn, turn), eos, 10, 11]
        prompt = list(text)
        said, cached = answer(model, prompt, n if turn < 11 else 1500)
        assert cached >= start - 3  # all that was run: not a reply's last token and what follows it
        text += [*said, *([] if said[-1] == eos else [eos]), 12]
    del runner.prefilled[:]
    for _ in range(2):
        answer(model, prompt, n)
    assert not runner.prefilled  # from the end of the last turn, also after a long reply
    edited = [*prompt[: start + 5], *draw(30, 50), eos, 10, 11]
    answer(model, edited, n)
    assert sum(runner.prefilled) < len(edited) - (start - 3)
    stopped = answer(model, edited, n, stop_after=150)[0]
    del runner.prefilled[:]
    answer(model, [*edited, *stopped], n)
    assert sum(runner.prefilled) <= EVERY


def test_a_dropped_thought_costs_no_more_than_the_reply_after_it(model):
    """Most templates leave the thinking out of earlier turns."""
    runner, [eos] = with_states(model), list(model.tokenizer.eos_ids)[:1]
    document = [i % 99 + 100 for i in range(5000)]
    prompt = [*document, eos, 10, 11, 12]
    said, _ = answer(model, prompt, 400)
    del runner.prefilled[:]
    answer(model, [*document, eos, 10, 11, *said[200:], eos, *[7] * 20, eos, 10, 11, 12])
    assert sum(runner.prefilled) < 2 + 200 + 30


def test_the_last_message_of_a_conversation_that_is_opened_can_be_edited_at_once(model):
    runner, [eos] = with_states(model), list(model.tokenizer.eos_ids)[:1]
    turns = [[*[100 + n % 97] * n, eos] for n in (100, 60, 300, 777, 40, 500)]
    before = [token for turn in turns for token in turn]
    answer(model, [*before, *[7] * 50, eos, 10, 11])
    del runner.prefilled[:]
    answer(model, [*before, *[8] * 50, eos, 10, 11])
    assert sum(runner.prefilled) == 50 + 2
