"""The fused path for NVIDIA GPUs: quantized products as kernels of our own, a decode step of five a layer."""

from engine.model.fused.runner import FusedRunner

__all__ = ["FusedRunner"]
