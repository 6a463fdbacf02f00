"""What a quantized matrix takes in tensor graphs (`engine.kernels.quantized_matrix`), known without tinygrad."""

from engine.formats.quantization import FORMATS, unpacked_bytes

SPREAD = 16  # elements that share a byte of a plane lie so far apart


def padded(ggml_type: int, cols: int) -> int:
    """The columns of a matrix with those that fill whole blocks and whole bytes of planes."""
    if not (format := FORMATS.get(ggml_type)):
        return cols
    step = max(SPREAD * 8 // min(format.bits), format.block)
    return -(-cols // step) * step


def matrix_bytes(ggml_type: int, rows: int, cols: int) -> int:
    """Bytes of all planes."""
    return rows * unpacked_bytes(ggml_type, padded(ggml_type, cols))
