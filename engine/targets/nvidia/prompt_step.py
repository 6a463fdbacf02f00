"""What the handlers of steps of several tokens on a GPU share: products, the residual stream, scratch memory.

A step has pieces of prompts (`PromptStep`), the last tokens of replies (`RowsStep`), or both (`MixedStep`): then the
replies' are its last rows, and products, norms and experts do not tell them apart. A product whose result is added to
the residual stream leaves partial sums. The norm before the next product adds them. Chunks of a few tokens, and decode
steps of several rows, take the products of `small_batch`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from engine.description.spec import ModelSpec
from engine.kernels.device_memory import device_zeros, part_of
from engine.runtime.pictures import PictureRoom
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.pieces import state_size
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.copied_matmul import CopiedTiles
from engine.targets.nvidia.kernels.products.matmul import fragments_size
from engine.targets.nvidia.kernels.products.prompt_products import PromptTiles, prompt_product, prompt_tiles
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.products.small_batch import (
    SmallBatchEpilogue,
    SmallBatchTiles,
    activated,
    columns_size,
    small_batch_product,
    small_batch_tiles,
    stored,
)
from engine.targets.nvidia.kernels.products.tensor_maps import on_device, operand_maps
from engine.targets.nvidia.kernels.residual_stream.prefill import (
    activate_prompt,
    activate_prompt_ungated,
    last_rows,
    least_gates,
    norm_embeddings,
    norm_prompt,
)
from engine.targets.nvidia.kernels.uops import Activation
from engine.targets.nvidia.matrices import Matrix, Product
from engine.targets.nvidia.norms import Norm, no_norm
from engine.targets.nvidia.step import Step, StepMemory, Sums


class PromptMemory(StepMemory):
    """The memory of prefill steps, which all share. A step of up to `chunk` tokens reads `prompt`, its state
    (`kernels.pieces`), `ids`, its tokens, int32 (chunk,), and if positions are embedded `places`, those of the tokens,
    int32 (chunk,). If prompts may have pictures, `pictures` are the parts of their embeddings, float32 (chunk * dim,)
    each, all but the first one zeros where a token is none. `seen`, if pictures are seen as a whole, is how many tokens
    each token sees, int32 (chunk,)."""

    def __init__(
        self, spec: ModelSpec, input_scales: InputScales, chunk: int, room: PictureRoom | None = None
    ) -> None:
        super().__init__(spec, input_scales)
        self.chunk = chunk
        self.pictures = [device_zeros(chunk * spec.dim) for _ in range(spec.picture_parts if room else 0)]
        self.seen = device_zeros(chunk, dtypes.int32) if room and room.whole else None
        # what a draft head reads of the tokens before those of a step (`engine.description.spec.Join`)
        self.hidden = device_zeros(chunk * spec.embedding.cols if spec.join or spec.narrowing else 1)
        self.prompt = device_zeros(state_size(chunk), dtypes.int32)
        self.ids = device_zeros(chunk, dtypes.int32)
        self.places = device_zeros(chunk if spec.positions else 1, dtypes.int32)
        self.maps = functools.cache(on_device)

    @property
    def attention_parts(self) -> list[Tensor]:
        """What the attention of the steps so far leaves for another kernel."""
        return [buffer for (name, _), buffer in self.scratch.items() if name == "attention"]


@dataclass(frozen=True)
class Pending:
    """The results that the next norm adds to the residual stream, and with `own` what that norm gives of the stream
    before. The stream is multiplied by `scale` and `factor` then."""

    results: Sequence[Sums]
    scale: Tensor | None = None
    factor: float = 1.0
    own: Norm | None = None


class PromptStep(Step):
    """A step of `tokens` tokens. `x`: what the last norm left for products, of the stream `h`, whose rows have `width`
    numbers. If it is of the last tokens of another one, that is the `whole`. `pending`: what that norm is to add to it;
    `beside`: the results of sublayers that others beside them follow, which read the stream as it is, and `own` the
    norm of the stream that is added to it with these (`Pending`). `layer_embeddings` are of `embedded` tokens, of which
    the step's begin at `first_embedded`."""

    x: Tensor
    whole: PromptStep | None = None
    has_any_pieces = False
    """Whether pieces may begin at any multiple of `PIECE_ROWS`."""

    def __init__(self, memory: PromptMemory, tokens: int, order: Order = "columns") -> None:
        """`order`: that of activations (`prompt_products.prompt_order`); "columns" of few tokens only."""
        super().__init__(memory)
        self.maps = memory.maps
        self.tokens, self.embedded, self.prompt = tokens, tokens, memory.prompt
        self.first_embedded = 0
        self.seen, self.pictures = memory.seen, memory.pictures
        self.width = self.spec.dim
        self.h = self.buffer("h", tokens * self.width)
        self.chip, self.order = chip(), order
        self.pending: Pending | None = None
        self.beside: list[Sums] = []
        self.own: Norm | None = None
        self._normed: tuple[int, Order, int] | None = None  # what `x` is: of a norm, in an order, of a stream

    @property
    def sizes(self) -> Tensor:
        """What tokens were divided by."""
        return self.buffer("sizes", self.tokens)

    def norm(self, norm: Norm, order: Order | None = None, keeps_sizes: bool = False) -> None:
        """Adds the pending results to the residual stream, and norms the stream for products with activations in an
        order, by default the step's; not if it is normed so already, for a sublayer beside. `keeps_sizes`: also a
        stream that is not normed is divided by its size, because float16 may not hold it, and the sizes are kept."""
        order, spec = order or self.order, self.spec
        normed = None if keeps_sizes else (id(norm), order, id(self.h))
        if normed and self._normed == normed and not self.pending:
            return
        self.x, self._normed = self.activations("x", self.width, order), normed
        pending = self.pending or Pending([])
        results = sorted(pending.results, key=lambda sums: sums.post_norm is None)
        post_norms = [sums.post_norm for sums in results if sums.post_norm is not None]
        own = pending.own and self.input_scales.norm_weight(pending.own.weight, 0)
        biases = [sums.bias for sums in pending.results if sums.bias is not None]
        kernel = norm_prompt(
            self.tokens, self.width, tuple(sums.parts for sums in results), spec.stream_eps,
            post_eps=spec.post_eps or spec.eps if post_norms else None, n_biases=len(biases),
            order=order, scaled=pending.scale is not None, is_normed=norm.is_normed or keeps_sizes,
            keeps_sizes=keeps_sizes, centred=spec.centred, shifted=norm.bias is not None,
            n_posts=max(len(post_norms), 1), adds_own=own is not None, scaled_by=pending.factor,
        )  # fmt: skip
        self.add(
            kernel,
            x=self.x,
            sizes=self.sizes if keeps_sizes else None,
            stream=self.h,
            sums=[sums.tensor for sums in results],
            biases=biases,
            post_norms=post_norms,
            own_norm=own,
            scale=pending.scale,
            **self.norm_vectors(norm),
        )
        self.pending = None

    def beside_stream(self, i: int) -> Tensor:
        n = self.tokens * self.width
        if self.whole is None:
            return self.buffer(f"stream {i}", n)
        return part_of(self.whole.beside_stream(i), self.first_embedded * self.width, n)

    def settle(self) -> None:
        """Adds the pending results to the residual stream, if there are any."""
        if self.pending:
            self.norm(no_norm(self.width))

    def renew(self, norm: Norm) -> None:
        """Replaces the residual stream by its norm."""
        self.settle()
        spec = self.spec
        kernel = norm_embeddings(self.tokens, spec.dim, spec.stream_eps, spec.centred, norm.bias is not None)
        self.add(kernel, stream=self.h, **self.norm_vectors(norm))
        self.changed()

    def changed(self) -> None:
        """Says that a kernel has changed the residual stream."""
        self._normed = None

    def norm_vectors(self, norm: Norm) -> dict[str, Tensor | None]:
        """The weight and the bias of a norm, for `norm_prompt`."""
        vector, bias = self.input_scales.norm_weight, norm.bias
        return {"norm": vector(norm.weight, 0), "norm_bias": None if bias is None else vector(bias, 0)}

    def product(self, part: Matrix, x: Tensor, name: str, rows: int = 0) -> Sums:
        """Adds a product of activations with the first `rows` rows of a matrix (0: all)."""
        tokens, rows = self.tokens, rows or part.rows
        if self.order == "columns":
            few = small_batch_tiles(part.layout, tokens, rows, part.cols, self.chip, True)
            out = self.buffer(name, few.splits * tokens * rows)
            kernel = small_batch_product(part.layout, tokens, rows, part.cols, few, stored(rows), name)
            self.add(kernel, out=out, x=x, planes=part.planes)
            return Sums(out, few.splits)
        tiles = prompt_tiles(part.layout, tokens, rows, part.cols, self.chip, False, self.order)
        out = self.buffer(name, tiles.parts * tokens * rows)
        self._multiply_many(part, rows, tiles, None, x, out, name)
        return Sums(out, tiles.parts)

    def _multiply_many(
        self, part: Matrix, rows: int, tiles: PromptTiles, activation: Activation | None, x: Tensor, out: Tensor,
        name: str,
    ) -> None:  # fmt: skip
        """Adds the product of many tokens with the first rows of a matrix, whose rows are pairs of gate and up if there
        is an activation."""
        paired, shape = activation is not None, (part.layout, self.tokens, rows, part.cols)
        for kernel, own in prompt_product(*shape, tiles, paired, name, activation or "silu"):
            maps = None
            if isinstance(own, CopiedTiles):
                tile = own.width, own.tokens
                maps = self.maps(operand_maps(part.planes[0], part.rows, x, self.tokens, part.cols, tile))
            self.add(kernel, out=out, x=x, prompt=self.prompt, planes=part.planes, maps=maps)

    def products(self, product: Product, name: str) -> list[Sums]:
        """Adds the products of the normed stream with each matrix of `product`."""
        return [self.product(part, self.x, f"{name}{i}") for i, part in enumerate(product.matrices)]

    def gate(
        self, matrices: Sequence[Matrix], activation: Activation, out: Tensor, sparsity: float = 0.0
    ) -> None:
        """Adds the product with gate and up, a matrix whose rows alternate or two (`gate_up_of`). With a `sparsity`,
        which needs two, only the largest gates count (`engine.description.feed_forward.Dense`)."""
        if len(matrices) == 2:
            gate, up = (self.product(part, self.x, f"gate_up{i}") for i, part in enumerate(matrices))
            parts, least, n = (gate.parts, up.parts), None, matrices[0].rows
            if sparsity:
                least = self.buffer("least gates", self.tokens)
                kernel = least_gates(self.tokens, n, gate.parts, sparsity)
                self.add(kernel, least=least, gate=gate.tensor)
            kernel = activate_prompt(self.tokens, n, parts, activation, self.order, least is not None)
            self.add(kernel, out=out, gate=gate.tensor, up=up.tensor, least=least)
            return
        (part,) = matrices
        if self.order == "columns":
            self.multiply(part, self.tiles(part), activated(activation), "gate_up", out=out)
            return
        tiles = prompt_tiles(part.layout, self.tokens, part.rows, part.cols, self.chip, True, self.order)
        self._multiply_many(part, part.rows, tiles, activation, self.x, out, "gate_up")

    def activate_ungated(
        self, matrix: Matrix, activation: Activation, out: Tensor, bias: Tensor | None = None,
        curve: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Adds the product with the up of a layer without a gate (`activate_prompt_ungated`)."""
        up, has_bias, has_curve = self.product(matrix, self.x, "up"), bias is not None, curve is not None
        kernel = activate_prompt_ungated(
            self.tokens, matrix.rows, up.parts, activation, has_bias, self.order, has_curve
        )
        self.add(kernel, out=out, up=up.tensor, bias=bias, curve=curve)

    def tiles(self, part: Matrix) -> SmallBatchTiles:
        """How a product of few tokens is divided that leaves one sum."""
        return small_batch_tiles(part.layout, self.tokens, part.rows, part.cols, self.chip)

    def multiply(
        self,
        part: Matrix,
        tiles: SmallBatchTiles,
        epilogue: SmallBatchEpilogue,
        name: str,
        **others: Tensor | None,
    ) -> None:
        """Adds a product of the normed stream of few tokens. `others`: the buffers of its epilogue."""
        kernel = small_batch_product(part.layout, self.tokens, part.rows, part.cols, tiles, epilogue, name)
        self.add(kernel, x=self.x, planes=part.planes, **others)

    def activations(self, name: str, cols: int, order: Order | None = None) -> Tensor:
        """Scratch activations, float16, in an order, by default the step's. Those of an order or a width are not of
        another: what is no activation is zero."""
        order = order or self.order
        size = columns_size if order == "columns" else fragments_size
        return self.buffer(f"{name} of {cols} in {order}", size(self.tokens, cols), dtypes.float16)


class RowsStep(PromptStep):
    """A decode step of several rows, after fewer than `limit` tokens each: a prompt of the next tokens of different
    sequences, or of guesses too, if it `checks`. It reads `state`, int32 (4, rows) (`BatchKernels`)."""

    def __init__(
        self, memory: PromptMemory, state: Tensor, rows: int, limit: int, checks: bool = False
    ) -> None:
        super().__init__(memory, rows)
        self.state, self.limit, self.checks = state, limit, checks

    def stacked(self, product: Product, name: str, bias: Tensor | None = None, limit: float = 0.0) -> Tensor:
        """Adds a product of the normed stream, within a limit if there is one; returns its rows, of all tokens one
        after the other."""
        first, total = 0, product.stack.rows
        rows = self.buffer(name, self.tokens * total)
        for i, part in enumerate(product.matrices):
            epilogue = stored(total, first, bias is not None, limit)
            self.multiply(part, self.tiles(part), epilogue, f"{name}{i}", out=rows, bias=bias)
            first += part.rows
        return rows


class MixedStep(PromptStep):
    """A step of `tokens` rows, of which the last are those of `replies`, `rows` of them after fewer than `limit` tokens
    each, which read `state`. They begin at `first_reply`. What follows the last sublayer that keeps something is
    computed of the replies alone, by `replies` as a step."""

    has_any_pieces = True

    def __init__(
        self, memory: PromptMemory, tokens: int, order: Order, state: Tensor, prompt: Tensor, rows: int, limit: int
    ) -> None:  # fmt: skip
        """`prompt`: the state of a step of the replies alone (`kernels.pieces`)."""
        super().__init__(memory, tokens, order)
        self.replies = replies = RowsStep(memory, state, rows, limit)
        replies.sequence, replies.add, replies.embedded = self.sequence, self.add, tokens
        self.first_reply = replies.first_embedded = tokens - rows
        replies.prompt, replies.whole = prompt, self
        replies.h = part_of(self.h, self.first_reply * self.spec.dim, rows * self.spec.dim)

    def of_replies(
        self,
        made: Sequence[Sums],
        product: Product,
        name: str,
        bias: Tensor | None = None,
        limit: float = 0.0,
    ) -> Tensor:
        """The rows of replies of the products that were `made`, as `RowsStep.stacked`."""
        rows = self.replies.buffer(f"{name} of replies", self.replies.tokens * product.stack.rows)
        parts, sizes = tuple(m.parts for m in made), tuple(part.rows for part in product.matrices)
        runs = Runs(self.tokens, parts, sizes, limit=limit)
        kernel = last_rows(runs, self.replies.tokens, bias is not None)
        self.add(kernel, rows=rows, sums=[m.tensor for m in made], bias=bias)
        return rows
