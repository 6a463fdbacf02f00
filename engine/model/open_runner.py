"""Chooses the runner for the device at hand."""

from __future__ import annotations

from tinygrad import Device

from engine.errors import UsageError
from engine.fixes import cuda_binaries
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.model.coverage import runs_as_graph_because, target_of
from engine.protocol.events import KernelPath
from engine.runtime.model_runner import ModelRunner
from engine.runtime.pictures import PictureRoom


def import_runner(dev: str) -> None:
    """Imports the runner with kernels for the device that DEV names; `open_runner` would do it later. Uses no
    device."""
    if dev.startswith("CPU"):
        import engine.targets.cpu.runner
    elif "CUDA" in dev or "NV" in dev:
        import engine.targets.nvidia.runner  # noqa: F401


def open_runner(
    weights: Weights,
    context_length: int,
    kernels: KernelPath = "auto",
    keep_packed: bool = False,
    parallel: int = 1,
    kv: KVFormat = KVFormat.F16,
    is_early: bool = False,
    pictures: PictureRoom | None = None,
) -> ModelRunner:
    """Loads the weights into the runner for tinygrad's default device: the one with its own quantized kernels where
    there is one that has all parts of the model, else tensor graphs. `kernels` chooses one of the two; `keep_packed` is
    for the CPU runner. If `parallel` is more than 1, it is a `BatchRunner` where the device has one for the model. With
    `is_early` it may be an `EarlyRunner`. Raises UsageError if `kernels` is "fused" and the device has no such kernels,
    or if it has none for the format `kv` of the KV cache; ModelFileError for damaged weights."""
    device = Device.DEFAULT.split(":")[0]
    if why := weights.spec.lacks_format_because(kv):
        choices = [kv for kv in KVFormat if not weights.spec.lacks_format_because(kv)]
        names = " or ".join(kv.value for kv in choices)
        raise UsageError(why, f"Choose {names}: with --kv, or the key kv of the preset or the settings.")
    if kernels == "fused" and (why := runs_as_graph_because(weights.spec, device)):
        raise UsageError(why, 'Choose a preset with kernels = "graph" or "auto".')
    if device == "CUDA":
        cuda_binaries.apply()
    match target_of(weights.spec, device, kernels):
        case "cpu":
            from engine.targets.cpu.runner import CPURunner

            return CPURunner(weights, context_length, parallel, keep_packed, kv, pictures)
        case "nvidia":
            from engine.targets.nvidia.runner import NvidiaRunner

            return NvidiaRunner(weights, context_length, parallel, kv, is_early, pictures)
        case "graph":
            from engine.targets.graph.runner import GraphRunner

            return GraphRunner(weights, context_length, parallel, kv, pictures)
