"""Which parts of models the kernels of each kind of device lack. Tensor graphs have all parts."""

from __future__ import annotations

from engine.formats.kv_format import QUANT_BLOCK, KVFormat
from engine.model.spec import ModelSpec


def lacks_format_because(spec: ModelSpec, kv: KVFormat) -> str:
    """The sentence that tells a user why a model cannot have a KV cache of format `kv`. Empty if it can."""
    dims = {a.head_dim for a in spec.attention if not kv.fits(a.head_dim)}
    return (
        f"A {kv.value} KV cache has blocks of {QUANT_BLOCK} elements, and this model's heads have {dims.pop()}."
        if dims
        else ""
    )


def lacking_part(spec: ModelSpec, device: str) -> str:
    """The part of a model, in words, that tinygrad's device (CPU, CUDA, NV) has no kernels for; "" if it has all."""
    if device.startswith("CPU"):
        lacks = any(sublayer.scale and not sublayer.post_norm for sublayer in spec.sublayers)
        return "scaled layers without a norm after them" if lacks else ""
    lacks = any(experts.gate.type != experts.up.type for experts in spec.experts)
    return "experts whose gate and up differ in type" if lacks else ""


def runs_as_graph_because(spec: ModelSpec, device: str) -> str:
    """The sentence that tells a user why a model does not run on the kernels of its device. Empty if it does."""
    part = lacking_part(spec, device)
    if not part:
        return ""
    return (
        f"This model has {part}, which orin-chat has no {device} kernels for. "
        "It runs as tensor graphs, which are slower."
    )
