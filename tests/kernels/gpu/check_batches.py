"""Steps of several sequences: each row's results are those of its sequence alone."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.measure.kernel_roles import roles_of
from engine.protocol.events import Sampling
from engine.runtime.kv_blocks import BLOCK, KVBlocks
from engine.runtime.model_runner import Drawing, Slot, same_rows
from engine.runtime.sampling import Sampler, log_probabilities
from engine.targets.nvidia.runner import NvidiaRunner
from tests import generated_model
from tests.kernels.gpu.buffers import short_lists
from tests.opened import opened
from tests.reference import Reference, divergence

CONTEXT, CHUNK = 128, 32  # as in check_mixed: the kernels of attention are the same
SMALL = {"dim": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "layers": 1}


def check_rows() -> None:
    hold(binds=True, architecture="qwen3", **SMALL)


def check_rows_of_layers_that_run_several_times() -> None:
    hold(architecture="nanbeige", **SMALL)


def check_rows_with_windows_and_norms_after() -> None:
    keys = {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2}
    hold(architecture="gemma3", keys=keys, **SMALL | {"layers": 2})


def check_rows_with_experts_sinks_and_biases() -> None:
    keys = {"attention.sliding_window": 4}
    hold(architecture="gpt-oss", keys=keys, **SMALL | {"layers": 2, "dim": 160})


def check_rows_with_delta_nets_and_gated_attention() -> None:
    # With 0 a number drawn lies between two tokens.
    hold(architecture="qwen35", seed=1, **SMALL | {"layers": 2})


def check_rows_with_embeddings_and_shared_caches() -> None:
    hold(architecture="gemma4", **SMALL | {"layers": 4})


def check_rows_side_by_side() -> None:
    hold(architecture="gemma4-moe", **SMALL | {"dim": 192, "heads": 4, "kv_heads": 2, "layers": 2})


def check_rows_with_experts_of_the_best_groups() -> None:
    hold(architecture="bailingmoe2", **SMALL | {"layers": 2, "dim": 160})


def check_rows_with_latent_attention() -> None:
    hold(architecture="deepseek2", seed=2, **SMALL | {"layers": 2, "dim": 160})


def hold(binds: bool = False, **shape: Any) -> None:
    """Two sequences in turns, and a third that begins like one of them; raises AssertionError where logits differ from
    those of each alone. `binds`: some tokens have masks."""
    with tempfile.TemporaryDirectory() as folder, short_lists():
        path = generated_model.write(Path(folder) / "model.gguf", **{"quant": "Q8_0"} | shape)
        reference = Reference(path, CONTEXT)
        runner = NvidiaRunner(opened(path), CONTEXT, 3)
    draw = np.random.default_rng(0)
    texts = [list(map(int, draw.integers(0, 100, n))) for n in (BLOCK + 3, 5, 0)]
    blocks, vocab = KVBlocks(runner), runner._model.spec.vocab
    all_tokens = np.full(vocab // 32 + 1, 0xFFFFFFFF, np.uint32)

    def prefill(sequence: int, tokens: list[int]) -> None:
        pieces = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]  # at most CHUNK tokens each
        for piece in pieces if len(tokens) > CHUNK else [tokens]:
            blocks.reserve(sequence, len(piece))
            runner.run([Slot(sequence, tuple(piece), blocks.length(sequence), "none")])
            blocks.commit(sequence, piece)

    samplers: dict[int, Sampler] = {}
    bound: set[int] = set()

    def sample(s: int, binds: bool = False) -> None:
        """From now on tokens of a sequence are drawn; if it `binds`, with masks, and log-probabilities are told."""
        sampling = Sampling(seed=s, temperature=2, repeat_penalty=1.1, min_p=0)
        samplers[s] = sampler = Sampler(sampling)
        drawing = Drawing(sampling, texts[s], sampler.uniforms(9), top=3 * binds, masks=binds)
        assert runner.sampler.prepare(s, drawing)
        bound.update([s] * binds)

    def decode(*sequences: int, ahead: bool = False) -> None:
        rows = []
        for s in sequences:
            blocks.reserve(s, 2)
            rows.append(Slot(s, (texts[s][-1],), len(texts[s]) - 1, draw=s in samplers))
        masks = {s: draw.integers(0, 1 << 32, vocab // 32 + 1, np.uint32) for s in bound & {*sequences}}
        for s, mask in masks.items():
            runner.sampler.allow(s, mask)
        best = runner.run(rows, same_rows if ahead else None)
        logits = None if ahead else runner.logits()
        for i, s in enumerate(sequences):
            blocks.commit(s, texts[s][-1:])
            wanted = reference.logits(texts[s])[-1]
            if s in samplers:
                may = np.unpackbits(masks.get(s, all_tokens).view(np.uint8), bitorder="little")[:vocab] != 0
                masked = np.where(may, wanted, np.float32(-np.inf))
                assert best[i] == samplers[s].sample(masked, texts[s])
            else:
                if logits is not None:
                    assert divergence(wanted, logits[i]) < 2e-5, (s, divergence(wanted, logits[i]))
                assert best[i] == wanted.argmax()
            if s in masks:
                told = runner.sampler.log_probabilities(s, len(texts[s]) - 1, 3)
                of_host = log_probabilities(wanted, int(best[i]), 3)
                assert [t.id for t in told[1]] == [t.id for t in of_host[1]]
                assert np.allclose(
                    [told[0], told[1][2].logprob], [of_host[0], of_host[1][2].logprob], atol=3e-3
                )
            texts[s].append(int(best[i]))

    for s in (0, 1):
        prefill(s, texts[s][:-1])
    decode(0)
    decode(1, 0)
    if runner.state_slots:
        runner.save_state(1, 0)
    stored = texts[0][:-1]
    blocks.drop(0)
    for s in (0, 2):  # the text is known, so both have it at once
        assert blocks.match(s, stored) == len(stored)
        if runner.state_slots:
            runner.load_state(1, s)
            assert runner.state_position(s) == len(stored)
    texts[2] = [*texts[0][:-1], 7]
    decode(2, 0, 1)
    decode(0, 2)
    decode(0, 2, ahead=True)  # what the device has already
    decode(0, 2, ahead=True)
    decode(2)  # of a step that ran ahead
    decode(2, ahead=True)
    decode(2, ahead=True)
    decode(0, 2)  # what ran ahead is not needed
    decode(1, ahead=True)
    blocks.drop(1)
    texts[1] = [*texts[0][:1] * (len(texts[1]) - 1), texts[1][-1]]  # looks the same, but is another one
    prefill(1, texts[1][:-1])
    decode(1)
    sample(1)
    decode(1, ahead=True)
    decode(1)
    sample(0)
    decode(2, 1, 0, ahead=True)
    decode(2, 1, 0, ahead=True)
    decode(0, 2)
    only = runner.logits([1])
    assert divergence(reference.logits(texts[2][:-1])[-1], only[0]) < 2e-5 and len(only) == 1
    if binds:
        sample(1, binds=True)
        decode(2, 1, 0, ahead=True)
        decode(2, 1, 0, ahead=True)
        decode(1, 0, ahead=True)  # of a step that lacked its choice
        decode(1, ahead=True)
        decode(1, ahead=True)
        blocks.drop(1)  # so what ran ahead is not needed
        decode(0, 2)
    for step, kernels in (
        ("decode", {"QKV projection", "output head", "sampling"}),
        ("prefill", {"QKV projection", "norm"}),
    ):
        replay = runner.replay(step, CONTEXT - CHUNK)
        assert kernels | {"embedding", "attention"} <= set(roles_of(replay.calls, replay.uses))
