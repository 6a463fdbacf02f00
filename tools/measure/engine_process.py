"""What measurements of the engine share: a process of their own, in which the engine runs without its worker, and steps
of its runners.

tinygrad's device is fixed for the life of a process, and what one measurement leaves in memory would disturb the next.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.protocol.events import Chat, EngineOptions, Event, Finished, Generate, Sampling, Token, TokenIds

if TYPE_CHECKING:
    from engine.model.text_model import TextModel
    from engine.runtime.model_runner import Ahead, ModelRunner, Slot

T = TypeVar("T")


def add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF files")
    parser.add_argument("--backend", default="auto")


def add_chip(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--as", dest="chip", default="", metavar="CHIP", help="take the kernels of sm_87, …")


def numbers(text: str) -> list[int]:
    """The argument "1,2,4"."""
    return [int(n) for n in text.split(",")]


def alone(function: Callable[..., T], *arguments: object, **named: object) -> T:
    """What a function returns that is called in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        return own.submit(function, *arguments, **named).result()


def set_up(backend: str, chip: str = "") -> None:
    """Sets this process up for tinygrad's device as the engine's worker does. To be called before tinygrad is
    imported. `chip`: the one that a GPU stands in for (`EngineOptions.chip`)."""
    from engine.backends import install, prepare

    install(prepare(EngineOptions(model_path="", backend=backend, chip=chip)))


def runners(path: str, backend: str) -> tuple[Callable[..., ModelRunner], int]:
    """A function that opens runners of a model file on a device (`open_runner` without the weights), and the size of
    the vocabulary. Sets this process up."""
    set_up(backend)
    from engine.description.architectures import read_spec
    from engine.formats.gguf import GGUF
    from engine.loading.weights import Weights
    from engine.model.open_runner import open_runner

    file = GGUF(path)
    spec = read_spec(file)
    open = lambda context, **how: open_runner(Weights(file, spec, lambda _: None), context, **how)
    return open, spec.vocab


def warm_model(path: str, backend: str, context: int, **how: Any) -> TextModel:
    """A model that has prepared for answers. `how`: more fields of EngineOptions. Sets this process up."""
    set_up(backend, how.get("chip", ""))
    from engine.model.text_model import TextModel

    options = EngineOptions(model_path=path, backend=backend, context_length=context, **how)
    model = TextModel(options, lambda _: None)
    model.warm_up(lambda: False)
    gc.freeze()  # as the worker does: no collection visits the model in the middle of an answer
    return model


def first_token(model: TextModel, prompt: Chat | TokenIds, max_tokens: int) -> tuple[float, Token, Finished]:
    """Seconds from a request to its first token, this token, and the end of the greedy answer, which has all its
    tokens."""
    came: list[tuple[float, Token]] = []

    def report(event: Event) -> None:
        if isinstance(event, Token):
            came.append((time.perf_counter(), event))

    request = Generate(
        request_id=1, prompt=prompt, sampling=Sampling(temperature=0), max_tokens=max_tokens, ignore_eos=True
    )
    started = time.perf_counter()
    end = model.generate(request, report, lambda: False)
    return came[0][0] - started, came[0][1], end


class Sequences:
    """The sequences of a runner, whose blocks are reserved and committed as the scheduler would."""

    def __init__(self, runner: ModelRunner) -> None:
        from engine.runtime.kv_blocks import KVBlocks

        self.runner, self.blocks = runner, KVBlocks(runner)

    def prefill(
        self, tokens: Sequence[int], position: int = 0, sequence: int = 0, chunk: int | None = None
    ) -> None:
        """Stores `tokens` at `position` and after it, in chunks of so many (None: the largest). What the sequence has
        there is forgotten."""
        from engine.runtime.model_runner import Slot

        if position < self.blocks.length(sequence):
            self.blocks.cut(sequence, position)
        chunk = chunk or self.runner.max_chunk
        for at in range(0, len(tokens), chunk):
            part = tuple(tokens[at : at + chunk])
            self.blocks.reserve(sequence, len(part))
            self.runner.run([Slot(sequence, part, position + at, "none")])
            self.blocks.commit(sequence, part)

    def decode(
        self,
        tokens: Sequence[int],
        ahead: Ahead | None = None,
        draw: bool = False,
        pieces: Sequence[Slot] = (),
    ) -> list[int]:
        """Runs a token of each of the first sequences, and `pieces` of prompts beside; returns the next tokens."""
        from engine.runtime.model_runner import Slot

        for sequence in range(len(tokens)):
            self.blocks.reserve(sequence, 2 if ahead else 1)
        slots = [Slot(s, (token,), self.blocks.length(s), draw=draw) for s, token in enumerate(tokens)]
        chosen = self.runner.run([*pieces, *slots], ahead)
        for sequence, token in enumerate(tokens):
            self.blocks.commit(sequence, [token])
        return [int(token) for token in chosen]


def log_probabilities(
    runner: ModelRunner, tokens: Sequence[int], prompt: int, chunk: int | None = None
) -> NDArray[np.float64]:
    """The log-probabilities after each of `tokens` that comes after the first `prompt`, (steps, vocab)."""
    sequences, steps = Sequences(runner), []
    sequences.prefill(tokens[:prompt], chunk=chunk)
    for token in tokens[prompt:]:
        sequences.decode([token])
        steps.append(log_softmax(runner.logits()[0]))
    return np.array(steps)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities from logits (..., vocab)."""
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))
