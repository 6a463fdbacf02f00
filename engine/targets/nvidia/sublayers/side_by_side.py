"""A feed-forward layer and experts side by side on a GPU.

In decode they share kernels: the router and the layer's gate+up, and both downs. Another kernel adds their results.
"""

from __future__ import annotations

from engine.description.feed_forward import SideBySide
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.epilogues import STORE_SQUARES, routed
from engine.targets.nvidia.kernels.products.matvec import matvec
from engine.targets.nvidia.kernels.residual_stream.post_norm import add_both, add_both_blocks
from engine.targets.nvidia.kernels.residual_stream.prefill import add_normed_sums
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.matrices import Product
from engine.targets.nvidia.norms import Input, Norm, inputs_of
from engine.targets.nvidia.prompt_step import PromptStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.dense import DenseHandler
from engine.targets.nvidia.sublayers.experts import ExpertsHandler, chosen_experts
from engine.targets.nvidia.sublayers.handler import Handler, Loading


class SideBySideHandler(Handler):
    """A feed-forward layer and a mixture of experts, with the norms before them and before the router, and the weights
    of those of their results. In decode, one kernel has the router beside the feed-forward layer's gate and up
    (`first`), unless these differ in type, and one has both downs (`down`)."""

    def __init__(self, part: SideBySide, loading: Loading) -> None:
        weights = loading.weights
        self.dense, self.experts = DenseHandler(part.dense, loading), ExpertsHandler(part.experts, loading)
        self.dense_norm = Norm(weights.vector(part.dense_norm))
        self.experts_norm = Norm(weights.vector(part.experts_norm))
        self.router_norm = Norm(weights.vector(part.router_scale))
        self.dense_post_norm = loading.vector(part.dense_post_norm)
        self.experts_post_norm = loading.vector(part.experts_post_norm)
        dense, experts = self.dense, self.experts
        can_join = len(dense.gate_up.matrices) == 1 and experts.router_bias is None
        self.first = Product(experts.router.matrices, beside=dense.gate_up) if can_join else None
        self.down = Product(experts.down.matrices, experts.down.experts, beside=dense.down)
        first = [self.first] if self.first else [experts.router, dense.gate_up]
        self.products = *first, experts.gate_up, self.down

    def inputs(self, _: Norm) -> list[Input]:
        return [
            *inputs_of(self.dense_norm, self.dense.gate_up),
            *inputs_of(self.router_norm, self.experts.router),
            *inputs_of(self.experts_norm, self.experts.gate_up),
        ]

    def decode(self, step: DecodeStep, _: Norm) -> None:
        dim, experts, dense = step.spec.dim, self.experts, self.dense
        if self.first:
            x = [step.buffer("activated", permuted_size(dense.part.width))]
            input_scale = step.input_scale(dense.down.single_matrix)
            buffers = {"logits": experts.routed(step)[0], "out": x[0], "input_scale": input_scale}
            epilogue = routed(experts.part.count, dense.part.activation)
            norms = self.router_norm, self.dense_norm
            step.multiply(self.first, norms, epilogue, buffers, "router_gate_up")
        else:
            experts.route(step, self.router_norm)
            x = dense.gate(step, self.dense_norm, self.down)
        of_experts = experts.choose(step, self.experts_norm, self.down)
        product, schedule = self.down, self.down.schedule
        rows, squares = step.buffer("both_rows", 2 * dim), step.buffer("both_squares", product.n_blocks)
        step.add(
            matvec(product.stack, schedule, STORE_SQUARES, "both_down"),
            out=rows,
            squares=squares,
            **chosen_experts(step.memory, experts.part.used),
            x=of_experts,
            beside_x=x,
            planes=product.planes,
        )
        counts = experts.down.stack.n_blocks(schedule), dense.down.stack.n_blocks(schedule)
        step.add(
            add_both(dim, counts, len(step.inputs), step.spec.eps, step.scale is not None),
            **step.begin_stream(add_both_blocks(dim)),
            rows=rows,
            row_squares=squares,
            first_norm=self.experts_post_norm,
            second_norm=self.dense_post_norm,
            post_norm=step.post_norm,
            scale=step.scale,
        )

    def prefill(self, step: PromptStep, _: Norm) -> Sums:
        tokens, spec = step.tokens, step.spec
        dense = self.dense.prefill(step, self.dense_norm)
        experts = self.experts.compute(step, self.experts_norm, self.router_norm)
        result = step.buffer("both", tokens * spec.dim)
        kernel = add_normed_sums(tokens, spec.dim, (dense.parts, experts.parts), spec.eps)
        norms = {"first_norm": self.dense_post_norm, "second_norm": self.experts_post_norm}
        step.add(kernel, out=result, first=dense.tensor, second=experts.tensor, **norms)
        return Sums(result, 1)

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("norm"), self.dense_post_norm, self.experts_post_norm)
        self.dense.roles(uses)
        self.experts.roles(uses)
