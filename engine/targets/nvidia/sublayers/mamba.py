"""A Mamba 2 layer on a GPU: inputs . mamba . norm . out"""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from engine.description.recurrent import Mamba
from engine.kernels.device_memory import to_device
from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.epilogues import STORE
from engine.targets.nvidia.kernels.recurrent.convolved import keep_inputs
from engine.targets.nvidia.kernels.recurrent.mamba import (
    MambaHeads,
    convolve_prompt,
    group_norm,
    mamba,
    scan_prompt,
)
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import PromptStep, RowsStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.handler import Loading
from engine.targets.nvidia.sublayers.recurrent import RecurrentHandler, state_room

_MOST_THREADS = 1024  # of a block, which has a head of a token


class MambaHandler(RecurrentHandler):
    """`vectors`: conv and conv_bias, those of the convolution, decay, step_bias and skip. `norm`: the weight of the
    norm of groups."""

    name = "mamba"

    @classmethod
    def lacks(cls, part: Mamba) -> str:
        heads = MambaHeads(part.heads, part.groups, part.head_dim, part.size, part.taps, 0.0)
        is_fine = part.head_dim % 16 == 0 and part.head_dim * heads.parts <= _MOST_THREADS
        return "" if is_fine else f"Mamba 2 heads of {part.head_dim} elements and states of {part.size}"

    def __init__(self, part: Mamba, loading: Loading) -> None:
        weights = loading.weights
        sizes = part.heads, part.groups, part.head_dim, part.size, part.taps
        self.heads = MambaHeads(*sizes, weights.spec.eps, **state_room(loading))
        self._load(loading, [part.gate, part.channels, part.step], part.out, self.heads)
        vectors = {"conv": part.conv, "decay": part.decay, "step_bias": part.step_bias, "skip": part.skip}
        self.vectors = {name: to_device(weights.vector(vector)) for name, vector in vectors.items()}
        no_bias = np.zeros(self.heads.channels, np.float32)
        self.vectors["conv_bias"] = to_device(weights.vector(part.conv_bias) if part.conv_bias else no_bias)
        self.norm = loading.vector(part.norm)

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        rows, out = (
            step.buffer("mamba", self.heads.rows),
            step.buffer("remembered", permuted_size(self.width)),
        )
        products = step.buffer("mamba products", self.width)
        step.multiply(self.in_proj, norm, STORE, {"out": rows}, "mamba_inputs")
        ins = {"memory": self.memory, "rows": rows, "state": step.memory.state}
        step.add(mamba(self.heads), products=products, **ins, **self.vectors)
        scale = step.input_scale(self.out.single_matrix)
        kernel = group_norm(self.heads, has_norm=self.norm is not None)
        step.add(kernel, out=out, products=products, norm=self.norm, input_scale=scale)
        step.finish(self.out, out, "mamba_out")

    def _add_rows(
        self, step: RowsStep, rows: Tensor, remembered: Tensor, order: Order = "columns", out_row: int = 0
    ) -> None:
        products = step.buffer("mamba products", step.tokens * self.width)
        ins = {"memory": self.memory, "rows": rows, "state": step.state}
        step.add(mamba(self.heads, step.tokens), products=products, **ins, **self.vectors)
        kernel = group_norm(self.heads, step.tokens, order, out_row, self.norm is not None)
        step.add(kernel, out=remembered, products=products, norm=self.norm)

    def _add_prompts(self, step: PromptStep, made: list[Sums], checks: bool = False) -> Tensor:
        heads, tokens, runs = self.heads, step.tokens, self._runs(step.tokens, made)
        channels = step.buffer("mamba channels", tokens * heads.channels)
        products, own = step.buffer("mamba sums", heads.parts * tokens * self.width), {**self.vectors}
        of_conv = {name: own.pop(name) for name in ("conv", "conv_bias")}
        ins = {"memory": self.memory, "sums": [run.tensor for run in made], "prompt": step.prompt}
        step.add(convolve_prompt(heads, runs), channels=channels, **ins, **of_conv)
        scan = scan_prompt(heads, runs, step.has_any_pieces, checks)
        step.add(scan, products=products, channels=channels, **ins, **own)
        step.add(keep_inputs(heads, runs, step.has_any_pieces, checks), **ins)
        out = self._remembered(step)
        kernel = group_norm(heads, tokens, step.order, has_norm=self.norm is not None, runs=runs)
        step.add(kernel, out=out, products=products, sums=ins["sums"], norm=self.norm)
        return out
