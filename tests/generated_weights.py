"""Random weights of `generated_model`, as a file stores them."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from engine.formats.quantization import QUANTIZED


def random_matrix(rng: np.random.Generator, rows: int, cols: int, kind: Type) -> np.ndarray:
    """rows x cols weights of standard deviation cols**-0.5, as the file stores them: float32 or float16, or
    uint8 of shape (rows, bytes of a row).

    The gguf package does not quantize to the K types and IQ. For them the block's bytes are random and only its float16
    scales are chosen (llama.cpp, ggml-common.h: block_q2_K to block_q6_K, block_iq4_nl, block_iq4_xs)."""
    std = cols**-0.5
    if kind is Type.NVFP4:
        data = np.frombuffer(rng.bytes(rows * cols // 64 * 36), np.uint8).reshape(-1, 36).copy()
        scales = std * np.exp2(rng.uniform(-3, 0, (len(data), 4)))
        data[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(scales)
        return data.reshape(rows, -1)
    if not (kind.name.endswith("_K") or kind.name.startswith("IQ")):
        values = (rng.standard_normal((rows, cols)) * std).astype(np.float32)
        return values if kind is Type.F32 else gguf.quantize(values, kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = (
        np.frombuffer(rng.bytes(rows * cols // block * block_bytes), np.uint8).reshape(-1, block_bytes).copy()
    )

    def set_scales(scale: float) -> None:
        at = QUANTIZED[kind].d if kind in QUANTIZED else 0
        if kind is Type.IQ1_M:  # has its scale's bits in the upper ones of four words
            bits = int(np.float16(scale).view(np.uint16))
            words = data[:, 48:].view(np.uint16)
            words[:] = words & 0x0FFF | np.array(
                [bits << 12 - by & 0xF000 for by in (0, 4, 8, 12)], np.uint16
            )
        elif kind in (Type.Q2_K, Type.Q4_K, Type.Q5_K):
            # value = scale * q - min: the middle of q's range times the scale centres it on zero
            middle = {Type.Q2_K: 1.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}[kind]
            data[:, at : at + 4] = np.array([scale, middle * scale], np.float16).view(np.uint8)
        else:  # of both signs: the codebook of IQ4_NL is not centred
            scales = np.resize(np.array([scale, -scale], np.float16), len(data))
            signed = scales if kind is Type.IQ4_NL else np.abs(scales)
            data[:, at : at + 2] = signed.view(np.uint8).reshape(-1, 2)

    unit = 2.0**-10
    set_scales(unit)
    set_scales(unit * std / float(gguf.dequantize(data, kind).std()))
    return data.reshape(rows, -1)
