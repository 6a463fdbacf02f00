"""A simulated Jetson: what stands below engine/tegra on a real one.

`kernel` are the drivers with their rules, `buddy` and `space` a GPU's addresses, `gpu` what follows the ring, decodes
launch descriptors and starts kernels, `compiler` (with `cuda.hpp`) and `program` how these run on a CPU, `simulate`
puts all of it in place. `decode` and `worker` are the engine on top.

| checked | not checked, for want of a board |
|---|---|
| sizes, numbers, order and values of all calls; every errno's way out | that a board runs this release of the driver |
| addresses: the driver's allocator, the windows, every load and store | the windows' width; page tables; the SMMU |
| commands, launch descriptors, arguments, signals, a full ring | caches, order of writes, races, preemption, time |
| kernels in CUDA C, shared memory, barriers, tensor cores | machine code, registers, occupancy |
| what is left after a fault, and what is said | how the real driver recovers; power |
"""
