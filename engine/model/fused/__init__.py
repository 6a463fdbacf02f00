"""The runners for NVIDIA GPUs: kernels written for quantized matrices, five of them for a layer of a decode step."""

from engine.model.fused.batch_runner import FusedBatchRunner, runs_batches
from engine.model.fused.runner import FusedRunner

__all__ = ["FusedBatchRunner", "FusedRunner", "runs_batches"]
