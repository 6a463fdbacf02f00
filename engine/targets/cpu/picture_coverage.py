"""Which encoders of pictures the kernels for CPUs compute, and what memory they need."""

from __future__ import annotations

from engine.description.vision import ConvolutionNet, Linear, PatchAttention, Stem, VisionSpec, WindowQueries
from engine.formats.dequantize import HOST_TYPES
from engine.formats.ggml_types import TYPES
from engine.targets.cpu.convolution_net import scratch_elements
from engine.targets.cpu.kernels.lanes import MOST_TILES, register_lanes
from engine.targets.cpu.kernels.patches import stride_of
from engine.targets.cpu.kernels.thread_pool import default_pool
from engine.targets.cpu.picture_chunks import most_rows


def lacks(spec: VisionSpec) -> str:
    """What these kernels do not compute of an encoder, in words; "" if nothing."""
    turned = (step.weight for step in spec.projector_steps if isinstance(step, Linear) and step.transposed)
    if any(TYPES[weight.type].name not in HOST_TYPES for weight in turned):
        return "a quantized matrix with a row for each input"
    attention = [s.operator for s in spec.sublayers if isinstance(s.operator, PatchAttention)]
    if isinstance(spec.stem, Stem):
        return "an encoder before the encoder"
    if any(isinstance(step, WindowQueries) for step in spec.projector_steps):
        return "queries of windows"
    return "a norm over all heads" if any(a.norms_all_heads for a in attention) else ""


def scratch_bytes(spec: VisionSpec) -> int:
    """At most what an encoder needs beside its weights for the largest picture."""
    lanes, attention = register_lanes(), [s.operator for s in spec.sublayers]
    # Queries, keys and values, and once more as integers of 16 bits with their scales.
    of_heads = max(
        (3 * a.heads * (1.5 * (a.head_dim + lanes) + 1) for a in attention if isinstance(a, PatchAttention)),
        default=0,
    )
    half, windows = len(spec.rotations.by_row) if spec.rotations else 0, 2 if spec.has_windows else 0
    scores = 4 * default_pool().count * (1.5 * lanes + 1)
    widths = {stride_of(n) for weight in spec.weights() for n in (weight.rows, weight.cols)}
    whole = most_rows(spec, lanes) * (stride_of(spec.dim) + of_heads + 2 * half + 1 + windows + scores)
    if isinstance(spec.stem, ConvolutionNet):
        whole += scratch_elements(spec.stem, spec.patch * spec.stem.side, lanes)
    return 4 * int(whole + 4 * MOST_TILES * lanes * sum(widths))
