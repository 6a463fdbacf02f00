"""The runner for NVIDIA GPUs: kernels written for quantized matrices, five of them for a layer of a decode step."""
