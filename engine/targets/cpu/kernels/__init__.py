"""Kernels for CPUs: vectors as wide as the machine's registers, one thread a core."""
