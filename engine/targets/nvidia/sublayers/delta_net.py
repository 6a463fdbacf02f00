"""A gated delta net on a GPU: inputs . delta net . out"""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.recurrent import DeltaNet
from engine.kernels.device_memory import to_device
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.device import multiprocessors
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.epilogues import STORE
from engine.targets.nvidia.kernels.products.head_norm import HeadNorm
from engine.targets.nvidia.kernels.recurrent.delta_decode import delta_decode, parts_of
from engine.targets.nvidia.kernels.recurrent.delta_net import DeltaHeads
from engine.targets.nvidia.kernels.recurrent.delta_prefill import (
    GROUP,
    coefficients_size,
    delta_inputs,
    delta_scan,
    gated_norm,
    vectors_size,
)
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import PromptStep, RowsStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.handler import Loading
from engine.targets.nvidia.sublayers.recurrent import RecurrentHandler, state_room


class DeltaNetHandler(RecurrentHandler):
    """A gated delta net. `vectors`: conv (those of the convolution), decay, decay_bias and norm."""

    name = "delta"

    def __init__(self, part: DeltaNet, loading: Loading) -> None:
        weights = loading.weights
        self.heads = DeltaHeads(
            part.key_heads,
            part.value_heads,
            part.size,
            part.taps,
            weights.spec.eps,
            shares_in_turn=part.shares_in_turn,
            **state_room(loading),
        )
        self._load(loading, [*part.qkv, part.gate, part.beta, part.alpha], part.out, self.heads)
        self.vectors = {
            name: to_device(weights.vector(vector))
            for name, vector in zip(("conv", "decay", "decay_bias", "norm"), part.vectors, strict=True)
        }

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

    def _add_rows(
        self, step: RowsStep, rows: Tensor, remembered: Tensor, order: Order = "columns", out_row: int = 0
    ) -> None:
        kernel = delta_decode(self.heads, step.tokens, order=order, out_row=out_row)
        step.add(kernel, out=remembered, memory=self.memory, rows=rows, **self.vectors, state=step.state)

    def _add_prompts(self, step: PromptStep, made: list[Sums], checks: bool = False) -> Tensor:
        heads, tokens, group = self.heads, step.tokens, 1 if checks else GROUP
        sums, runs = [run.tensor for run in made], self._runs(tokens, made)
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
