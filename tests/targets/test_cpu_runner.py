"""The CPU runner against the float32 reference: one sequence, and several side by side. `test_cpu.py` has every
architecture."""

import numpy as np
import pytest

from engine.formats.kv_format import KVFormat
from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Profile, Sampling, Token, TokenIds
from engine.runtime.kv_blocks import BLOCK, KVBlocks
from engine.runtime.model_runner import Slot
from engine.runtime.prefix_store import CHUNK
from engine.targets.cpu.kernels.delta_net import DeltaHeads
from engine.targets.cpu.kernels.memory import view
from engine.targets.cpu.kernels.rope import rotate
from engine.targets.cpu.kernels.thread_pool import default_pool
from engine.targets.cpu.model import CPUModel
from engine.targets.cpu.runner import CPURunner
from engine.targets.cpu.states import CPUStates
from engine.targets.cpu.step import step_kernels
from engine.targets.graph.runner import GraphRunner
from tests import generated_model
from tests.opened import opened
from tests.reference import Reference, divergence
from tests.targets.layers import CONTEXT, written
from tests.targets.lone_sequence import LoneSequence
from tests.thorough import rarely, thorough


@thorough  # rows of different depths below
@pytest.mark.parametrize(
    "name", ["llama F32 untied, rope factors", "phi3 Q8_0, 12 of 16 rotated", "gemma4 F32, rope factors"]
)
def test_prefill_and_decode_agree_with_float32(name, tmp_path):
    path = written(name, tmp_path)
    tokens = np.random.default_rng(1).integers(0, 256, 40).tolist()
    wanted = Reference(path, CONTEXT).logits(tokens)
    text = LoneSequence(CPURunner(opened(path), CONTEXT, parallel=2))  # as test_assistant.py has it
    text.prefill(tokens[:32], 0)  # tiles, and one that is filled up
    text.prefill(tokens[32:36], 32)
    for position in range(36, 40):
        best = text.decode(tokens[position], position)
        assert best == text.logits().argmax()
        assert divergence(wanted[position], text.logits()) < 1e-5


def test_a_prompt_runs_what_later_tokens_need(tmp_path):
    """No attention of the last layer that stores keys, and nothing of layers that only read the caches of others."""
    weights = opened(written("gemma4 F32, rope factors", tmp_path))
    stores = [sublayer.operator in weights.spec.caching for sublayer in weights.spec.sublayers]
    assert stores[-1 - stores[::-1].index(True) :].count(False) > 3
    model = CPUModel(weights, 64, default_pool(), 8, keep_packed=False)
    prefill, whole = (step_kernels(model, 8, whole=whole).kernels for whole in (False, True))
    assert prefill == whole[: len(prefill)] and prefill[-1][0] is rotate(
        model.layers[weights.spec.last_keeping].handler.heads, 8
    )


def test_prompts_of_a_mixture_have_steps_of_two_sizes(tmp_path):
    """Experts that have few tokens multiply them in small tiles, those that have many in whole ones."""
    path = generated_model.write(tmp_path / "model.gguf", layers=1, architecture="olmoe", quant="F32")
    tokens = np.random.default_rng(3).integers(0, 256, 41).tolist()
    wanted = Reference(path).logits(tokens)
    text = LoneSequence(CPURunner(opened(path), 64))
    few, most = text.runner._prefill
    assert few == 32 and most == text.runner.max_chunk
    for size in (20, 40):
        text.prefill(tokens[:size], 0)
        text.decode(tokens[size], size)
        assert divergence(wanted[size], text.logits()) < 1e-5


@thorough  # a commit is checked with conversations of this length in tests/runtime/test_prefixes.py
def test_long_context(tmp_path, monkeypatch):
    """A chunk and more, so that attention spans several, and decode at depth, with vectors as long as they can be."""
    monkeypatch.setattr("engine.targets.cpu.runner.register_lanes", lambda: 16)
    path = generated_model.write(tmp_path / "model.gguf", layers=2, architecture="qwen3", quant="F32")
    tokens = np.random.default_rng(2).integers(0, 256, 300).tolist()
    wanted = Reference(path).logits(tokens)
    text = LoneSequence(CPURunner(opened(path), 512))
    for start in range(0, 290, text.runner.max_chunk):
        text.prefill(tokens[start : min(start + text.runner.max_chunk, 290)], start)
    for position in range(290, 300):
        text.decode(tokens[position], position)
        assert divergence(wanted[position], text.logits()) < 1e-5


@thorough
def test_a_cache_of_integers_costs_little(tmp_path):
    """Our kernels and tensor graphs store the same integers, and read them alike."""
    path = generated_model.write(
        tmp_path / "m.gguf", layers=2, architecture="gemma3", quant="F32", heads=2, kv_heads=1
    )
    tokens = np.random.default_rng(1).integers(0, 200, 44).tolist()
    wanted = Reference(path).logits(tokens)
    texts = [LoneSequence(kind(opened(path), 64, kv=KVFormat.Q8_0)) for kind in (CPURunner, GraphRunner)]
    for text in texts:
        text.prefill(tokens[:32], 0)
        text.prefill(tokens[32:40], 32)
    for position in range(40, 44):
        ours, graphs = (text.decode(tokens[position], position) and text.logits() for text in texts)
        assert 1e-8 < divergence(wanted[position], ours) < 2e-4
        assert divergence(graphs, ours) < 1e-8


@pytest.mark.parametrize(
    ("architecture", "kv", "error"),  # windows; experts, sinks and windows
    [
        ("gemma3", "f16", 1e-5),
        rarely("gemma3", "q8_0", 5e-4),
        rarely("gpt-oss", "f16", 1e-5),
        rarely("gemma4", "f16", 1e-5),
    ],
)
def test_rows_of_different_depths_agree_with_float32(architecture, kv, error, tmp_path):
    """The pieces of a prompt join rows of others."""
    heads = {"heads": 2, "kv_heads": 1} if kv == "q8_0" else {}  # blocks need 32 elements
    keys = {"final_logit_softcapping": 3.0} if architecture == "gemma3" else {}
    path = generated_model.write(
        tmp_path / "m.gguf", layers=3, architecture=architecture, quant="F32", keys=keys, **heads
    )
    runner = CPURunner(opened(path), CONTEXT, parallel=5, kv=KVFormat(kv))
    blocks, draw = KVBlocks(runner), np.random.default_rng(3)
    texts = [draw.integers(0, 200, n).tolist() for n in (40, 3, 75, 100, 1)]
    texts[3][:70] = texts[2][:70]
    reference = Reference(path)
    answers: list[list[tuple[int, np.ndarray]]] = [[] for _ in texts]

    def piece(sequence: int, most: int) -> list[Slot]:
        """The next tokens of a prompt, without its last one."""
        prompt = texts[sequence][:-1]
        done = blocks.match(sequence, prompt)
        return [Slot(sequence, tuple(prompt[done : done + most]), done, "none")] if done < len(prompt) else []

    def run(slots: list[Slot]) -> None:
        for slot in slots:
            blocks.reserve(slot.sequence, len(slot.inputs))
        best, rows = runner.run(slots), [slot for slot in slots if slot.want == "last"]
        for slot in slots:
            blocks.commit(slot.sequence, list(slot.inputs))
        for slot, token, logits in zip(rows, best, runner.logits(), strict=True):
            assert token == logits.argmax()
            answers[slot.sequence].append((slot.position, logits.copy()))
            texts[slot.sequence].append(int(token))

    for sequence in range(3):
        while slots := piece(sequence, 48):
            run(slots)
    for count in (4, 3, 1, 2, 5, 4):
        ready = [s for s in draw.permutation(5).tolist() if blocks.length(s) == len(texts[s]) - 1]
        rows = [Slot(s, (texts[s][-1],), len(texts[s]) - 1) for s in ready[:count]]
        pieces = [] if 3 in ready else piece(3, 12)
        assert all(slot.position >= 64 for slot in pieces)
        run([*pieces, *rows])
    for text, found in zip(texts, answers, strict=True):
        wanted = reference.logits(text)
        assert found and all(divergence(wanted[at], logits) < error for at, logits in found)


@thorough  # rows below, and texts with guesses in tests/model
@pytest.mark.parametrize("architecture", ["llama", "gpt-oss", "qwen35", "rwkv7", "gemma3", "gemma4-moe"])
def test_guesses_are_checked_in_one_step(architecture, tmp_path):
    """Each row attends to the guesses before it, and those that were wrong are written over."""
    part = {"rotated": 8} if architecture == "qwen35" else {}  # as other tests have it: kernels in common
    path = generated_model.write(
        tmp_path / "m.gguf", layers=3, architecture=architecture, quant="F32", **part
    )
    runner = CPURunner(opened(path), CONTEXT)
    tokens = np.random.default_rng(4).integers(0, 200, 40).tolist()
    wanted, blocks = Reference(path).logits(tokens), KVBlocks(runner)
    assert runner.check_rows == ((4,) if runner.state_slots else (4, 8))
    for rows in runner.check_rows:
        runner.prepare_check(rows)
    blocks.reserve(0, 40)
    runner.run([Slot(0, tuple(tokens[:9]), 0, "none")])
    blocks.commit(0, tokens[:9])
    for right, wrong in ((3, 1), (8, 0), (1, 7), (1, 0), (1, 3), (4, 0), (3, 3), (2, 2)):
        done = blocks.length(0)
        if right + wrong > runner.check_rows[-1]:
            continue
        guesses = [*tokens[done : done + right], *[7] * wrong]
        runner.run([Slot(0, (token,), done + i) for i, token in enumerate(guesses)])
        for i in range(right):
            assert divergence(wanted[done + i], runner.logits([i])[0]) < 1e-5
        blocks.commit(0, tokens[done : done + right])
        if runner.state_slots:
            runner.cut_state(0, done + right)
            assert runner.state_position() == done + right


@thorough  # texts with guesses are those without: tests/runtime/test_drawn_guesses.py
@pytest.mark.parametrize(
    ("architecture", "quant"),
    [
        ("qwen3", "Q8_0"),
        *(rarely(kind, "Q8_0") for kind in ("gemma4", "gpt-oss", "qwen35moe")),
        *(rarely("llama", quant) for quant in ("Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "F16")),
    ],
)
def test_a_row_is_computed_as_it_is_alone(architecture, quant, tmp_path):
    """To the last bit. So greedy texts with guesses are those without."""
    shape = {"dim": 256} if quant.endswith(("_K", "_XS")) else {}
    path = generated_model.write(tmp_path / "m.gguf", architecture=architecture, quant=quant, **shape)
    runner = CPURunner(opened(path), CONTEXT)
    tokens = np.random.default_rng(5).integers(0, 500, 32).tolist()
    found = []
    for rows in 1, *runner.check_rows:
        runner.prepare_rows(rows)
        blocks, logits = KVBlocks(runner), []
        blocks.reserve(0, len(tokens))
        for first in range(0, len(tokens), rows):
            runner.run([Slot(0, (tokens[first + i],), first + i) for i in range(rows)])
            logits.append(runner.logits().copy())
            if runner.state_slots:
                runner.cut_state(0, first + rows)
        found.append(np.concatenate(logits))
    assert all(np.array_equal(logits, found[0]) for logits in found)


def test_sequences_take_turns_with_states_of_checks():
    """Also after one of them has ended without a step after its check."""
    states = CPUStates(3)
    [memory, _] = states.add(DeltaHeads(1, 1, 16, 4, 1e-6, 8))
    kept, slots = view(memory).reshape(3 + 4, -1), view(states.slots).reshape(-1, 2)
    for sequence, right in ((0, 4), (1, 1), (1, 2), (2, 3), (0, 1)):
        position = states.state_position(sequence)
        states.settle()
        states.begin(0, states.state_position((sequence + 1) % 3), 1, (sequence + 1) % 3)
        states.begin_check(1, position, 3, sequence)
        assert len({*slots[1:4].flat}) == 4 and slots[0, 0] == slots[0, 1]
        assert (slots[2:4, 0] == slots[1:3, 1]).all()
        kept[slots[1:4, 1], 0] = position + np.arange(1, 4)
        states.cut_state(sequence, position + min(right, 3))
        states.save_state(0, sequence)
        assert states.memory[0][states._slot_of[sequence], 0] == states.state_position(sequence)


@thorough  # tests/runtime/test_prefixes.py
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_blocks_leave_and_come_back_in_other_places(kv, tmp_path):
    """The window's blocks leave only as far as they are seen."""
    path = generated_model.write(
        tmp_path / "m.gguf", layers=3, architecture="gemma3", heads=2, kv_heads=1, context=2048
    )
    tokens = np.random.default_rng(2).integers(0, 200, CHUNK + 1).tolist()
    first, other = (LoneSequence(CPURunner(opened(path), 1024, kv=KVFormat(kv))) for _ in range(2))
    for start in range(0, CHUNK, 64):
        first.prefill(tokens[start : start + 64], start)
    wanted = first.decode(tokens[-1], CHUNK)
    tables = [table[: CHUNK // BLOCK] for table in first.blocks.tables(0)]
    [windowed] = [g for g, group in enumerate(first.runner.kv_groups) if group.window]
    tables[windowed] = [-1] * 15 + tables[windowed][15:]
    export = first.runner.export_blocks(tables).copy()
    other.blocks.reserve(0, BLOCK)  # the blocks of the other sequence are others
    other.blocks.commit(0, [0] * BLOCK)
    other.blocks.drop(0)
    other.blocks.reserve(0, CHUNK)
    tables = [table[: CHUNK // BLOCK] for table in other.blocks.tables(0)]
    tables[windowed] = [-1] * 15 + tables[windowed][15:]
    other.runner.import_blocks(tables, export)
    other.blocks.commit(0, tokens[:CHUNK])
    assert other.decode(tokens[-1], CHUNK) == wanted
    assert divergence(first.logits(), other.logits()) < (1e-10 if kv == "q8_0" else 1e-4)


@thorough  # a commit: rows above, states in test_states.py, the engine in tests/protocol/test_parallel.py
@pytest.mark.parametrize("architecture", ["qwen3", "qwen35", "rwkv7"])
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
        mixes = "delta net" if architecture == "rwkv7" else "attention"
        assert {mixes, "QKV projection"} <= {kernel.role for kernel in profile.kernels}
