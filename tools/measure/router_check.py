"""Which experts the engine chooses, held against the float32 reference: every small model with experts beside the
checkout (`tests.oracles`), over llama.cpp's prompts and the tokens that it chose after them.

    python -m tools.measure router_check cpu|graph|rounded [--model NAME]

`rounded` is the reference with the roundings of the kernels for NVIDIA GPUs.

For each prompt it prints how many choices there are, and
- alone: how many differ from what the reference chooses for the same residual stream, by more than a tie of 1e-4.
- run: how many differ from those of the reference's own run, and by how much the expert that was left out led there, in
  log-probability: at most where no earlier layer of this token or of those before it chose differently, and at most in
  all. Activations and the cache are rounded, so near ties fall differently, and what follows differs more.
- difference, wrong: how far the engine is from llama.cpp's answers (`oracles.Agreement`).
- given: the same if the engine is given the reference's choices (CPU only).
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engine.description.feed_forward import MIN_PROBABILITY
from tests import oracles
from tests.opened import opened
from tests.paths import SHARED
from tests.reference import Reference, wrong_by
from tests.reference_functions import softmax
from tests.targets.layers import TIE
from tests.targets.sublayers import Array, See, Step, WatchedTransformer, cpu_step, graph_step, keep
from tools.measure.engine_process import set_up
from tools.measure.rounded_reference import RoundedReference

Steps = Callable[[See], tuple[Step, int, Step]]
"""Makes steps: prefill, its largest number of tokens, and decode."""


def check(backend: str, models: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in oracles.NAMES:
            path = Path(folder) / f"{name}.gguf"
            if models and not any(model in name for model in models):
                continue
            oracles.make(SHARED, name, path)
            if opened(path).spec.experts:
                for prompt in oracles.prompts(SHARED, name):
                    print(f"{name:22} {_line(backend, path, prompt)}", flush=True)


def _line(backend: str, path: Path, prompt: oracles.Prompt) -> str:
    tokens, reference = prompt.tokens + prompt.greedy[:-1], Reference(path, prompt.context)
    streams = reference.streams(tokens)
    wanted = reference.routers(streams[:-1])
    make = _cpu if backend == "cpu" else _graph
    own, chosen = (
        _rounded(path, prompt, tokens)
        if backend == "rounded"
        else _run(make(path, prompt.context), prompt, keep)
    )
    alone = [
        wrong_by(router, c)
        for router, c in zip(reference.routers([streams[0], *own[:-1]]), chosen, strict=True)
    ]
    leads = np.stack([wrong_by(router, c) for router, c in zip(wanted, chosen, strict=True)])
    differs = leads > 0
    in_earlier_layers = differs.cumsum(0) - differs
    is_first = differs & (in_earlier_layers.cumsum(1) == 0)  # no attention has read the effects of another
    first, largest = (leads.max(where=where, initial=0) for where in (is_first, differs))
    line = (
        f"{leads.size:5} choices | alone {np.sum(np.stack(alone) > TIE)} | "
        f"run {differs.sum()}, first {first:.1e}, any {largest:.1e} | {_agreement(reference, prompt, own[-1])}"
    )
    if backend != "cpu":
        return line
    given, _ = _run(make(path, prompt.context), prompt, _Given(reference, wanted))
    return f"{line} | given {_agreement(reference, prompt, given[-1])}"


def _rounded(path: Path, prompt: oracles.Prompt, tokens: Sequence[int]) -> tuple[list[Array], list[Array]]:
    """The streams and the choices of the reference with a GPU's roundings. Tokens at the prompt's positions are decoded
    (`oracles.of_runner`)."""
    of_prompt = np.arange(len(tokens)) < len(prompt.tokens)
    of_prompt[prompt.positions] = False
    rounded = RoundedReference(path, prompt.context, of_prompt)
    streams = rounded.streams(tokens)
    scores = zip(rounded.routers(streams[:-1]), rounded.spec.experts, strict=True)
    return streams[1:], [np.argsort(-s, -1, kind="stable")[:, : part.used] for s, part in scores]


def _cpu(path: Path, context: int) -> Steps:
    from engine.targets.cpu.kernels.lanes import register_lanes
    from engine.targets.cpu.kernels.thread_pool import default_pool
    from engine.targets.cpu.model import CPUModel

    lanes = register_lanes()
    model = CPUModel(opened(path), context, default_pool(), lanes, keep_packed=False)
    return lambda see: (cpu_step(model, lanes, see), model.max_chunk, cpu_step(model, 1, see))


def _graph(path: Path, context: int) -> Steps:
    from engine.fixes import matvec_heuristic

    matvec_heuristic.apply()
    chunk = 32
    transformer = WatchedTransformer(opened(path), context + chunk, context)
    return lambda _: (graph_step(transformer, chunk), chunk, graph_step(transformer, 1))


def _run(steps: Steps, prompt: oracles.Prompt, see: See) -> tuple[list[Array], list[Array]]:
    """Prefill of the prompt and decode of the tokens after it: the streams and the choices of all of them."""
    prefill, size, decode = steps(see)
    parts = [prefill(prompt.tokens[at : at + size], at) for at in range(0, len(prompt.tokens), size)] + [
        decode([token], len(prompt.tokens) + i) for i, token in enumerate(prompt.greedy[:-1])
    ]
    joined = [
        [np.concatenate(arrays) for arrays in zip(*each, strict=True)]
        for each in ((part.streams for part in parts), (part.choices for part in parts))
    ]
    return joined[0], joined[1]


class _Given:
    """Gives a run of tokens these choices instead of its own: the likeliest by `wanted`, (tokens, experts) for each
    mixture of experts."""

    def __init__(self, reference: Reference, wanted: Sequence[Array]) -> None:
        self._experts, self._wanted = reference.spec.experts, wanted
        self._scales = [reference.expert_scales(operator) for operator in self._experts]
        self._at, self._next = 0, 0

    def __call__(self, chosen: Array, probabilities: Array, logits: Array) -> None:
        n, operator = len(chosen), self._experts[self._next]
        wanted = self._wanted[self._next][self._at : self._at + n]
        chosen[:] = np.argsort(-wanted, axis=-1, kind="stable")[:, : operator.used]
        p = np.take_along_axis(softmax(logits[:, : operator.count]), chosen.astype(np.int64), -1)
        if operator.renormalised:
            p = p / np.maximum(p.sum(-1, keepdims=True), MIN_PROBABILITY)
        probabilities[:] = p * self._scales[self._next][chosen]
        self._next = (self._next + 1) % len(self._experts)
        self._at += n if self._next == 0 else 0


def _agreement(reference: Reference, prompt: oracles.Prompt, stream: Array) -> str:
    logits = reference.head(stream)
    greedy = logits[len(prompt.tokens) - 1 :].argmax(-1).tolist()
    found = oracles.agreement(prompt, oracles.Answers(logits[prompt.positions], greedy))
    return f"difference {found.difference:.1e}, wrong {found.wrong}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", choices=("cpu", "graph", "rounded"))
    parser.add_argument("--model", action="append", default=[], help="only models with this in their names")


def run(given: argparse.Namespace) -> None:
    set_up("CPU")
    check(given.backend, given.model)
