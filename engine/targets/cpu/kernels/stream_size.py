"""What a quantized matrix takes on a CPU (`engine.targets.cpu.kernels.weight_layout`), known without tinygrad."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from engine.formats.ggml_types import TYPES
from engine.formats.quantization import FORMATS, Format

UNIT = 32  # columns whose planes are stored together


@dataclass(frozen=True)
class StreamSize:
    """The parts of the stream of a matrix of a ggml type, for vectors of `lanes` rows."""

    ggml_type: int
    lanes: int

    @property
    def format(self) -> Format | None:
        return FORMATS.get(self.ggml_type)

    @property
    def has_small_scales(self) -> bool:
        return self.format is not None and "scale" in self.format.scales

    @property
    def block(self) -> int:
        """Columns in a block."""
        return self.format.block if self.format else 1

    @property
    def header_words(self) -> int:
        """Words of d and m at the start of a block."""
        return self.lanes * (2 if self.format and "m" in self.format.scales else 1) if self.format else 0

    @property
    def unit_words(self) -> int:
        """Words of a unit."""
        assert self.format
        return self.lanes * (self.has_small_scales + 2 * sum(self.format.bits))

    @property
    def block_words(self) -> int:
        """Elements of the stream in a block."""
        return self.header_words + self.block // UNIT * self.unit_words if self.format else self.lanes

    def row_words(self, cols: int) -> int:
        """Elements of the stream in a group of `lanes` rows."""
        return cols // self.block * self.block_words

    def groups(self, rows: int) -> int:
        """Groups of `lanes` rows in a matrix."""
        return ceil(rows / self.lanes)

    def size(self, rows: int, cols: int) -> int:
        """Elements of a matrix's stream. Its last row is repeated to fill the last group."""
        return self.groups(rows) * self.row_words(cols)

    def n_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a matrix's stream."""
        return self.size(rows, cols) * (2 if self.format else TYPES[self.ggml_type].block_bytes)
