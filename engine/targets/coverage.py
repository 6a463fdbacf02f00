"""Which parts of models the kernels of each kind of device lack, and which GPUs have none. Tensor graphs have all
parts, on every device."""

from __future__ import annotations

import functools

from engine.description.spec import ModelSpec
from engine.devices import cuda_driver
from engine.formats.kv_format import QUANT_BLOCK, KVFormat

_CAPABILITY = 8, 0  # the first compute capability whose tensor cores have the instructions of our kernels
_TILE = 16  # elements of a head that tensor cores take at a time


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
    if any(experts.gate.type != experts.up.type for experts in spec.experts):
        return "experts whose gate and up differ in type"
    return next((f"heads of {a.head_dim} elements" for a in spec.attention if a.head_dim % _TILE), "")


@functools.cache
def lacks_kernels_because(device: str) -> str:
    """The sentence that tells a user why our kernels do not run on tinygrad's device, whose first GPU is asked. Empty
    if they do."""
    found = cuda_driver.compute_capability() if device.startswith(("CUDA", "NV")) else (0, 0)
    if not (0, 0) < found < _CAPABILITY:
        return ""
    needed, has = ("{}.{}".format(*capability) for capability in (_CAPABILITY, found))
    return f"orin-chat's kernels need a GPU of compute capability {needed}, and this one has {has}."


def runs_as_graph_because(spec: ModelSpec, device: str) -> str:
    """The sentences that tell a user why a model does not run on the kernels of its device. Empty if it does."""
    if why := lacks_kernels_because(device):
        return f"{why} Models run as tensor graphs, which are slower."
    part = lacking_part(spec, device)
    if not part:
        return ""
    return (
        f"This model has {part}, which orin-chat has no {device} kernels for. "
        "It runs as tensor graphs, which are slower."
    )
