"""The runner for NVIDIA GPUs: kernels written for quantized matrices, five of them for a layer of a decode step."""

from engine.model.fused.runner import FusedRunner

__all__ = ["FusedRunner"]
