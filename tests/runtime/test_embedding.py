"""Embeddings beside replies, over a runner without a model."""

import numpy as np
import pytest

from engine.errors import ContextFullError, UsageError
from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.protocol.events import Embedded, Generate, Sampling, TokenIds
from engine.runtime.answer import Answers
from engine.runtime.embedding import Embeddings, Pooler, Step
from engine.runtime.kv_blocks import KVGroup
from engine.runtime.scheduler import Scheduler
from tests import generated_model
from tests.runtime.fake_batch_runner import VOCAB, FakeBatchRunner, FakeStateRunner, greedy_reply, next_logits

NORM = np.linspace(0.5, 1.5, VOCAB).astype(np.float32)


@pytest.fixture(scope="module")
def makers(tmp_path_factory):
    encoder = PromptEncoder(GGUF(generated_model.write(tmp_path_factory.mktemp("m") / "m.gguf", layers=1)))
    classes = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    return Answers(encoder, 600), Embeddings(encoder, 600, Pooler(NORM, 0.0, [Step(classes)])), classes


def expected(tokens, pooling, classes):
    first, last = (0, len(tokens)) if pooling == "mean" else (0, 1) if pooling == "cls" else (-1, None)
    ends = range(1, len(tokens) + 1)[first:last]
    rows = np.array([next_logits(tokens[:end]) for end in ends])
    hidden = (rows / np.sqrt((rows * rows).mean(-1, keepdims=True)) * NORM).mean(0)
    if pooling == "rank":
        powers = np.exp(classes @ hidden)
        return powers / powers.sum()
    return hidden


@pytest.mark.parametrize("kind", [FakeBatchRunner, FakeStateRunner])
def test_each_gets_its_own_beside_replies(kind, makers):
    """Some are paused, since the cache is hardly larger than one needs."""
    answers, embeddings, classes = makers
    runner = kind(3, (KVGroup(None, 7), KVGroup(40, 64)))
    scheduler = Scheduler(runner, lambda _: None)
    draw = np.random.default_rng(1)
    events, ends, asked = {}, {}, []
    for id, pooling in enumerate(["mean", None, "last", "cls", "rank", None, "mean", "mean", "last"]):
        text = draw.integers(0, VOCAB, int(draw.integers(40, 120))).tolist()
        asked.append((text, pooling))
        request = Generate(
            request_id=id, prompt=TokenIds(ids=tuple(text)), pooling=pooling, sampling=Sampling(temperature=0),
            max_tokens=9, ignore_eos=True,
        )  # fmt: skip
        begun = (embeddings if pooling else answers).begin(request, events.setdefault(id, []).append)
        scheduler.add(begun, lambda: False, lambda end, id=id: ends.setdefault(id, end))
        scheduler.step()
    while scheduler.busy:
        scheduler.step()
    for id, (text, pooling) in enumerate(asked):
        end = ends[id]
        if pooling is None:
            assert [event.id for event in events[id] if hasattr(event, "text")] == greedy_reply(text, 9)
            continue
        [values] = [np.frombuffer(e.values, "<f4") for e in events[id] if isinstance(e, Embedded)]
        assert values == pytest.approx(expected(text, pooling, classes), abs=1e-4), pooling
        assert (end.reason, end.prompt_n, end.predicted_n) == ("stop", len(text), 0)


def test_what_is_in_the_cache_is_used_where_only_the_last_token_is_pooled(makers):
    _, embeddings, _ = makers
    scheduler, ends = Scheduler(FakeBatchRunner(2), lambda _: None), []
    for pooling in ("last", "last", "mean"):
        prompt = TokenIds(ids=tuple(range(80)))
        begun = embeddings.begin(Generate(request_id=0, prompt=prompt, pooling=pooling), lambda _: None)
        scheduler.add(begun, lambda: False, ends.append)
        while scheduler.busy:
            scheduler.step()
    assert [end.cached_n >= 32 for end in ends] == [False, True, False]


def test_a_last_norm_may_have_a_bias():
    stream, bias = np.ones((2, VOCAB), np.float32), np.arange(VOCAB, dtype=np.float32)
    without, with_bias = (Pooler(NORM, 0.0, bias=b).normed(stream) for b in (None, bias))
    np.testing.assert_allclose(with_bias - without, [bias] * 2, atol=1e-3)


def test_what_cannot_be_embedded(makers):
    embeddings = makers[1]
    long = Generate(request_id=0, prompt=TokenIds(ids=(1,) * 601), pooling="mean")
    with pytest.raises(ContextFullError, match="601 tokens and the context holds 600"):
        embeddings.begin(long, print)
    embeddings._pooler = Pooler(NORM, 0.0)
    with pytest.raises(UsageError, match="does not rank"):
        embeddings.begin(Generate(request_id=0, prompt=TokenIds(ids=(1,)), pooling="rank"), print)
