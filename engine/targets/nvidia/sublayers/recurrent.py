"""A layer with a recurrent state on a GPU: inputs . what changes the state . out"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from tinygrad import Tensor

from engine.description.sublayers import Weight
from engine.kernels.device_memory import device_zeros
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.runs import Runs
from engine.targets.nvidia.kernels.recurrent.state_memory import StateMemory
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import MixedStep, PromptStep, RowsStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.handler import Handler, Loading

CHECKED = 8
"""The most rows of a check. Each leaves a state of its own, for one sequence: those of several would take much
memory."""


def state_room(loading: Loading) -> dict[str, int]:
    """The sequences and the slots of a layer's `StateMemory`."""
    return {"sequences": loading.parallel, "slots": 2 if loading.parallel > 1 else 1 + CHECKED}


class RecurrentHandler(Handler):
    """The weights and the state of such a layer. `in_proj`: the product with its input; `width`: elements of what it
    makes of that, the input of `out`. `memory`: the states of all sequences (`of`). `vectors`: those of the layer, by
    the names of kernels' buffers."""

    is_storing = True
    name: str
    vectors: dict[str, Tensor]

    def _load(self, loading: Loading, inputs: Sequence[Weight], out: Weight, of: StateMemory) -> None:
        self.in_proj, self.out, self.of = loading.product(*inputs), loading.product(out), of
        self.products, self.width = (self.in_proj, self.out), out.cols
        self.memory = device_zeros(of.memory_size)

    def rows(self, step: RowsStep, norm: Norm) -> Sums:
        step.norm(norm)
        if step.checks:
            made = step.products(self.in_proj, self.name)
            return self._output(step, self._add_prompts(step, made, checks=True))
        remembered = self._remembered(step)
        self._add_rows(step, step.stacked(self.in_proj, self.name), remembered)
        return self._output(step, remembered)

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        step.norm(norm)
        return self._output(step, self._add_prompts(step, step.products(self.in_proj, self.name)))

    def mixed(self, step: MixedStep, norm: Norm) -> Sums:
        step.norm(norm)
        made = step.products(self.in_proj, self.name)
        remembered = self._add_prompts(step, made)
        rows = step.of_replies(made, self.in_proj, self.name)
        self._add_rows(step.replies, rows, remembered, step.order, step.first_reply)
        return self._output(step, remembered)

    def last_mixed(self, step: MixedStep, norm: Norm) -> Sums:
        step.norm(norm)
        made = step.products(self.in_proj, self.name)
        self._add_prompts(step, made)
        remembered = self._remembered(step.replies)
        self._add_rows(step.replies, step.of_replies(made, self.in_proj, self.name), remembered)
        return self._output(step.replies, remembered)

    @abstractmethod
    def _add_rows(
        self, step: RowsStep, rows: Tensor, remembered: Tensor, order: Order = "columns", out_row: int = 0
    ) -> None:
        """Adds the layer of rows of inputs, whose result are the rows of `remembered` from `out_row` on, in an
        order."""

    @abstractmethod
    def _add_prompts(self, step: PromptStep, made: list[Sums], checks: bool = False) -> Tensor:
        """Adds the layer of pieces of prompts, of the products with `in_proj`; returns the result of all rows. If it
        `checks`, the piece is the rows of a check."""

    def _runs(self, tokens: int, made: Sequence[Sums]) -> Runs:
        """The products with `in_proj`."""
        sizes = tuple(part.rows for part in self.in_proj.matrices)
        return Runs(tokens, tuple(run.parts for run in made), sizes)

    def roles(self, uses: BufferUses) -> None:
        uses.add(BufferUse("QKV projection"), *self.in_proj.planes)
        uses.add(BufferUse("delta net"), self.memory, *self.vectors.values())
        uses.add(BufferUse("attention output"), *self.out.planes)

    def _output(self, step: PromptStep, remembered: Tensor) -> Sums:
        return step.product(self.out.single_matrix, remembered, f"{self.name}_out")

    def _remembered(self, step: PromptStep) -> Tensor:
        return step.activations("remembered", self.width)
