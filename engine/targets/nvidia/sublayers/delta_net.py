"""A gated delta net on a GPU: inputs . delta net . out"""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.sublayers import DeltaNet
from engine.kernels.device_memory import device_zeros, to_device
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.delta_nets.delta_decode import delta_decode, parts_of
from engine.targets.nvidia.kernels.delta_nets.delta_net import DeltaHeads
from engine.targets.nvidia.kernels.delta_nets.delta_prefill import (
    GROUP,
    coefficients_size,
    delta_inputs,
    delta_scan,
    gated_norm,
    vectors_size,
)
from engine.targets.nvidia.kernels.device import multiprocessors
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.epilogues import STORE
from engine.targets.nvidia.kernels.products.head_norm import HeadNorm
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.matrices import product_of
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import MixedStep, PromptStep, RowsStep, Sums
from engine.targets.nvidia.sublayers.handler import Handler, Loading

CHECKED = 8
"""The most rows of a check. Each leaves a state of its own, for one sequence: those of several would take much
memory."""


class DeltaNetHandler(Handler):
    """The weights and the state of a gated delta net. `vectors`: conv (those of the convolution), decay, decay_bias and
    norm. `memory`: the state of all sequences (`DeltaHeads.memory_size`)."""

    is_storing = True

    def __init__(self, part: DeltaNet, loading: Loading) -> None:
        weights = loading.weights
        self.heads = DeltaHeads(
            part.key_heads,
            part.value_heads,
            part.size,
            part.taps,
            weights.spec.eps,
            sequences=loading.parallel,
            slots=2 if loading.parallel > 1 else 1 + CHECKED,
            shares_in_turn=part.shares_in_turn,
        )
        self.in_proj = product_of([*part.qkv, part.gate, part.beta, part.alpha])
        self.out = product_of([part.out])
        self.products = self.in_proj, self.out
        self.vectors = {
            name: to_device(weights.vector(vector))
            for name, vector in zip(("conv", "decay", "decay_bias", "norm"), part.vectors, strict=True)
        }
        self.memory = device_zeros(self.heads.memory_size)

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        heads, parts = self.heads, parts_of(self.heads, multiprocessors())
        rows, out = step.buffer("delta", heads.rows), step.buffer("remembered", permuted_size(heads.width))
        # If several blocks have a head, the last product is left to norm it.
        squares = step.buffer("head_squares", heads.value * parts) if parts > 1 else None
        head_norm = HeadNorm(heads.size, parts, heads.eps) if parts > 1 else None
        step.multiply(self.in_proj, norm, STORE, {"out": rows}, "delta_inputs")
        step.add(
            delta_decode(heads, 0, parts),
            out=out,
            squares=squares,
            memory=self.memory,
            rows=rows,
            **self.vectors,
            state=step.memory.state,
            input_scale=step.input_scale(self.out.single_matrix),
        )
        step.finish(self.out, out, "delta_out", head_norm, head_sums=squares)

    def rows(self, step: RowsStep, norm: Norm) -> Sums:
        step.norm(norm)
        if step.checks:
            made = step.products(self.in_proj, "delta")
            return self._output(step, self._add_prompts(step, made, checks=True))
        remembered = self._remembered(step)
        self._add_rows(step, step.stacked(self.in_proj, "delta"), remembered)
        return self._output(step, remembered)

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        step.norm(norm)
        return self._output(step, self._add_prompts(step, step.products(self.in_proj, "delta")))

    def mixed(self, step: MixedStep, norm: Norm) -> Sums:
        step.norm(norm)
        made = step.products(self.in_proj, "delta")
        remembered = self._add_prompts(step, made)
        rows = step.of_replies(made, self.in_proj, "delta")
        self._add_rows(step.replies, rows, remembered, step.order, step.first_reply)
        return self._output(step, remembered)

    def last_mixed(self, step: MixedStep, norm: Norm) -> Sums:
        step.norm(norm)
        made = step.products(self.in_proj, "delta")
        self._add_prompts(step, made)
        remembered = self._remembered(step.replies)
        self._add_rows(step.replies, step.of_replies(made, self.in_proj, "delta"), remembered)
        return self._output(step.replies, remembered)

    def _add_rows(
        self, step: RowsStep, rows: Tensor, remembered: Tensor, order: Order = "columns", out_row: int = 0
    ) -> None:
        """Adds the delta net of rows of inputs, whose result are the rows of `remembered` from `out_row` on, in an
        order."""
        kernel = delta_decode(self.heads, step.tokens, order=order, out_row=out_row)
        step.add(kernel, out=remembered, memory=self.memory, rows=rows, **self.vectors, state=step.state)

    def _add_prompts(self, step: PromptStep, made: list[Sums], checks: bool = False) -> Tensor:
        """Adds the delta net of pieces of prompts, of the products with `in_proj`; returns the result of all rows. If
        it `checks`, the piece is the rows of a check."""
        heads, tokens, group = self.heads, step.tokens, 1 if checks else GROUP
        sums, counts = [run.tensor for run in made], tuple(run.parts for run in made)
        runs = Runs(tokens, counts, tuple(part.rows for part in self.in_proj.matrices))
        end = heads.channels + heads.width
        of_channels, channels = runs.within(range(heads.channels))
        of_gate, gate = runs.within(range(heads.channels, end))
        of_inputs, read = runs.within(range(heads.channels), range(end, heads.rows))
        products, own = step.buffer("delta products", tokens * heads.width), {**self.vectors}
        head_norm = own.pop("norm")
        shared = {
            "memory": self.memory,
            "vectors": step.buffer("delta vectors", vectors_size(heads, tokens)),
            "coefficients": step.buffer("delta coefficients", coefficients_size(heads, tokens, group)),
            "prompt": step.prompt,
        }
        step.add(delta_inputs(heads, of_inputs, group), **shared, sums=[sums[i] for i in read], **own)
        scan = delta_scan(heads, of_channels, step.has_any_pieces, checks)
        step.add(scan, products=products, **shared, sums=[sums[i] for i in channels], conv=own["conv"])
        remembered, kernel = self._remembered(step), gated_norm(heads, of_gate, step.order)
        step.add(kernel, out=remembered, products=products, norm=head_norm, sums=[sums[i] for i in gate])
        return remembered

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("QKV projection"), *self.in_proj.planes)
        uses.add(BufferUse("delta net"), self.memory, *self.vectors.values())
        uses.add(BufferUse("attention output"), *self.out.planes)

    def _output(self, step: PromptStep, remembered: Tensor) -> Sums:
        return step.product(self.out.single_matrix, remembered, "delta_out")

    def _remembered(self, step: PromptStep) -> Tensor:
        return step.activations("remembered", self.heads.width)
