"""Whole steps of a small model: decode steps that run, and a prefill step that is only looked at."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from engine.loading import weights
from engine.measure import profile
from engine.measure.kernel_roles import roles_of
from engine.protocol.events import Sampling, Search
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Drawing, SearchRequest, Slot, same_rows
from engine.targets import nvidia as fused
from engine.targets.nvidia import schedule_search
from engine.targets.nvidia.kernels.attention.prompt_tiling import prompt_tiling
from engine.targets.nvidia.kernels.device import multiprocessors
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.pieces import state_size
from engine.targets.nvidia.kernels.products.small_batch import columns_size
from engine.targets.nvidia.kernels.sampling.sampling import NOT_FINITE
from engine.targets.nvidia.memory import CHUNK_SIZES
from engine.targets.nvidia.runner import NvidiaRunner
from engine.targets.nvidia.weights import GPUModel
from tests import generated_families, generated_model
from tests.opened import opened
from tests.reference import Reference, divergence


def check_decode_steps() -> None:
    """Whole decode steps with experts, one of them launched ahead of being asked for and then not wanted, one that
    draws, and two with an embedding that is no number. The choices of all are counted. Large matrices were repacked in
    pieces."""
    shape = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
    tokens, used = [3, 77], generated_families.EXPERTS["expert_used_count"]
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(
            Path(folder) / "model.gguf", architecture="qwen3moe", quant="F32", tied=False, **shape
        )
        generated_model.damage(path, "token_embd.weight", row=5)
        wanted = Reference(path).logits(tokens)
    with mock.patch.object(weights, "PIECE_BYTES", 1):
        runner = NvidiaRunner(opened(path), 32)
        alternating = {m.spec.alternating: len(m.pieces) for m in runner._model.matrices if len(m.pieces) > 1}
        assert alternating.keys() == {False, True}
    KVBlocks(runner).reserve(0, 3)
    runner.run([Slot(0, (tokens[0],), 0)], ahead=same_rows)
    assert runner.sampler.prepare(0, Drawing(Sampling(top_k=1), tokens, np.zeros(1)))
    assert runner.run([Slot(0, (tokens[1],), 1, draw=True)]) == wanted[1].argmax()
    assert divergence(wanted[1], runner.logits()[0]) < 1e-6
    (choices,) = runner.expert_choices()
    assert choices.sum() == 3 * used and choices.max() <= 3
    broken = Slot(0, (5,), 2)
    assert runner.run([broken]) == runner.run([broken._replace(draw=True)]) == NOT_FINITE
    assert "the output of the embedding is not finite" in str(runner.not_finite(broken))


def check_search() -> None:
    """A search for schedules leaves steps that compute the same. It times steps of four of six layers, and does not
    search for the embedding. One that is interrupted changes nothing."""
    shape = {"layers": 6, "dim": 64, "heads": 2, "kv_heads": 1, "ffn": 128}
    tokens, told = [3, 77], list[Search]()
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(
            Path(folder) / "model.gguf", quant="Q8_0", tied=False, types={"output.weight": "Q4_0"}, **shape
        )
        weights, wanted = opened(path), Reference(path).logits(tokens)
    runner = NvidiaRunner(weights, 32)
    target = runner.search_target()
    short, whole = len(target.short_step()), len(target.build_step())
    assert (whole - short) * 3 == whole - 3  # beside the layers: embedding, head, next token
    with mock.patch.object(schedule_search, "_CANDIDATES_PER_WIDTH", 1):
        report = lambda done, total, cached, search: told.append(search)
        request = SearchRequest(1, 60.0, report, again=True)  # the results of an earlier run are on the disk
        KVBlocks(runner).reserve(0, runner.search_tokens)
        assert not runner.search(replace(request, interrupted=lambda: bool(told)))
        assert len(told) == 1 and not told.pop().tried
        runner.search(request)
    assert len({search.what for search in told}) == 5 and not any(search.refused for search in told), told
    KVBlocks(runner).reserve(0, 2)
    for position, token in enumerate(tokens):
        runner.run([Slot(0, (token,), position)])
    assert divergence(wanted[1], runner.logits()[0]) < 1e-6


def only_looked_at(path: Path) -> NvidiaRunner:
    """A runner with a context of 32 tokens that compiles and loads nothing."""
    with (
        mock.patch.object(fused.runner, "begin_once"),
        mock.patch.object(GPUModel, "begin_fill"),
        mock.patch.object(NvidiaRunner, "_capture_while"),
    ):
        return NvidiaRunner(opened(path), 32)


def roles_and_bytes(
    runner: NvidiaRunner, sequence: KernelSequence, tokens: int, position: int
) -> dict[str, tuple[str, int]]:
    """The role of each kernel of a step, and the bytes that it must move, by the first words of its name."""
    replay = profile.Replay(sequence.compile().src, runner._uses(), tokens, run=lambda: None)
    told = {}
    for call, role in zip(replay.calls, roles_of(replay.calls, replay.uses), strict=True):
        name = profile._name(call).removeprefix("prefill_").removeprefix("few_").split("_")
        told["_".join(name[:2])] = role, profile._bytes(replay, call, role, position)
    return told


def check_profile_of_experts() -> None:
    """A token reads the experts that it chooses; those of a prompt are all."""
    dim, padded = 256, 64
    shape = {"layers": 2, "dim": dim, "heads": 4, "kv_heads": 2}
    count, used, width = generated_families.EXPERTS.values()
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(
            Path(folder) / "model.gguf", architecture="qwen3moe", quant="F16", **shape
        )
        runner = only_looked_at(path)
    decode = runner._steps.kernels(1, 256)
    for sequence, tokens, read in ((decode, 1, used), (runner._prefill.step(padded), padded, count)):
        told = roles_and_bytes(runner, sequence, tokens, 0)
        assert {
            role
            for name, (role, _) in told.items()
            if name.split("_")[0] in ("router", "choose", "count", "sort")
        } == {"router"}
        for name, matrices in (("experts_gate", 2), ("experts_down", 1)):
            role, n_bytes = told[name]
            assert role == ("experts gate+up" if matrices == 2 else "experts down")
            excess = n_bytes - read * matrices * dim * width * 2
            assert 0 <= excess < 2 * used * tokens * dim * 4, (name, excess)  # what goes in and out


def check_profile_of_a_prompt() -> None:
    """What the kernels of a prompt are for and must move, of 8 tokens after 24."""
    heads, tokens, position, padded = 2, 8, 24, 64
    shape = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": heads, "ffn": 64}
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(Path(folder) / "model.gguf", architecture="qwen3", quant="F16", **shape)
        runner = only_looked_at(path)
    attention = runner._model.spec.attention[0]
    steps = roles_and_bytes(runner, runner._prefill.step(padded), tokens, position)
    told = {name.split("_")[0]: values for name, values in steps.items()}
    h = runner._model.attention[0].heads
    tiling = prompt_tiling(h, padded, multiprocessors())
    assert {name: role for name, (role, _) in told.items()} == {
        "embed": "embedding",
        "norm": "norm",
        "qkv0": "QKV projection",
        "rotate": "attention",
        "attend": "attention",
        **({"combine": "attention"} if tiling.splits > 1 else {}),
        "o": "attention output",
        "gate": "FFN gate+up",
        "down": "FFN down",
    }
    row = heads * attention.head_dim * 2  # bytes of a token's keys, or values
    queries = padded * attention.query_size * 2
    came = columns_size(padded, attention.query_size) * 2
    result = tiling.sums_size(h, padded) * 4 if tiling.splits > 1 else came
    small = 4 * (state_size(CHUNK_SIZES[-1]) + h.table_size)  # the state; its blocks
    assert told["attend"][1] == queries + result + 2 * row * (position + tokens) + small, told
