"""Figures of a model file that need neither loading it nor tinygrad."""

from __future__ import annotations

import math

from engine.formats.gguf import GGUF

# enum llama_ftype in llama.cpp's include/llama.h: the names by which users know mixtures of types.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip


def quantization(file: GGUF) -> str:
    """The file's type (Q4_K_M); if it states none that is known, the tensor type with the most bytes."""
    bytes_by_type: dict[str, int] = {}
    for tensor in file.tensors.values():
        bytes_by_type[tensor.type_name] = bytes_by_type.get(tensor.type_name, 0) + tensor.n_bytes
    largest = max(bytes_by_type, key=bytes_by_type.__getitem__, default="")
    return FILE_TYPES.get(file.get("general.file_type", int, -1), largest)


def parameters(file: GGUF) -> int:
    """The number of weights."""
    return sum(math.prod(tensor.shape) for tensor in file.tensors.values())
