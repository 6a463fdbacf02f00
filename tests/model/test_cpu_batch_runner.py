"""Several conversations on a CPU: each gets what the float32 reference, and what the runner of one, says."""

import numpy as np
import pytest

from engine.events import EngineOptions, Generate, Profile, Sampling, Token, TokenIds
from engine.formats.kv_format import KVFormat
from engine.model.cpu_batch_runner import CPUBatchRunner
from engine.model.generate import TextModel
from engine.model.kv_blocks import KVBlocks
from engine.model.model_runner import BatchRunner, Row
from tests import generated_model
from tests.model.lower.layers import opened
from tests.reference import Reference, divergence
from tests.thorough import thorough


@pytest.fixture(autouse=True)
def short_vectors(monkeypatch):
    """Kernels of half the size: less to compile."""
    monkeypatch.setattr("engine.model.cpu_runner.register_lanes", lambda: 8)
    monkeypatch.setattr("engine.model.cpu_batch_runner.register_lanes", lambda: 8)


@pytest.mark.parametrize(
    ("architecture", "kv", "error"),  # windows; experts, sinks and windows
    [
        pytest.param("gemma3", "f16", 1e-5, marks=thorough),
        ("gpt-oss", "f16", 1e-5),
        ("gemma3", "q8_0", 5e-4),
        ("gemma4", "f16", 1e-5),
    ],
)
def test_rows_of_different_depths_agree_with_float32(architecture, kv, error, tmp_path):
    heads = {"heads": 2, "kv_heads": 1} if kv == "q8_0" else {}  # blocks need 32 elements
    path = generated_model.write(
        tmp_path / "m.gguf", layers=3, architecture=architecture, quant="F32", **heads
    )
    runner = CPUBatchRunner(opened(path), 128, parallel=5, kv=KVFormat(kv))
    assert isinstance(runner, BatchRunner)
    blocks = KVBlocks(runner)
    draw = np.random.default_rng(3)
    texts = [draw.integers(0, 200, n).tolist() for n in (40, 3, 75, 100, 1)]
    texts[3][:70] = texts[2][:70]
    reference = Reference(path)
    for sequence, text in enumerate(texts):
        done = blocks.match(sequence, text[:-1])
        assert done == (64 if sequence == 3 else 0)
        while done < len(text) - 1:
            chunk = text[done : done + 48][: len(text) - 1 - done]
            blocks.reserve(sequence, len(chunk))
            runner.prefill(chunk, done, sequence)
            blocks.commit(sequence, chunk)
            done += len(chunk)
    answers: list[list[tuple[int, np.ndarray]]] = [[] for _ in texts]
    for count in (5, 3, 1, 2, 4):
        sequences = draw.permutation(5)[:count].tolist()
        for sequence in sequences:
            blocks.reserve(sequence, 1)
        rows = [Row(texts[s][-1], len(texts[s]) - 1, s) for s in sequences]
        best = runner.decode_rows(rows)
        for sequence, row, token, logits in zip(sequences, rows, best, runner.row_logits(), strict=True):
            assert token == logits.argmax()
            answers[sequence].append((len(texts[sequence]) - 1, logits.copy()))
            blocks.commit(sequence, [row.token])
            texts[sequence].append(int(token))
    for text, found in zip(texts, answers, strict=True):
        wanted = reference.logits(text)
        assert found and all(divergence(wanted[at], logits) < error for at, logits in found)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen35"])
def test_a_model_answers_side_by_side_as_alone(architecture, tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", layers=2, architecture=architecture)
    options = EngineOptions(model_path=str(path), context_length=256)
    alone = TextModel(options, lambda _: None)
    together = TextModel(EngineOptions(model_path=str(path), context_length=256, parallel=4), lambda _: None)
    assert (alone.ready.parallel, together.ready.parallel) == (1, 4)
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 200, 70).tolist()
    replies = {}
    for id in range(6):
        prompt = TokenIds(ids=(*(shared if id % 2 else ()), *draw.integers(0, 200, 5 + 11 * id).tolist()))
        request = Generate(
            request_id=id, prompt=prompt, sampling=Sampling(temperature=0), max_tokens=12, ignore_eos=True, logprobs=1
        )  # fmt: skip
        events = []
        alone.generate(request, events.append, lambda: False)
        replies[id] = [(e.id, e.logprob) for e in events if isinstance(e, Token)], []
        answer = together.begin(request, replies[id][1].append)
        together.scheduler.add(answer, lambda: False, lambda end: None)
    while together.scheduler.busy:
        together.scheduler.step()
    for wanted, events in replies.values():
        found = [(e.id, e.logprob) for e in events if isinstance(e, Token)]
        assert [id for id, _ in found] == [id for id, _ in wanted]
        np.testing.assert_allclose([p for _, p in found], [p for _, p in wanted], atol=2e-3)
    for step in ("decode", "prefill"):
        profile = together.profile(Profile(request_id=1, step=step), lambda: False)
        assert {"attention", "QKV projection"} <= {kernel.role for kernel in profile.kernels}
