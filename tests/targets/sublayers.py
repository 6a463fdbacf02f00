"""Steps of a model, sublayer by sublayer: the residual stream after each, and the experts that tokens take."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray
from tinygrad import Tensor, TinyJit

from engine.description.feed_forward import Experts
from engine.runtime.kv_blocks import BLOCK
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.step_state import TILES, TOKENS
from engine.targets.cpu.model import CPUModel
from engine.targets.cpu.step import step_kernels
from engine.targets.graph.inputs import Step as GraphStep
from engine.targets.graph.inputs import StepInputs
from engine.targets.graph.step import Transformer

Array = NDArray[Any]


class Sublayers(NamedTuple):
    """What a step made of n tokens: the residual stream after each sublayer, float32 (n, dim), and the experts that
    each mixture of experts chose, int32 (n, used)."""

    streams: list[Array]
    choices: list[Array]


Step = Callable[[list[int], int], Sublayers]
"""Runs tokens at a position."""


See = Callable[[Array, Array, Array], None]
"""Gets what a router has made of n tokens, and may change it: the experts (n, used), their probabilities, and the
logits (n, experts or more)."""


def keep(chosen: Array, probabilities: Array, logits: Array) -> None:
    """Leaves a choice as it is."""


def cpu_step(model: CPUModel, tile: int, see: See = keep) -> Step:
    """A step of the CPU's kernels, all sublayers of it, which shows `see` every choice. Sequence 0 takes the blocks of
    each pool in turn."""
    cache, entries = model.cache, model.cache.positions // BLOCK
    cache.assign(0, [[i % group.blocks for i in range(entries)] for group in cache.groups])
    sequence, pool = step_kernels(model, tile, int(tile == 1), whole=True).compile(), model.pool
    scratch = {buffer: name for (name, of, _), buffer in model._scratch.items() if of == tile}
    size, spec = 1 if tile == 1 else model.max_chunk, model.spec
    tables = len(spec.added_tables)
    # The embedding's kernels
    begins = 1 + tables + bool(spec.centred or tables) + 2 * bool(spec.embedding_norm)

    def run(tokens: list[int], at: int) -> Sublayers:
        memory.view(model.tokens)[: len(tokens)] = tokens
        memory.view(model.state)[[TILES, TOKENS]] = -(-len(tokens) // tile), len(tokens)
        places = memory.view(model.places).reshape(-1, 2)
        places[:] = 0, 1  # what fills a tile is of no sequence
        places[: len(tokens), 0], places[: len(tokens), 1] = range(at, at + len(tokens)), 0
        pool.run(sequence.first, begins)
        embedding = memory.view(sequence.programs[begins - 1][1][0])[: size * spec.dim]
        embedding = embedding.reshape(size, -1)[: len(tokens)].copy()
        done, got = begins, Sublayers([], [])
        for i, (_, buffers) in enumerate(sequence.programs):
            name = scratch.get(buffers[0])
            if i < begins or name not in ("x", "y", "chosen"):
                continue
            pool.run(sequence.first + done, i + 1 - done)
            done = i + 1
            rows = [memory.view(b) for b in buffers]
            rows = [r[: len(r) // size * size].reshape(size, -1)[: len(tokens)] for r in rows]
            if name == "chosen":
                see(rows[0], rows[1], rows[3])  # the outputs of `choose_experts`, and the logits it read
            (got.choices if name == "chosen" else got.streams).append(rows[0].copy())
        if done < len(sequence.programs):
            pool.run(sequence.first + done, len(sequence.programs) - done)
        for sublayer, of in enumerate(spec.sublayers):
            if of.renewed:  # what it finds
                del got.streams[sublayer]
        for sublayer, (_, is_added_later) in enumerate(spec.blocks):
            if is_added_later:  # the stream after it is that before it
                before = got.streams[sublayer - 1] if sublayer else embedding
                got.streams.insert(sublayer, before)
        return got

    return run


class WatchedTransformer(Transformer):
    """Tensor graphs that remember the experts that they chose, and the tokens so far."""

    choices: list[Tensor]

    def __init__(self, *of_model: Any) -> None:
        super().__init__(*of_model)
        self.text: list[int] = []

    def _choose(self, operator: Experts, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        chosen, probabilities = super()._choose(operator, x)
        self.choices.append(Tensor.stack(*chosen, dim=-1))
        return chosen, probabilities


def graph_step(transformer: WatchedTransformer, inputs: StepInputs, size: int) -> Step:
    """A step of up to `size` tokens of sequence 0 as tensor graphs."""

    @TinyJit
    def captured(*of_step: Any) -> list[Tensor]:
        transformer.choices = []
        streams = [x for x, _ in transformer.sublayers(GraphStep(*of_step))]
        return [t.contiguous().realize() for t in (Tensor.stack(*streams), *transformer.choices)]

    captured.cnt = 1  # capture at the first call, not at the second
    text = transformer.text

    def run(tokens: list[int], at: int) -> Sublayers:
        padded, n = [*tokens, *[0] * (size - len(tokens))], len(tokens)
        step = inputs.step(padded, transformer.rows_of(padded, text[:at]), 0, at, n)
        streams, *choices = (t.numpy() for t in captured(*step))
        text[at:] = tokens
        return Sublayers([x[:n] for x in streams], [chosen[:n] for chosen in choices])

    return run
