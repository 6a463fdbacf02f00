"""tinygrad's NV backend on a Jetson, without CUDA: it sends commands to the kernel drivers nvgpu and nvmap.

`abi` holds the drivers' structures, `driver` their calls, `memory` the buffers that CPU and GPU share, `allocator`
tinygrad's allocator for them, `queue` the command ring, `notifier` the driver's reports of faults, `errors` what its
error numbers mean, and `device` tinygrad's device on top of these (`install`).

The tests run this code on a simulated driver (tests/driver). A simulation cannot prove what only a board shows: cache
coherence, the order of writes, timing, races between dependent kernels, the width of the GPU's memory windows, real
machine code, and power.
"""
