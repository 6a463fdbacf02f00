"""Chooses the runner for the device at hand."""

from __future__ import annotations

from tinygrad import Device

from engine.errors import UsageError
from engine.fixes import cuda_binaries
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.model.memory_need import runs_as_graph
from engine.protocol.events import KernelPath
from engine.runtime.model_runner import ModelRunner
from engine.targets.coverage import lacks_format_because, runs_as_graph_because
from engine.targets.graph.runner import GraphRunner


def open_runner(
    weights: Weights,
    context_length: int,
    kernels: KernelPath = "auto",
    keep_packed: bool = False,
    parallel: int = 1,
    kv: KVFormat = KVFormat.F16,
    is_early: bool = False,
) -> ModelRunner:
    """Loads the weights into the runner for tinygrad's default device: the one with its own quantized kernels where
    there is one that has all parts of the model, else tensor graphs. `kernels` chooses one of the two; `keep_packed` is
    for the CPU runner. If `parallel` is more than 1, it is a `BatchRunner` where the device has one for the model. With
    `is_early` it may be an `EarlyRunner`. Raises UsageError if `kernels` is "fused" and the device has no such kernels,
    or if it has none for the format `kv` of the KV cache; ModelFileError for damaged weights."""
    device = Device.DEFAULT.split(":")[0]
    if why := lacks_format_because(weights.spec, kv):
        choices = [kv for kv in KVFormat if not lacks_format_because(weights.spec, kv)]
        names = " or ".join(kv.value for kv in choices)
        raise UsageError(why, f"Choose {names}: with --kv, or the key kv of the preset or the settings.")
    if kernels == "fused" and (why := runs_as_graph_because(weights.spec, device)):
        raise UsageError(why, 'Choose a preset with kernels = "graph" or "auto".')
    if device == "CUDA":
        cuda_binaries.apply()
    if runs_as_graph(weights.spec, device, kernels):
        return GraphRunner(weights, context_length, parallel, kv)
    if device == "CPU":
        from engine.targets.cpu.runner import CPURunner

        return CPURunner(weights, context_length, parallel, keep_packed, kv)
    if device in ("CUDA", "NV"):
        from engine.targets.nvidia.runner import FusedRunner

        return FusedRunner(weights, context_length, parallel, kv, is_early)
    raise UsageError(
        f"There are no fused kernels for {device}.", 'Choose a preset with kernels = "graph" or "auto".'
    )
