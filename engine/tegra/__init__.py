"""tinygrad's NV backend on a Jetson: its commands go to the drivers nvgpu and nvmap, without CUDA.

`abi` are the drivers' structures, `driver` their calls, `memory` buffers that CPU and GPU share, `channel` the ring
of commands, `notifier` what the driver says after a fault, `device` tinygrad's device on top of these (`install`).

What runs here was held against a simulated driver (tests/driver). A simulator follows the rules that it was given;
it cannot prove what only a board shows: caches and their coherence, the order of writes, timing, races between
dependent kernels, the width of the memory windows on this chip, real machine code, and power.
"""
