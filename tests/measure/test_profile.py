"""A step kernel by kernel: roles come from the buffers, bytes from the model, and no answer is changed."""

import itertools
from types import SimpleNamespace

import pytest

from engine.errors import PreemptedError
from engine.measure import profile as measure
from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Profile, Sampling, TokenIds
from engine.targets.graph.runner import _kernels
from tests import generated_model
from tests.thorough import rarely

LAYERS, DIM, FFN, HEAD_DIM, CONTEXT = 2, 64, 128, 16, 64
MATRICES = {
    "QKV projection": LAYERS * DIM * (DIM + 2 * DIM // 2),
    "attention output": LAYERS * DIM * DIM,
    "FFN gate+up": LAYERS * 2 * DIM * FFN,
    "FFN down": LAYERS * DIM * FFN,
}


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(measure, "MAX_ROUNDS", measure.MIN_ROUNDS)


@pytest.fixture(scope="module", params=[rarely(True), rarely(False)], ids=["tied", "untied"])
def model(request, tmp_path_factory, plain_graphs):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    generated_model.write(path, architecture="qwen3", layers=LAYERS, dim=DIM, ffn=FFN, tied=request.param)
    return TextModel(
        EngineOptions(model_path=str(path), context_length=CONTEXT, kernels="graph"), lambda _: None
    )


def answer(model, n_prompt=8):
    tokens = []
    request = Generate(
        request_id=1, prompt=TokenIds(ids=tuple(range(30, 30 + n_prompt))),
        sampling=Sampling(temperature=0), max_tokens=6, ignore_eos=True,
    )  # fmt: skip
    end = model.generate(request, tokens.append, lambda: False)
    return [token.id for token in tokens if hasattr(token, "id")], end.cached_n


def made(model, step="decode"):
    return model.profile(Profile(request_id=3, step=step), lambda: False)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_every_kernel_has_its_role_and_every_role_its_bytes(model, step):
    profile = made(model, step)
    bytes_of, calls_of = {}, {}
    for kernel in profile.kernels:
        bytes_of[kernel.role] = bytes_of.get(kernel.role, 0) + kernel.bytes
        calls_of[kernel.role] = calls_of.get(kernel.role, 0) + kernel.calls
        assert kernel.total_us > 0 and kernel.source and "\x1b" not in kernel.name
    for role, weights in MATRICES.items():
        least = weights * 34 // 32  # Q8_0: 34 bytes for 32 weights
        activations = 8 * LAYERS * profile.tokens * 4 * (DIM + FFN)
        assert least <= bytes_of[role] <= 1.2 * least + activations, role
    # of the last layer, a prompt needs only keys and values
    assert calls_of["QKV projection"] == 3 * LAYERS - (step == "prefill")
    assert calls_of["attention"] >= 3 * LAYERS
    assert ("output head" in bytes_of) == ("sampling" in bytes_of) == (step == "decode")
    assert bytes_of["embedding"] < 20_000 * profile.tokens
    assert profile.tokens == (1 if step == "decode" else model._runner.max_chunk)
    assert profile.rounds == measure.MIN_ROUNDS


def test_attention_reads_more_as_the_context_grows(model):
    def read():
        return sum(kernel.bytes for kernel in made(model).kernels if kernel.role == "attention")

    answer(model, 4)
    before = read()
    answer(model, 50)
    assert read() > 3 * before


def test_it_costs_no_answer_its_cache(model):
    before, _ = answer(model)
    made(model), made(model, "prefill")
    after, cached = answer(model)
    assert (after, cached) == (before, 7)


class Clock:
    """A clock that is a second later each time it is looked at."""

    def __init__(self):
        self._now = itertools.count()

    def perf_counter(self):
        return float(next(self._now))


def test_kernels_and_steps_are_counted_in_microseconds(model, monkeypatch):
    monkeypatch.setattr(measure, "_call_us", lambda replay, call: 7.0)
    monkeypatch.setattr(measure, "time", Clock())
    profile = made(model)
    assert [kernel.total_us for kernel in profile.kernels] == [
        7.0 * kernel.calls for kernel in profile.kernels
    ]
    assert profile.wall_us == 1e6


@pytest.mark.parametrize(("by_device", "wanted_us"), [([None, 0.25], 0.25e6), ([None], 1e6)])
def test_a_kernel_is_timed_by_its_device_or_by_the_clock(model, monkeypatch, by_device, wanted_us):
    replay = model._runner.replay("decode", 4)
    monkeypatch.setattr(measure, "time", Clock())
    monkeypatch.setattr(measure, "pm_exec", SimpleNamespace(rewrite=lambda call, context: by_device))
    assert measure._call_us(replay, replay.calls[0]) == wanted_us


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 3), (8.0, 10), (100.0, 25)])
def test_as_many_rounds_as_there_is_time_for(monkeypatch, seconds, rounds):
    monkeypatch.setattr(measure, "time", Clock())
    monkeypatch.setattr(measure, "MAX_ROUNDS", 25)
    resets = []
    results = measure._rounds(lambda: len(resets), lambda: resets.append(1), seconds)
    assert results == list(range(2, rounds + 2))  # the first one warms up


def test_kernels_that_are_alike_are_timed_in_a_graph_of_their_own(model, monkeypatch):
    replay, timed = model._runner.replay("decode", 4), []

    def call_us(replay, call):
        timed.append(len(_kernels(call)))
        return 5.0 * timed[-1]

    monkeypatch.setattr(measure, "_call_us", call_us)
    members = range(10)
    assert measure._graph_us(replay, members, 0.0, lambda: False) == 5.0 * len(members)
    repeats, rounds = 4, measure.MIN_ROUNDS + 1  # 40 kernels are the first 32 or more
    assert sum(timed) == repeats * len(members) * rounds
    with pytest.raises(PreemptedError):
        measure._graph_us(replay, members, 0.0, lambda: True)


def test_it_gives_way(model):
    asked = []
    with pytest.raises(PreemptedError):
        model.profile(Profile(request_id=1), lambda: not asked.append(1))
    assert len(asked) == 1


def test_ready_says_what_a_token_must_read(model, request):
    is_tied = request.node.callspec.params["model"]
    head = model._runner._transformer.spec.vocab * DIM
    embedding = 0 if is_tied else DIM  # a row
    norms = LAYERS * (2 * DIM + 2 * HEAD_DIM) + DIM
    quantized = head + embedding + sum(MATRICES.values())
    assert model.ready.weight_bytes_per_token == quantized * 34 // 32 + 4 * norms
    assert model.ready.kv_bytes_per_token == 2 * 2 * LAYERS * DIM // 2


def test_kernels_of_a_cpu_move_what_they_work_on_and_little_else(tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", architecture="qwen3", dim=DIM, ffn=FFN)
    # The kernels are those of tests/model/test_text_model.py.
    model = TextModel(EngineOptions(model_path=str(path), context_length=128), lambda _: None)
    answer(model, 20)
    profile = made(model)
    read = {role: weights * 34 // 32 for role, weights in MATRICES.items()}
    read["attention"] = model.ready.kv_bytes_per_token * (profile.position + 1)
    for role, least in read.items():
        kernels = [kernel for kernel in profile.kernels if kernel.role == role]
        activations = 8 * (DIM + FFN) * sum(kernel.calls for kernel in kernels)
        assert 0 <= sum(kernel.bytes for kernel in kernels) - least <= activations, role
