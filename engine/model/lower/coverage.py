"""Which parts of models the kernels of each kind of device lack. Tensor graphs have all parts."""

from __future__ import annotations

from engine.formats.kv_format import QUANT_BLOCK, KVFormat
from engine.model.spec import ModelSpec

_GPU = frozenset({"experts whose gate and up differ in type"})

_LACKING = {
    "CPU": frozenset({"scaled layers without a norm after them"}),
    "CUDA": _GPU,
    "NV": _GPU,
}


_KV_FORMATS = {"CPU": set(KVFormat), "GPU": set(KVFormat), "graph": set(KVFormat)}


def lacks_format_because(spec: ModelSpec, device: str, is_graph: bool, kv: KVFormat) -> str:
    """The sentence that tells a user why a model cannot have a KV cache of format `kv` on tinygrad's device (CPU, CUDA,
    NV), or as tensor graphs there. Empty if it can."""
    kind = "graph" if is_graph else "CPU" if device.startswith("CPU") else "GPU"
    if kv not in _KV_FORMATS[kind]:
        kernels = "Tensor graphs" if is_graph else f"Our {device} kernels"
        return f"{kernels} have no {kv.value} KV cache."
    dims = {a.head_dim for a in spec.attention if not kv.fits(a.head_dim)}
    return (
        f"A {kv.value} KV cache has blocks of {QUANT_BLOCK} elements, and this model's heads have {dims.pop()}."
        if dims
        else ""
    )


def lacking_parts(spec: ModelSpec, device: str) -> list[str]:
    """The parts of a model, in words, that tinygrad's device (CPU, CUDA, NV) has no kernels for."""
    lacking = _LACKING.get(device.split(":")[0], _GPU)
    return [part for part in spec.parts() if part in lacking]


def runs_as_graph_because(spec: ModelSpec, device: str) -> str:
    """The sentence that tells a user why a model does not run on the kernels of its device. Empty if it does."""
    parts = lacking_parts(spec, device)
    if not parts:
        return ""
    return (
        f"This model has {' and '.join(parts)}, which orin-chat has no {device} kernels for. "
        "It runs as tensor graphs, which are slower."
    )
