"""What a model file is, told without loading it: nothing here needs tinygrad."""

from __future__ import annotations

import math

from engine.formats.gguf import GGUF

# enum llama_ftype in llama.cpp's include/llama.h: what users know a mix of types by.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 14: "Q4_K_S", 15: "Q4_K_M",
    16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16",
}  # fmt: skip


def quantization(file: GGUF) -> str:
    """The file's type ("Q4_K_M"), else the type that most of its bytes have."""
    types = bytes_by_type(file)
    return FILE_TYPES.get(
        file.get("general.file_type", int, -1), max(types, key=types.__getitem__, default="")
    )


def bytes_by_type(file: GGUF) -> dict[str, int]:
    """Bytes of the tensors of each type, by its name."""
    bytes_of: dict[str, int] = {}
    for tensor in file.tensors.values():
        bytes_of[tensor.type_name] = bytes_of.get(tensor.type_name, 0) + tensor.n_bytes
    return bytes_of


def parameters(file: GGUF) -> int:
    """How many weights it has."""
    return sum(math.prod(tensor.shape) for tensor in file.tensors.values())


def weight_bytes_per_token(file: GGUF) -> int:
    """What a decode step must read: all weights, but of an embedding that is no output head only one row."""
    total = sum(tensor.n_bytes for tensor in file.tensors.values())
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or "output.weight" not in file.tensors:
        return total
    return total - embedding.n_bytes * (embedding.shape[0] - 1) // embedding.shape[0]
