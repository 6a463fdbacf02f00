"""A short convolution on a GPU: inputs . convolution . out"""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.recurrent import ShortConv
from engine.kernels.device_memory import to_device
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.epilogues import STORE
from engine.targets.nvidia.kernels.recurrent.convolved import keep_inputs
from engine.targets.nvidia.kernels.recurrent.short_conv import ConvMemory, short_conv, short_conv_prompt
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import PromptStep, RowsStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.handler import Loading
from engine.targets.nvidia.sublayers.recurrent import RecurrentHandler, state_room


class ShortConvHandler(RecurrentHandler):
    name = "conv"

    def __init__(self, part: ShortConv, loading: Loading) -> None:
        self.conv = ConvMemory(part.channels, part.taps, **state_room(loading))
        self._load(loading, [part.inputs], part.out, self.conv)
        self.vectors = {"conv": to_device(loading.weights.vector(part.conv))}

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        rows, out = step.buffer("conv", self.conv.rows), step.buffer("remembered", permuted_size(self.width))
        step.multiply(self.in_proj, norm, STORE, {"out": rows}, "conv_inputs")
        state, scale = step.memory.state, step.input_scale(self.out.single_matrix)
        ins = {"memory": self.memory, "rows": rows, "state": state, "input_scale": scale}
        step.add(short_conv(self.conv), out=out, **ins, **self.vectors)
        step.finish(self.out, out, "conv_out")

    def _add_rows(
        self, step: RowsStep, rows: Tensor, remembered: Tensor, order: Order = "columns", out_row: int = 0
    ) -> None:
        kernel = short_conv(self.conv, step.tokens, order, out_row)
        step.add(kernel, out=remembered, memory=self.memory, rows=rows, state=step.state, **self.vectors)

    def _add_prompts(self, step: PromptStep, made: list[Sums], checks: bool = False) -> Tensor:
        runs, out = self._runs(step.tokens, made), self._remembered(step)
        ins = {"memory": self.memory, "sums": [run.tensor for run in made], "prompt": step.prompt}
        step.add(short_conv_prompt(self.conv, runs, step.order), out=out, **ins, **self.vectors)
        step.add(keep_inputs(self.conv, runs, step.has_any_pieces, checks), **ins)
        return out
