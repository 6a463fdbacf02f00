"""Layers with a sliding window in a whole model: cutting a conversation back, and what a token reads."""

import numpy as np
import pytest

from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Profile, Sampling, TokenIds
from engine.runtime.kv_blocks import REWIND
from tests import generated_model

LONG = REWIND + 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = generated_model.write(
        tmp_path_factory.mktemp("model") / "m.gguf", architecture="gemma3", layers=2, dim=64
    )
    return TextModel(EngineOptions(model_path=str(path), context_length=2048), lambda _: None)


def answer(model, ids, fresh=False):
    tokens = []
    request = Generate(
        request_id=1, prompt=TokenIds(ids=tuple(ids)), sampling=Sampling(temperature=0), max_tokens=4,
        ignore_eos=True, fresh=fresh, logprobs=1,
    )  # fmt: skip
    end = model.generate(request, tokens.append, lambda: False)
    return [(t.id, t.logprob) for t in tokens if hasattr(t, "logprob")], end.cached_n


@pytest.mark.parametrize(("shared", "reused"), [(LONG - 200, LONG - 200), (100, 0)])
def test_a_conversation_that_is_cut_back_is_answered_as_a_new_one(model, shared, reused):
    """What is shared is reused as long as the window before it is there; else the prompt is read again."""
    draw = np.random.default_rng(0)
    first = draw.integers(0, 200, LONG).tolist()
    other = [*first[:shared], *draw.integers(0, 200, 50).tolist()]
    answer(model, first, fresh=True)
    again, cached = answer(model, other)
    assert cached >= reused and cached in (0, shared)
    wanted, _ = answer(model, other, fresh=True)
    assert [id for id, _ in again] == [id for id, _ in wanted]
    np.testing.assert_allclose([p for _, p in again], [p for _, p in wanted], atol=2e-3)


def test_attention_reads_no_more_than_its_window(model):
    ready = model.ready
    assert ready.window and ready.window_kv_bytes_per_token
    answer(model, range(LONG % 200, 200), fresh=True)
    answer(model, np.random.default_rng(1).integers(0, 200, LONG).tolist(), fresh=True)
    profile = model.profile(Profile(request_id=1, step="decode"), lambda: False)
    moved = sum(kernel.bytes for kernel in profile.kernels if kernel.role == "attention")
    caches = ready.bytes_per_token(profile.position + 1) - ready.weight_bytes_per_token
    assert caches <= moved < 2 * caches
