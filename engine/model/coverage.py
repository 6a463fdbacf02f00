"""Which target computes a model: our kernels for its device if they have all its parts, else tensor graphs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from engine.description.spec import ModelSpec
from engine.devices import cuda_driver
from engine.protocol.events import KernelPath

Target = Literal["graph", "cpu", "nvidia"]
"""How a model is computed: as tensor graphs, or by our kernels for CPUs or for NVIDIA GPUs."""

_CAPABILITY = 8, 0  # the first compute capability whose tensor cores have the instructions of our kernels


class Kernels(Protocol):
    """An entry of a target's table: the handler that computes a class of sublayers."""

    @classmethod
    def lacks(cls, part: Any) -> str:
        """What it does not compute of a part of that class, in words; "" if nothing."""
        ...


def target_of(spec: ModelSpec, device: str, kernels: KernelPath = "auto") -> Target:
    """The target that runs a model on tinygrad's device."""
    if kernels == "graph" or (kernels == "auto" and runs_as_graph_because(spec, device)):
        return "graph"
    return "cpu" if device.startswith("CPU") else "nvidia"


def runs_as_graph_because(spec: ModelSpec, device: str) -> str:
    """The sentences that tell a user why a model does not run on the kernels of its device. Empty if it does."""
    if why := lacks_kernels_because(device):
        return f"{why} Models run as tensor graphs, which are slower."
    part = lacking_part(spec, _table(device))
    if not device.startswith("CPU") and not spec.attention:
        part = "recurrent layers alone"
    if not device.startswith("CPU") and spec.both_ways:
        part = "attention to all of a text"
    without = f"This model has {part}, which orin-chat has no {device} kernels for."
    return f"{without} It runs as tensor graphs, which are slower." if part else ""


@functools.cache
def lacks_kernels_because(device: str) -> str:
    """The sentence that tells a user why our kernels do not run on tinygrad's device, whose first GPU is asked. Empty
    if they do."""
    if not device.startswith(("CPU", "CUDA", "NV")):
        return f"orin-chat has no {device} kernels."
    found = (0, 0) if device.startswith("CPU") else cuda_driver.compute_capability()
    if not (0, 0) < found < _CAPABILITY:
        return ""
    needed, has = ("{}.{}".format(*capability) for capability in (_CAPABILITY, found))
    return f"orin-chat's kernels need a GPU of compute capability {needed}, and this one has {has}."


def lacking_part(spec: ModelSpec, table: Mapping[type, type[Kernels]]) -> str:
    """The part of a model, in words, that a target's table does not compute; "" if it computes all."""
    for operator in spec.operators:
        found = table.get(type(operator))
        if part := found.lacks(operator) if found else operator.words:
            return part
    return ""


def _table(device: str) -> Mapping[type, type[Kernels]]:
    """The table of the kernels for tinygrad's device."""
    if device.startswith("CPU"):
        from engine.targets.cpu.handlers import HANDLERS as of_cpus

        return of_cpus
    from engine.targets.nvidia.weights import HANDLERS as of_gpus

    return of_gpus
