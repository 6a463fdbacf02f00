"""What a product of decode multiplies (`StackedMatrices`), and how its blocks and threads share that (`Schedule`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.kernels.launch_hints import Release, Together
from engine.targets.nvidia.kernels.products import digit_rows
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.weights.matrix_bytes import units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout

_EVEN, _MANY_BLOCKS = 16, 64
_RELEASES: dict[Release, str] = {
    "at its end": "_last",
    "after its wait": "_next",
    "before its first barrier": "_met",
}


def usual_release(is_early: bool) -> Release:
    """When a product lets the next kernel start unless its schedule says otherwise: one that is early has its loads
    under way where its threads first meet."""
    return "before its first barrier" if is_early else "at its end"


@dataclass(frozen=True)
class Schedule:
    """A group of `threads` threads shares a row, a block has `groups` groups, and each thread works on `rows` rows at
    once. `blocks`: the minimum of resident blocks on a multiprocessor (`engine.fixes.launch_bounds`); 0 for none.
    `early`: whether it loads weights before it waits for the kernel before, `early_end`: whether what its end adds to
    them. `releases`: when the next kernel may start (`engine.fixes.early_launch`). `brings`: how many megabytes of the
    next product's weights it brings to the L2 cache, from its beginning on, or once it has chosen these. `streams`:
    whether its weights are the first to leave the caches (`engine.fixes.streamed_loads`). `together`: which of its
    first loads are all under way before it computes (`engine.fixes.load_order`)."""

    threads: int
    groups: int
    rows: int
    blocks: int = 0
    early: bool = False
    releases: Release = "at its end"
    early_end: bool = False
    brings: int = 0
    streams: bool = False
    together: Together = ""

    @property
    def block_rows(self) -> int:
        return self.groups * self.rows

    @property
    def block_threads(self) -> int:
        return self.threads * self.groups

    @property
    def name(self) -> str:
        """What stands for the schedule in the name of a kernel."""
        name = f"{self.threads}_{self.groups}_{self.rows}" + "_early" * self.early
        name += (
            _RELEASES[self.releases] * (self.releases != usual_release(self.early)) + "_end" * self.early_end
        )
        name += f"_brings_{self.brings}" * bool(self.brings) + "_streams" * self.streams
        name += f"_{self.together}_together" if self.together else ""
        return f"{name}_{self.blocks}_blocks" if self.blocks else name

    def blocks_of(self, rows: int) -> int:
        """Blocks of a matrix of so many rows."""
        return -(-rows // self.block_rows)

    def divides(self, rows: int) -> bool:
        """Whether a matrix of so many rows has whole blocks, or its number is so odd that few schedules have, and so
        many blocks that the last one counts little."""
        return rows % self.block_rows == 0 or bool(rows % _EVEN and rows > _MANY_BLOCKS * self.block_rows)

    def fits(self) -> bool:
        """Whether CUDA can launch such blocks, and each row of a block has a thread for its epilogue."""
        return self.block_rows <= self.block_threads <= 1024


class SharedExpert(NamedTuple):
    """The last matrix of an expert that computes every token: its layout and columns, and whether its result is
    multiplied by the sigmoid of a gate."""

    layout: WeightLayout
    cols: int
    is_gated: bool = True


@dataclass(frozen=True)
class StackedMatrices:
    """Matrices of `cols` columns, one below the other: (layout, rows) of each. With `experts`, each of the n has
    such matrices, those of all one after the other. If the results of experts are added, that of a `shared` expert may
    be too. `beside`: matrices with vectors of their own, whose rows follow. `digits`: whether the vector comes in
    digits (`digit_rows`)."""

    matrices: tuple[tuple[WeightLayout, int], ...]
    cols: int
    experts: ChosenExperts | None = None
    shared: SharedExpert | None = None
    beside: StackedMatrices | None = None
    digits: bool = False

    def __post_init__(self) -> None:
        assert not self.experts or len({rows for _, rows in self.matrices}) == 1
        assert self.shared is None or (self.experts and self.experts.added)
        if self.beside:
            assert self.slots == 1 and not self.shared
            assert not (self.beside.experts or self.beside.beside)

    @classmethod
    def single(
        cls, layout: WeightLayout, rows: int, cols: int, experts: ChosenExperts | None = None
    ) -> StackedMatrices:
        return cls(((layout, rows),), cols, experts)

    @property
    def stacks(self) -> list[StackedMatrices]:
        """The matrices that multiply one vector: these, and those beside."""
        return [self, self.beside] if self.beside else [self]

    @property
    def rows(self) -> int:
        """Rows of the result, of one expert."""
        return sum(rows for of in self.stacks for _, rows in of.matrices)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights that the product reads."""
        used = self.experts.used if self.experts else 1
        shared = self.shared.layout.n_bytes(self.rows, self.shared.cols) if self.shared else 0
        others = shared + (self.beside.n_bytes if self.beside else 0)
        return used * sum(layout.n_bytes(rows, self.cols) for layout, rows in self.matrices) + others

    @property
    def input_scale_bits(self) -> list[int]:
        """The input_scales of the matrices (`WeightLayout.input_scale_bits`). A product reads its vector once for each,
        multiplied by that input_scale."""
        return sorted({layout.input_scale_bits for layout, _ in self.matrices})

    @property
    def name(self) -> str:
        name = " + ".join(f"{layout.name} {rows}x{self.cols}" for layout, rows in self.matrices)
        e = self.experts
        shared = f" and {self.shared.layout.name} x{self.shared.cols}" if self.shared else ""
        if e:
            name += f" {e.used} of {e.n}{' added' if e.added else ''}{shared}"
        name += " in digits" * self.digits
        return f"{name} beside {self.beside.name}" if self.beside else name

    @property
    def fits_digits(self) -> bool:
        """Whether its vector may come in digits."""
        ((layout, _), *others) = self.matrices
        is_odd = others or self.beside or (self.experts and self.experts.all_of_them)
        return not is_odd and digit_rows.serves(layout, self.cols)

    @property
    def slots(self) -> int:
        """Results of the product: one for each chosen expert, unless they are added. Each has blocks of its own."""
        return self.experts.used if self.experts and not self.experts.added else 1

    @property
    def units(self) -> int:
        """Units of a row that threads share: of all experts whose results are added."""
        return units_of(self.cols) * (self.experts.used if self.experts and self.experts.added else 1)

    def n_blocks(self, schedule: Schedule) -> int:
        """Blocks of the product, for one slot. No block has rows of two matrices."""
        return sum(schedule.blocks_of(rows) for of in self.stacks for _, rows in of.matrices)
