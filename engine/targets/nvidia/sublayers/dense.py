"""A feed-forward layer on a GPU: gate+up . down"""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from engine.description.feed_forward import Dense
from engine.kernels.device_memory import to_device
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.epilogues import (
    STORE,
    activate,
    activated,
    activated_in_digits,
    activated_ungated,
    makes_digits,
)
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.matrices import Product
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import PromptStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.handler import Handler, Loading


class DenseHandler(Handler):
    """The weights of a feed-forward layer. `gate_up` is one matrix with alternating rows if both have the same type
    and gates are not sparse, and up alone if there is no gate. `curve`: that of the description, float32 (4,)."""

    @classmethod
    def lacks(cls, part: Dense) -> str:
        if part.gate and (part.gate_bias or part.up_bias):
            return "biases beside gates"
        return "a norm between the products of a feed-forward layer" if part.hidden_norm else ""

    def __init__(self, part: Dense, loading: Loading) -> None:
        self.part = part
        # What counts of sparse gates is known only once all are.
        apart = (
            loading.matrices(part.gate) + loading.matrices(part.up) if part.gate and part.sparsity else None
        )
        self.gate_up = Product(apart or loading.gate_up(part), place="gate and up" if part.gate else "")
        self.up_bias, self.down_bias = map(loading.vector, (part.up_bias, part.down_bias))
        self.curve = to_device(np.asarray(part.curve, np.float32)) if part.curve else None
        self.down = Product(loading.matrices(part.down), place="down")
        self.products = self.gate_up, self.down

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        step.finish(self.down, self.gate(step, norm), "down", bias=self.down_bias)

    def gate(self, step: DecodeStep, norm: Norm, down: Product | None = None) -> list[Tensor]:
        """Adds the first product of a decode step; returns the input of the last one, or of the product `down`, or its
        digits."""
        width, activation, down = self.part.width, self.part.activation, down or self.down
        input_scale, bits = step.input_scale(self.down.single_matrix), down.stack.input_scale_bits[0]
        out = step.buffer("activated", permuted_size(width))
        if self.part.gate is None:
            epilogue = activated_ungated(activation, self.up_bias is not None, self.curve is not None)
            ins = {"out": out, "input_scale": input_scale, "bias": self.up_bias, "curve": self.curve}
            step.multiply(self.gate_up, norm, epilogue, ins, "up")
        elif len(self.gate_up.matrices) > 1:
            rows = step.buffer("gate_up", 2 * width)
            step.multiply(self.gate_up, norm, STORE, {"out": rows}, "gate_up")
            step.add(
                activate(width, activation, sparsity=self.part.sparsity),
                out=out,
                rows=rows,
                input_scale=input_scale,
            )
        elif down.stack.digits and makes_digits(bits, self.gate_up.schedule.block_rows // 2, width):
            made = step.digits("activated", bits, width, 1)
            buffers = dict(zip(("digits", "factors"), made, strict=True))
            step.multiply(self.gate_up, norm, activated_in_digits(activation, bits), buffers, "gate_up")
            return made
        else:
            buffers = {"out": out, "input_scale": input_scale}
            step.multiply(self.gate_up, norm, activated(activation), buffers, "gate_up")
        return [out]

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        step.norm(norm)
        width, activation = self.part.width, self.part.activation
        out = step.activations("activated", width)
        if self.part.gate is None:
            step.activate_ungated(self.gate_up.single_matrix, activation, out, self.up_bias, self.curve)
        else:
            step.gate(self.gate_up.matrices, activation, out, self.part.sparsity)
        down = step.product(self.down.single_matrix, out, "down")
        return Sums(down.tensor, down.parts, self.down_bias)

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("FFN gate+up"), *self.gate_up.planes)
        uses.add(BufferUse("FFN down"), *self.down.planes)
        uses.add(BufferUse("norm"), self.up_bias, self.down_bias, self.curve)
