"""A mixture of experts in the product of a matrix and one vector: the rows of the experts that the token takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import UOp
from tinygrad.uop.ops import AxisType, Ops

from engine.targets.nvidia.kernels.products.digit_rows import vector_unit
from engine.targets.nvidia.kernels.products.expert_choice import BY_LOGITS, ExpertChoice, Scores
from engine.targets.nvidia.kernels.uops import f32, load, load_index, store
from engine.targets.nvidia.kernels.weights.matrix_bytes import units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout


@dataclass(frozen=True)
class ChosenExperts:
    """The experts of a mixture that a token takes: `used` of `n`. Each gives a result of its own, from the same vector;
    or their results are `added`, each times its probability, from a vector for each. With a `bias` each row has one.
    The first of the two products chooses the experts, by `scores`; if gate and up differ in type, it has a matrix of
    each. With `all_of_them`, a token takes all, in their order, and each has a vector of its own: nothing is chosen.
    Their probabilities are divided by their sum, or by `least_sum` if it is larger, unless that is None; then
    multiplied by a number for each expert if they are `scaled`. If a mixture `weighs_inputs`, the results of the first
    product are those of the vector times the probability, which the second one then does not see."""

    used: int
    n: int
    added: bool
    bias: bool = False
    least_sum: float | None = None
    scaled: bool = False
    scores: Scores = BY_LOGITS
    all_of_them: bool = False
    weighs_inputs: bool = False

    @property
    def vectors(self) -> int:
        """Vectors that the product reads."""
        return self.used if self.added or self.all_of_them else 1

    @property
    def chooses(self) -> bool:
        """Whether the product chooses the experts."""
        return not (self.added or self.all_of_them)


class ExpertRows:
    """The rows of the chosen experts' matrices in a kernel, whose buffers are those of `matvec.matvec`. `rows`: of a
    matrix of an expert, and `all_rows` those of all its matrices. `thread` is the number of the current one in its
    block of `n_threads`."""

    def __init__(
        self,
        chosen: ChosenExperts,
        rows: int,
        all_rows: int,
        thread: UOp,
        n_threads: int,
        experts: UOp | None,
        probabilities: UOp | None,
        counts: UOp | None,
        router: UOp | None,
        scales: UOp | None,
        biases: UOp | None,
        choice_bias: UOp | None,
    ) -> None:
        self._chosen, self._rows, self._all_rows, self._thread = chosen, rows, all_rows, thread
        self._experts, self._probabilities, self._counts = experts, probabilities, counts
        self._ids = experts
        self._scales, self._biases = scales, biases
        self.slot = self.choice = None
        if not chosen.added:
            self.slot = UOp.special(chosen.used, "gidx1")
        if chosen.chooses:
            assert router is not None
            self.choice = ExpertChoice.of(
                router, UOp.const(0), chosen.used, chosen.n, thread, n_threads, chosen.scores, choice_bias
            )
            self._ids = self.choice.ids

    def stores(self, block: UOp, total: UOp | None) -> list[UOp]:
        """The stores of the choice, by the first block. `total`: that of all `ExpertChoice.powers`."""
        ids, probabilities = self._experts, self._probabilities
        assert self.choice and self.slot is not None and self._counts is not None
        assert ids is not None and probabilities is not None
        used, i = self._chosen.used, self._thread
        is_first = block.eq(0) & self.slot.eq(0)
        slot, ok = i.minimum(used - 1), (i < used) & is_first
        probability = self.choice.probability(slot, total, self._chosen.least_sum)
        if self._scales is not None:
            probability = probability * load(self._scales, load_index(self.choice.ids, slot, self._chosen.n))
        if self._chosen.weighs_inputs:
            probability = f32(1)
        stores = [store(ids, i, load(self.choice.ids, slot), ok), store(probabilities, i, probability, ok)]
        return [*stores, *self.choice.counted(self._counts, is_first)]

    def expert(self, slot: UOp | int) -> UOp:
        """The expert of a slot."""
        if self._ids is None:
            return slot if isinstance(slot, UOp) else UOp.const(slot)
        return load_index(self._ids, slot, self._chosen.n)

    def sums(
        self,
        layout: WeightLayout,
        cols: int,
        x: Sequence[UOp],
        planes: Sequence[UOp],
        rows: Sequence[UOp],
        t: UOp,
        threads: int,
        active: UOp | None,
        axis: int,
    ) -> list[UOp]:
        """The partial sums of `rows` of a matrix of each expert, by thread t of `threads`. If results are added, the
        units of all experts follow each other, as if of one row. If the block is not `active`, its loop has no steps.
        `x`: the vector, or its digits and their factors.

        Loads of weights and biases are not gated: tinygrad would simplify all that their index depends on by the gate,
        and the number of the expert depends on all threads."""
        units = units_of(cols)
        total = units * (self._chosen.used if self.slot is None else 1)
        steps = -(-total // threads)
        if active is not None:  # as in a product of several matrices
            steps = max(steps, 2)
            rows = layout.rows_of_active(rows, units, active)
        trips = steps if active is None else active.where(UOp.const(steps), UOp.const(0))
        step = UOp.range(trips, axis, AxisType.REDUCE) if steps > 1 else None
        item = t if step is None else t + step * threads
        inside = None if total == threads * steps else item < total
        slot, unit, vector = self.slot, item if inside is None else item.minimum(units - 1), None
        if slot is not None and self._chosen.all_of_them:
            vector = slot
        if slot is None:
            slot, unit = (item // units).minimum(self._chosen.used - 1), item % units
            vector = slot
        expert_row = self.expert(slot) * self._rows
        dot = vector_unit(layout, x, units, unit, inside, vector)
        products = []
        for row in rows:
            product = dot(layout.load_unit(planes, row + expert_row, units, unit, None))
            products.append(self._weighted(product, slot))
        return products if step is None else [p.reduce(step, arg=Ops.ADD) for p in products]

    def _weighted(self, value: UOp, slot: UOp | int) -> UOp:
        """A value of an expert as it is added: times its probability if results are added."""
        if not self._chosen.added:
            return value
        assert self._probabilities is not None
        return value * load(self._probabilities, slot)

    def biased(self, value: UOp, row: UOp) -> UOp:
        """A row's product and its bias, or those of all slots, weighted."""
        if self._chosen.weighs_inputs and self.choice and self.slot is not None:
            value = value * self.choice.probability(self.slot, None, self._chosen.least_sum)
        if self._biases is None:
            return value
        row = row.minimum(self._all_rows - 1)
        if self.slot is not None:
            return value + load(self._biases, self.expert(self.slot) * self._all_rows + row)
        for slot in range(self._chosen.used):
            bias = load(self._biases, self.expert(slot) * self._all_rows + row)
            value = value + self._weighted(bias, slot)
        return value
