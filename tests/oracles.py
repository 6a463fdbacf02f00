"""llama.cpp's exact answers for small models of each architecture, and how far other answers are from them.

The answers lie beside the checkout: llama.cpp's with weights of float32, so that it rounds no activations. So do the
models' maker and what the fields mean (`models/make_model.py`, `models/make_oracle.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from engine.description.architectures import read_spec
from engine.formats.gguf import GGUF
from engine.loading.weights import Weights
from engine.runtime.model_runner import ModelRunner
from tests.makers import load_maker
from tests.reference import Reference
from tests.reference_functions import log_softmax
from tests.targets.lone_sequence import LoneSequence

VOCABULARY = {  # tokens that each model has
    "tiny-llama-yarn": 8448,
    "tiny-mistral3": 8480,
    "tiny-phi3": 8512,
    "tiny-gemma3": 8576,
    "tiny-gemma4": 8576,
    "tiny-gemma4-moe": 8576,
    "tiny-granite": 8224,
    "tiny-smollm3": 8448,
    "tiny-olmoe": 8224,
    "tiny-qwen3moe": 8224,
    "tiny-qwen35": 8224,
    "tiny-qwen35moe": 8224,
    "tiny-gpt-oss": 8480,
}
NAMES = tuple(
    f"{shape}-{quant}"
    for shape in VOCABULARY
    for quant in ("F32", "Q8_0", "MXFP4" if shape == "tiny-gpt-oss" else "Q4_K_M")
)
TOP = 16  # of the likeliest tokens, those whose log-probabilities are compared
MARGIN = 0.02  # a greedy token that leads by less may be another


@dataclass(frozen=True)
class Prompt:
    """A prompt, run in a context of so many tokens. After the tokens at `positions` the 64 likeliest `ids` have these
    `logprobs`, (positions, 64) each. `greedy` tokens follow the prompt, and lead by `margins` in their logits."""

    tokens: list[int]
    context: int
    positions: list[int]
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    greedy: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Answers:
    """The logits at a prompt's positions, (positions, vocab), and the most probable tokens where llama.cpp's greedy
    ones are, each after those that llama.cpp chose."""

    logits: NDArray[np.float32]
    greedy: list[int]


@dataclass(frozen=True)
class Agreement:
    """The largest difference of the log-probabilities of the likeliest tokens; the mean Kullback-Leibler divergence, in
    nats, over 64 tokens and the rest as one; how many greedy tokens are others and lead by more than `MARGIN`."""

    difference: float
    divergence: float
    wrong: int


def make_model(
    shared: Path, shape: str, quant: str, path: Path, n_tokens: int, seed: int | None = None
) -> None:
    """Writes a model of a shape and a quantization, with random weights and so many tokens: the maker beside the
    checkout, in this process. The tokens have no texts, which would take longer to write than all else."""
    maker = load_maker(shared, "make_model")
    arguments = ["make_model", shape, str(path), "--quant", quant]
    arguments += [] if seed is None else ["--seed", str(seed)]
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(maker, "write_vocab", lambda *_: (range(n_tokens), None, None)),
        contextlib.redirect_stdout(None),
    ):
        maker.main()


def make(shared: Path, name: str, path: Path) -> None:
    """Writes one of `NAMES`."""
    shape, _, quant = name.rpartition("-")
    make_model(shared, shape, quant, path, VOCABULARY[shape])


def prompts(shared: Path, name: str) -> list[Prompt]:
    """What llama.cpp says of one of `NAMES`: a short and a long prompt."""
    exact = shared / f"oracle/arch/{name}-exact.npz"
    answers = np.load(exact if exact.exists() else shared / f"oracle/arch/{name}.npz")
    return [
        Prompt(
            tokens=answers[f"tokens{k}"].tolist(),
            context=int(answers[f"n_ctx{k}"]),
            positions=answers[f"positions{k}"].tolist(),
            ids=answers[f"ids{k}"].astype(np.int64),
            logprobs=answers[f"logprobs{k}"].astype(np.float64),
            greedy=answers[f"greedy{k}"].tolist(),
            margins=answers[f"margin{k}"].tolist(),
        )
        for k in (0, 1)
    ]


def of_reference(path: Path, prompt: Prompt) -> Answers:
    logits = Reference(path, prompt.context).logits(prompt.tokens + prompt.greedy[:-1])
    return Answers(logits[prompt.positions], logits[len(prompt.tokens) - 1 :].argmax(-1).tolist())


def of_runner(open_runner: Callable[[Weights, int], ModelRunner], path: Path, prompt: Prompt) -> Answers:
    """Runs the prompt in chunks up to each of its positions, and decodes there."""
    with GGUF(path) as file:
        text = LoneSequence(open_runner(Weights(file, read_spec(file), lambda _: None), prompt.context))
        rows, at, best = [], 0, 0
        for position in prompt.positions:
            text.prefill(prompt.tokens[at:position], at)
            best = text.decode(prompt.tokens[position], position)
            rows.append(np.array(text.logits()))
            at = position + 1
        assert at == len(prompt.tokens), "the last position is the prompt's end"
        greedy = [best, *(text.decode(token, at + i) for i, token in enumerate(prompt.greedy[:-1]))]
    return Answers(np.stack(rows), greedy)


def agreement(prompt: Prompt, answers: Answers) -> Agreement:
    ours = np.take_along_axis(log_softmax(answers.logits), prompt.ids, -1)
    kl = (np.exp(prompt.logprobs) * (prompt.logprobs - ours)).sum(-1)
    rest, our_rest = (np.log(np.maximum(1 - np.exp(x).sum(-1), 1e-12)) for x in (prompt.logprobs, ours))
    return Agreement(
        difference=float(np.abs(ours - prompt.logprobs)[:, :TOP].max()),
        divergence=float((kl + np.exp(rest) * (rest - our_rest)).mean()),
        wrong=sum(
            got != wanted and margin > MARGIN
            for got, wanted, margin in zip(answers.greedy, prompt.greedy, prompt.margins, strict=True)
        ),
    )
