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

from engine.events import Chat, EngineOptions, Event, Finished, Generate, Sampling, Token, TokenIds

if TYPE_CHECKING:
    from engine.model.generate import TextModel
    from engine.model.kv_blocks import KVBlocks
    from engine.model.model_runner import BatchRunner, ModelRunner

T = TypeVar("T")


def add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF files")
    parser.add_argument("--backend", default="auto")


def numbers(text: str) -> list[int]:
    """The argument "1,2,4"."""
    return [int(n) for n in text.split(",")]


def alone(function: Callable[..., T], *arguments: object) -> T:
    """What a function returns that is called in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        return own.submit(function, *arguments).result()


def set_up(backend: str) -> None:
    """Sets this process up for tinygrad's device as the engine's worker does. To be called before tinygrad is
    imported."""
    from engine.backends import install, prepare

    install(prepare(EngineOptions(model_path="", backend=backend)))


def runners(path: str, backend: str) -> tuple[Callable[..., ModelRunner], int]:
    """A function that opens runners of a model file on a device (`open_runner` without the weights), and the size of
    the vocabulary. Sets this process up."""
    set_up(backend)
    from engine.formats.gguf import GGUF
    from engine.model.architectures import read_spec
    from engine.model.open_runner import open_runner
    from engine.model.weights import Weights

    file = GGUF(path)
    spec = read_spec(file)
    open = lambda context, **how: open_runner(Weights(file, spec, lambda _: None), context, **how)
    return open, spec.vocab


def warm_model(path: str, backend: str, context: int, **how: Any) -> TextModel:
    """A model that has prepared for answers. `how`: more fields of EngineOptions. Sets this process up."""
    set_up(backend)
    from engine.model.generate import TextModel

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


def prefill(runner: ModelRunner, tokens: Sequence[int], position: int = 0, chunk: int | None = None) -> None:
    """Stores `tokens` at `position` and after it, in chunks of so many (None: the largest)."""
    chunk = chunk or runner.max_chunk
    for at in range(0, len(tokens), chunk):
        runner.prefill(tokens[at : at + chunk], position + at)


def prefill_row(runner: BatchRunner, blocks: KVBlocks, sequence: int, tokens: Sequence[int]) -> None:
    """Stores the first tokens of a sequence."""
    for at in range(0, len(tokens), runner.max_chunk):
        part = tokens[at : at + runner.max_chunk]
        blocks.reserve(sequence, len(part))
        runner.prefill(part, at, sequence)
        blocks.commit(sequence, part)


def log_probabilities(
    runner: ModelRunner, tokens: Sequence[int], prompt: int, chunk: int | None = None
) -> NDArray[np.float64]:
    """The log-probabilities after each of `tokens` that comes after the first `prompt`, (steps, vocab)."""
    prefill(runner, tokens[:prompt], chunk=chunk)
    steps = []
    for at in range(prompt, len(tokens)):
        runner.decode(tokens[at], at)
        steps.append(log_softmax(runner.logits()))
    return np.array(steps)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities from logits (..., vocab)."""
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))
