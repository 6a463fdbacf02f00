"""What a handler is: the weights and the cache of a sublayer on a GPU, and the kernels that compute it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from tinygrad import Tensor

from engine.description.feed_forward import Dense
from engine.description.sublayers import Vector, Weight
from engine.formats.kv_format import KVFormat
from engine.kernels.device_memory import to_device
from engine.loading.weights import Weights
from engine.runtime.kv_blocks import blocks_of_one
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.matrices import Matrix, Product, matrices_of
from engine.targets.nvidia.norms import Input, Norm, inputs_of, no_norm
from engine.targets.nvidia.prompt_step import MixedStep, Pending, PromptStep, RowsStep
from engine.targets.nvidia.step import Sums

S = TypeVar("S", bound=PromptStep)


class LentCache(NamedTuple):
    """The KV cache of another model's attention: the blocks of its pool, the tables of its blocks, and its planes."""

    pool: int
    tables: Tensor
    planes: list[Tensor]


@dataclass(frozen=True)
class Loading:
    """What handlers are made from, beside their part of the description: the weights, what all share (as `GPUModel` has
    it), and what a KV cache has room for: `parallel` sequences of a `context` each, of which prefill takes up to
    `chunk` tokens at once, in the format `kv`. Sequences share pools of blocks, and `tables` are those of their blocks
    by window, made as layers need them; `caches`: those of the attention so far, in order; `known`: the matrices so far
    (`matrices`); `choices`: the arrays of the mixtures to come (`ExpertsHandler.choices`). If it `looks_ahead`, tokens
    of pictures see those after them. Of an assistant, `lent` are the caches of the model's attention, in order."""

    weights: Weights
    context: int
    chunk: int
    parallel: int
    kv: KVFormat
    ropes: Sequence[tuple[Tensor, Tensor]]
    temperature: Tensor | None
    choices: Iterator[Tensor]
    looks_ahead: bool = False
    lent: Sequence[LentCache] = ()
    tables: dict[int, Tensor] = field(default_factory=dict)
    caches: list[list[Tensor]] = field(default_factory=list)
    norms: dict[tuple[Vector, Vector | None], Norm] = field(default_factory=dict)
    known: dict[tuple[tuple[Weight, ...], bool], list[Matrix]] = field(default_factory=dict)
    head_lists: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """Of the products of heads, by the tokens of a step and the heads (`latent_attention.prompt.head_lists`)."""

    def vector(self, vector: Vector | None) -> Tensor | None:
        return None if vector is None else to_device(self.weights.vector(vector))

    def norm(self, weight: Vector | None, bias: Vector | None = None) -> Norm:
        """The norm of the residual stream with a weight and a bias: one for all layers beside each other."""
        if weight is None:
            return no_norm(self.weights.spec.dim)
        if (weight, bias) not in self.norms:
            read = self.weights.vector
            self.norms[weight, bias] = Norm(read(weight), bias=read(bias) if bias else None)
        return self.norms[weight, bias]

    def matrices(self, *weights: Weight, alternate: bool = False) -> list[Matrix]:
        """As `matrices_of`. Layers that run several times (`engine.description.loops`) have the same ones."""
        if (weights, alternate) not in self.known:
            self.known[weights, alternate] = matrices_of(weights, alternate)
        return self.known[weights, alternate]

    def product(self, *weights: Weight, experts: ChosenExperts | None = None) -> Product:
        """The product of matrices, which follow each other."""
        return Product(self.matrices(*weights), experts)

    def gate_up(self, part: Dense) -> list[Matrix]:
        """Gate and up of a feed-forward layer: a matrix whose rows alternate, or two if they differ in type; or up
        alone."""
        if part.gate is None:
            return self.matrices(part.up)
        return self.matrices(part.gate, part.up, alternate=part.gate.type == part.up.type)

    def pool(self, window: int) -> int:
        """Blocks of a layer's pool."""
        return self.parallel * blocks_of_one(window, self.context, self.chunk)


class Handler(ABC):
    """Computes a sublayer. `products`: those of the normed stream, and the last one, whose result is added to the
    stream."""

    products: tuple[Product, ...]
    is_storing = False
    """Whether it keeps something of a token for the next ones."""
    embedded_layers = 0
    """Up to which layer it takes embeddings of layers, as a number of layers."""

    @abstractmethod
    def __init__(self, part: Any, loading: Loading) -> None:
        """Loads a `part` of the description. Raises ModelFileError."""

    @classmethod
    def lacks(cls, part: Any) -> str:
        """What the kernels lack for a part (`engine.model.coverage.Kernels`)."""
        return ""

    def inputs(self, norm: Norm) -> list[Input]:
        """What the products of a decode step read of the stream, after a norm."""
        return inputs_of(norm, *self.products[:-1])

    @abstractmethod
    def decode(self, step: DecodeStep, norm: Norm) -> None:
        """Adds the kernels of a decode step of one row, up to those that add the result to the stream."""

    @abstractmethod
    def prefill(self, step: PromptStep, norm: Norm) -> Sums | None:
        """Adds the norm and the kernels of a prompt; returns the result, or None if they have changed the stream."""

    def rows(self, step: RowsStep, norm: Norm) -> Sums | None:
        """As `prefill`, for a decode step of several rows."""
        return self.prefill(step, norm)

    def mixed(self, step: MixedStep, norm: Norm) -> Sums | None:
        """As `prefill`, for a step that has replies too."""
        return self.prefill(step, norm)

    def last_mixed(self, step: MixedStep, norm: Norm) -> Sums:
        """As `mixed`, of which only what it keeps of prompts is needed, and the result of the replies."""
        raise NotImplementedError("It keeps nothing.")

    def store(self, step: PromptStep, norm: Norm) -> None:
        """Adds the kernels of a prompt of which only what they keep is needed."""
        self.prefill(step, norm)

    @abstractmethod
    def roles(self, uses: BufferUses) -> None:
        """Adds what the buffers are for."""


@dataclass
class Layer:
    """A sublayer with its norms. `scale`: float32 (1,), what the stream is multiplied by after it, as by `factor`. If
    it `is_followed_beside`, the next sublayer reads the stream as this one does, and their results are added together.
    `picture_part`, `renewed`: see `Sublayer`."""

    norm: Norm
    handler: Handler
    post_norm: Tensor | None
    scale: Tensor | None
    is_followed_beside: bool = False
    picture_part: int = 0
    factor: float = 1.0
    renewed: Norm | None = None

    @property
    def inputs(self) -> list[Input]:
        return self.handler.inputs(self.norm)

    def add_to(
        self, step: S, compute: Callable[[S, Norm], Sums | None], following: PromptStep | None = None
    ) -> None:
        """Adds what `compute`, a method of the handler, does in a step. Its result, with those of sublayers beside it,
        is left to the next norm of the stream of the step, or of the `following` one."""
        if self.renewed:
            step.renew(self.renewed)
        if (result := compute(step, self.norm)) is None:
            return
        next_step = following or step
        next_step.beside.append(
            result if self.post_norm is None else replace(result, post_norm=self.post_norm)
        )
        if self.picture_part and next_step.pictures:
            next_step.beside.append(Sums(next_step.pictures[self.picture_part], 1))
        if not self.is_followed_beside:
            next_step.pending = Pending(next_step.beside, self.scale, self.factor, next_step.own)
            next_step.beside, next_step.own = [], None
