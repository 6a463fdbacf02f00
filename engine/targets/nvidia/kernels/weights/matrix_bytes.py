"""What a quantized matrix takes on a GPU (`weight_layout`), known without tinygrad."""

from engine.formats.quantization import unpacked_bytes

UNIT = 64  # columns of a row, which a thread reads
QUARTER = UNIT // 4


def units_of(cols: int) -> int:
    """Units in a row of `cols` columns."""
    return -(-cols // UNIT)


def matrix_bytes(ggml_type: int, rows: int, cols: int) -> int:
    """Bytes of all planes."""
    return rows * unpacked_bytes(ggml_type, units_of(cols) * UNIT)
