"""Steps that check guesses of next tokens: each row's results are those of its text alone."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.protocol.events import Sampling
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Drawing, Slot, same_rows
from engine.runtime.sampling import Sampler
from engine.targets.nvidia.runner import NvidiaRunner
from tests import generated_model
from tests.kernels.gpu.buffers import short_lists
from tests.opened import opened
from tests.reference import Reference, divergence

CONTEXT = 64
AS_LIKELY = 5e-3
"""By so small a share of their probabilities candidates of a draw may stand in either order."""
SMALL = {"dim": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "layers": 1}


def check_guesses() -> None:
    hold(1, architecture="qwen3", **SMALL)


def check_guesses_of_several_sequences() -> None:
    keys = {"attention.sliding_window": 8}
    hold(2, architecture="gpt-oss", keys=keys, **SMALL | {"layers": 2, "dim": 160})


def check_guesses_with_embeddings_and_shared_caches() -> None:
    hold(1, architecture="gemma4", **SMALL | {"layers": 4})


def check_guesses_with_recurrent_states() -> None:
    hold(1, architecture="qwen35", **SMALL | {"layers": 2})


def check_guesses_with_mamba() -> None:
    hold(1, architecture="nemotron_h", seed=2, **SMALL | {"layers": 3})


def check_guesses_with_short_convolutions() -> None:
    hold(1, architecture="lfm2", **SMALL | {"layers": 2})


def hold(parallel: int, **shape: Any) -> None:
    """Guesses of which some are right, greedy and drawn, after a step that ran ahead and before others; with two
    sequences, the other one's row beside. Raises AssertionError where logits or tokens differ from the text's own."""
    with tempfile.TemporaryDirectory() as folder, short_lists():
        path = generated_model.write(Path(folder) / "model.gguf", **{"quant": "Q8_0"} | shape)
        reference = Reference(path, CONTEXT)
        runner = NvidiaRunner(opened(path), CONTEXT, parallel, is_early=True)
    draw, blocks = np.random.default_rng(0), KVBlocks(runner)
    texts = [list(map(int, draw.integers(0, 100, 9))) for _ in range(parallel)]
    sampler: Sampler | None = None
    assert runner.check_rows == (8,) and not runner.can_check(8)
    runner.prepare(32)
    runner.prepare_check(8)

    def step(right: int, wrong: int, ahead: bool = False) -> None:
        """Takes as many next tokens of sequence 0 as are guessed right, and one more; of the others one."""
        guesses = list[int]()
        while len(guesses) < right:
            guesses.append(wanted(0, guesses)[0])
        guesses += [9] * wrong
        for s in range(parallel):
            blocks.reserve(s, 2 + len(guesses))
        rows = [Slot(s, (text[-1],), len(text) - 1, draw=bool(sampler)) for s, text in enumerate(texts)]
        more = [Slot(0, (t,), len(texts[0]) + i, draw=bool(sampler)) for i, t in enumerate(guesses)]
        chosen = runner.run([rows[0], *more, *rows[1:]], same_rows if ahead else None).tolist()
        if not (ahead or sampler):
            after = reference.logits([*texts[0], *guesses])[len(texts[0]) - 1 :]
            for row, logits in enumerate(after):
                assert divergence(logits, runner.logits([row])[0]) < 2e-5
        for s, tokens in enumerate([chosen[: 1 + right], *[[t] for t in chosen[1 + len(guesses) :]]]):
            for token in tokens:
                expected = wanted(s)
                assert token in expected
                blocks.commit(s, texts[s][-1:])
                texts[s].append(expected[0])
        if runner.state_slots:
            runner.cut_state(0, len(texts[0]) - 1)

    def wanted(s: int, guesses: list[int] = []) -> list[int]:  # noqa: B006
        """The next token of a text, and of a draw all candidates that are as likely as that one."""
        text = [*texts[s], *guesses]
        logits = reference.logits(text)[-1]
        if not sampler:
            return [int(logits.argmax())]
        ids, masses = sampler.candidates(logits, text)
        cumulative, number = np.cumsum(masses), uniforms[len(text) - drawn_from[s]]
        drawn = np.searchsorted(cumulative, number * cumulative[-1], side="right")
        as_likely = np.abs(masses - masses[drawn]) <= AS_LIKELY * masses[drawn]
        return [int(ids[drawn]), *map(int, ids[as_likely])]

    for s, text in enumerate(texts):
        blocks.reserve(s, 9)
        runner.run([Slot(s, tuple(text[:-1]), 0, "none")])
        blocks.commit(s, text[:-1])
    step(2, 1)
    step(0, 0, ahead=True)
    step(0, 3)  # what ran ahead is not needed
    step(0, 0, ahead=True)
    step(0, 0)
    sampling = Sampling(seed=5, temperature=2, min_p=0)
    sampler = Sampler(sampling)
    uniforms = sampler.uniforms(CONTEXT)
    drawn_from = list(map(len, texts))
    for s, text in enumerate(texts):
        assert runner.sampler.prepare(s, Drawing(sampling, text, uniforms))
    step(5, 1)
    step(0, 0)
    step(1, 2)
