"""Steps that have pieces of several prompts, and steps that have replies too: each sequence's logits are those of its
text alone."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.protocol.events import Sampling
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Drawing, Following, Slot
from engine.runtime.sampling import Sampler
from engine.targets.nvidia.runner import NvidiaRunner
from tests import generated_model
from tests.kernels.gpu.buffers import short_lists
from tests.opened import opened
from tests.reference import Reference, divergence

CONTEXT = 128
SMALL = {"dim": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "layers": 2}


def check_prompts_and_replies() -> None:
    hold((128,), architecture="qwen3", **SMALL)


def check_mixed_steps_of_all_sizes() -> None:
    hold(architecture="qwen3", **SMALL)


def check_mixed_layers_that_run_several_times() -> None:
    """Also rows of replies alone, after the last layer that stores."""
    hold((128,), architecture="nanbeige", **SMALL | {"layers": 1})


def check_mixed_windows_and_norms_after() -> None:
    keys = {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2}
    hold(architecture="gemma3", keys=keys, **SMALL)


def check_mixed_experts_sinks_and_biases() -> None:
    keys = {"attention.sliding_window": 4}
    hold(architecture="gpt-oss", keys=keys, **SMALL | {"dim": 160})


def check_mixed_delta_nets_and_gated_attention() -> None:
    hold(architecture="qwen35", seed=1, **SMALL | {"layers": 3})  # the last one is a delta net


def check_mixed_keys_that_neighbours_share() -> None:
    hold((128,), architecture="qwen3next", seed=3, **SMALL | {"dim": 160, "heads": 5})


def check_mixed_mamba() -> None:
    """The last layer is one. Blocks have a part of the columns of a head's state."""
    hold((128,), architecture="nemotron_h", keys={"ssm.state_size": 64}, seed=1, **SMALL | {"layers": 4})


def check_mixed_experts_without_gates() -> None:
    hold((128,), architecture="nemotron_h_moe", seed=1, **SMALL | {"dim": 160, "layers": 3})


def check_mixed_short_convolutions() -> None:
    hold((128,), architecture="lfm2", seed=2, **SMALL | {"layers": 3})  # the last one is a convolution


def check_mixed_layers_beside_attention() -> None:
    """With LayerNorms, and biases everywhere, also of the logits."""
    hold((128,), architecture="phi2", tied=False, **SMALL | {"layers": 1})


def check_mixed_layers_with_layer_norms_of_their_own() -> None:
    hold((128,), architecture="gptneox", **SMALL)


def check_mixed_layers_in_turn_after_layer_norms() -> None:
    """And with embeddings of positions."""
    hold(architecture="gpt2", **SMALL)


def check_mixed_layers_beside_attention_and_windows() -> None:
    keys = {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2}
    hold((128,), architecture="cohere2", keys=keys, **SMALL)


def check_mixed_recurrent_layers_beside_attention() -> None:
    hold((128,), architecture="falcon-h1", **SMALL)


def check_mixed_norms_after_rotation() -> None:
    hold((128,), architecture="hunyuan-dense", **SMALL | {"layers": 1})


def check_mixed_embeddings_and_shared_caches() -> None:
    hold(architecture="gemma4", **SMALL | {"layers": 4})


def check_mixed_norm_of_embeddings() -> None:
    keys = {"attention.sliding_window": 40}
    hold((128,), architecture="muse-glimmer", keys=keys, **SMALL)


def check_mixed_gates_of_heads() -> None:
    hold((128,), architecture="laguna", seed=1, **SMALL | {"dim": 160})
    hold((128,), architecture="spark2_5", **SMALL)


def check_mixed_chunks_and_weighed_inputs() -> None:
    keys = {"attention.sliding_window": 24, "attention.temperature_length": 16}
    hold((128,), architecture="llama4", keys=keys, **SMALL | {"dim": 160, "layers": 4})


def check_mixed_layer_norms_of_heads() -> None:
    hold((128,), architecture="command-r-plus", **SMALL)


def check_mixed_experts_after_layer_norms() -> None:
    hold((128,), architecture="phimoe", **SMALL | {"dim": 160})


def check_mixed_scores_that_fall_with_the_distance() -> None:
    hold((128,), architecture="bloom", **SMALL)


def check_mixed_streams() -> None:
    hold((128,), architecture="gemma3n", **SMALL | {"layers": 4})


def check_mixed_limits_and_curves() -> None:
    hold((128,), architecture="olmo", **SMALL)
    hold((128,), architecture="apertus", **SMALL)


def check_mixed_latent_attention() -> None:
    hold(architecture="deepseek2-lite", **SMALL | {"dim": 160})


def check_mixed_latent_attention_and_temperature() -> None:
    keys = {"attention.temperature_length": 16}
    hold((128,), architecture="mistral4", keys=keys, **SMALL | {"dim": 160})


def check_mixed_side_by_side() -> None:
    hold(architecture="gemma4-moe", **SMALL | {"dim": 192, "heads": 4, "kv_heads": 2})


def check_a_prompt_before_its_kernels_are_compiled() -> None:
    """It is read in pieces for which there are kernels."""
    with tempfile.TemporaryDirectory() as folder, short_lists():
        path = generated_model.write(Path(folder) / "model.gguf", quant="Q8_0", architecture="qwen3", **SMALL)
        reference = Reference(path, CONTEXT)
        runner = NvidiaRunner(opened(path), CONTEXT, 3, is_early=True)
    text = list(map(int, np.random.default_rng(0).integers(0, 100, 72)))
    runner.prepare(32)
    runner._compiled |= dict.fromkeys((64, 128), False)  # an earlier check may have compiled them
    KVBlocks(runner).reserve(0, len(text))
    launched = []
    launch = runner._launch_prefill
    runner._launch_prefill = lambda size, pieces: launched.append(size) or launch(size, pieces)
    runner.run([Slot(0, tuple(text[:-1]), 0, "none")])
    assert launched == [32, 32, 32]
    [best] = runner.run([Slot(0, (text[-1],), len(text) - 1)])
    wanted = reference.logits(text)[-1]
    assert best == wanted.argmax() and divergence(wanted, runner.logits()[0]) < 2e-5


def hold(sizes: Sequence[int] = (32, 64, 128), **shape: Any) -> None:
    """Steps of replies, of pieces of one or two prompts, and of both, of these sizes; raises AssertionError where
    logits differ from the reference's."""
    with tempfile.TemporaryDirectory() as folder, short_lists():
        path = generated_model.write(Path(folder) / "model.gguf", **{"quant": "Q8_0"} | shape)
        reference = Reference(path, CONTEXT)
        runner = NvidiaRunner(opened(path), CONTEXT, 3, is_early=True)
    draw = np.random.default_rng(0)
    texts = [list(map(int, draw.integers(0, 100, n))) for n in (6, 36, 22)]
    blocks = KVBlocks(runner)

    def step(
        pieces: dict[int, int],
        *rows: int,
        then: dict[int, int] | None = None,
        draws: Sampler | None = None,
        begin: Sequence[int] = (),
        end: Sequence[int] = (),
    ) -> None:
        """Reads so many tokens of the prompts of `pieces`, and decodes a token of each of `rows`. With `then`, the step
        after it runs ahead, with these pieces and the rows that `begin`, without those that `end`."""

        def slots_of(pieces: dict[int, int]) -> list[Slot]:
            for s, n in pieces.items():
                blocks.reserve(s, n + 2)
            lengths = {s: blocks.length(s) for s in pieces}
            return [
                Slot(s, tuple(texts[s][(at := lengths[s]) : at + n]), at, "none") for s, n in pieces.items()
            ]

        def ahead() -> Following:
            commit(read)
            read.clear()
            return Following([*slots_of(then or {}), *map(row, begin)], end)

        def row(s: int) -> Slot:
            return Slot(s, (texts[s][-1],), len(texts[s]) - 1, draw=draws is not None)

        def commit(slots: Sequence[Slot]) -> None:
            for slot in slots:
                blocks.commit(slot.sequence, list(slot.inputs))

        slots = slots_of(pieces)
        read = list(slots)
        for s in rows:
            if s not in pieces:
                blocks.reserve(s, 2)
            slots.append(row(s))
        is_mixed = bool(pieces and rows)
        is_launched = runner._steps.is_launched(slots[len(pieces) :])
        assert bool(runner._mixed_size(slots[: len(pieces)], slots[len(pieces) :])) == (
            is_mixed and not is_launched
        )
        best = runner.run(slots, ahead if then is not None else None)
        assert not rows or runner._steps._is_ahead == (then is not None)
        commit([*read, *slots[len(pieces) :]])
        logits = runner.logits() if rows and then is None else None
        for i, s in enumerate(rows):
            wanted = reference.logits(texts[s])[-1]
            if draws:
                assert best[i] == draws.sample(wanted, texts[s])
            else:
                assert best[i] == wanted.argmax()
            if logits is not None and not draws:
                assert divergence(wanted, logits[i]) < 2e-5, (s, divergence(wanted, logits[i]))
            texts[s].append(int(best[i]))

    for size in sizes:
        runner.prepare(size)
    assert runner.piece_sizes(1) == (60, 124, 128)
    step({0: 5})
    step({1: 33, 2: 8}, 0)
    step({2: 13}, 0)
    step({1: 2}, 0, 1)  # the prompt's last token is a row of the same step
    step({}, 2, 1, 0)
    blocks.drop(1)
    blocks.drop(2)
    step({1: 20, 2: 9})
    step({1: len(texts[1]) - 21, 2: len(texts[2]) - 10})
    step({}, 2, 1, 0)
    blocks.drop(0)
    step({0: len(texts[0]) - 3})
    step({0: 1}, 2, 1)  # fewer tokens than replies
    sampler = Sampler(Sampling(seed=3, temperature=2, repeat_penalty=1.1, min_p=0))
    assert runner.sampler.prepare(1, Drawing(sampler.sampling, texts[1], sampler.uniforms(9)))
    step({0: 1}, 1, draws=sampler)
    step({}, 2, 0, then={})
    step({}, 2, 0)
    blocks.drop(1)
    step({}, 2, 0)
    step({1: 5}, 2, 0, then={1: 9})
    step({1: 9}, 2, 0, then={1: 2})
    step({1: 2}, 2, 0, then={})
    step({}, 0)  # the other one has ended
    last = len(texts[1]) - 17
    if runner.state_slots:  # a state is kept before the first token of a reply
        step({1: last}, 0, 1)
    else:
        step({}, 0, 2, then={1: last}, begin=(1,), end=(2,))
        step({1: last}, 1, 0, then={})
        step({}, 0, 1)
