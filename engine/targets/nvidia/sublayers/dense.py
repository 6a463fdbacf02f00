"""A feed-forward layer on a GPU: gate+up . down"""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.sublayers import Dense
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.epilogues import STORE, activate, activated, bent
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.matrices import Product, gate_up_of, product_of
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import PromptStep, Sums
from engine.targets.nvidia.sublayers.handler import Handler, Loading


class DenseHandler(Handler):
    """The weights of a feed-forward layer. `gate_up` is one matrix with alternating rows if both have the same type,
    and up alone if there is no gate."""

    @classmethod
    def lacks(cls, part: Dense) -> str:
        if part.curve:
            return "the activation xIELU"
        if part.gate and part.up_bias:
            return "biases beside gates"
        return "gates of which only the largest count" if part.sparsity else ""

    def __init__(self, part: Dense, loading: Loading) -> None:
        self.part = part
        self.gate_up = Product(gate_up_of(part))
        self.up_bias, self.down_bias = map(loading.vector, (part.up_bias, part.down_bias))
        self.down = product_of([part.down])
        self.products = self.gate_up, self.down

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        step.finish(self.down, self.gate(step, norm), "down", bias=self.down_bias)

    def gate(self, step: DecodeStep, norm: Norm) -> Tensor:
        """Adds the first product of a decode step; returns the input of the last one."""
        width, activation = self.part.width, self.part.activation
        input_scale = step.input_scale(self.down.single_matrix)
        out = step.buffer("activated", permuted_size(width))
        if self.part.gate is None:
            epilogue = bent(activation, self.up_bias is not None)
            ins = {"out": out, "input_scale": input_scale, "bias": self.up_bias}
            step.multiply(self.gate_up, norm, epilogue, ins, "up")
        elif len(self.gate_up.matrices) == 1:
            buffers = {"out": out, "input_scale": input_scale}
            step.multiply(self.gate_up, norm, activated(activation), buffers, "gate_up")
        else:
            rows = step.buffer("gate_up", 2 * width)
            step.multiply(self.gate_up, norm, STORE, {"out": rows}, "gate_up")
            step.add(activate(width, activation), out=out, rows=rows, input_scale=input_scale)
        return out

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        step.norm(norm)
        width, activation = self.part.width, self.part.activation
        out = step.activations("activated", width)
        if self.part.gate is None:
            step.bend(self.gate_up.single_matrix, activation, out, self.up_bias)
        else:
            step.gate(self.gate_up.matrices, activation, out)
        down = step.product(self.down.single_matrix, out, "down")
        return Sums(down.tensor, down.parts, self.down_bias)

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("FFN gate+up"), *self.gate_up.planes)
        uses.add(BufferUse("FFN down"), *self.down.planes)
        uses.add(BufferUse("norm"), self.up_bias, self.down_bias)
