"""A sequence of CPU kernels over fixed buffers, which a thread pool runs as one job."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, UOp
from tinygrad.engine.realize import get_runtime

from engine.kernels.compilation import KernelFunction
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.thread_pool import KernelTypes, ThreadPool


class KernelSequence:
    """Kernels in the order in which they are added, for `pool` to run."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._added: list[tuple[KernelFunction, tuple[Tensor, ...], int, bool]] = []
        self._outputs: list[tuple[int, Tensor]] = []

    def add(self, kernel: KernelFunction, *buffers: Tensor, parts: int = 0, concurrent: bool = False) -> None:
        """`kernel` is called with the number of the part to compute, the number of parts, and a placeholder for each
        buffer, which may be of any size; the same function always means the same kernel. The buffers come from
        `memory`, and the kernel uses every one of them. `parts` may run in any order; the default is one for each
        thread. `concurrent`: see `ThreadPool.add`."""
        self._added.append((kernel, buffers, parts or self._pool.count, concurrent))

    def output(self, buffer: Tensor) -> None:
        """Says that what the kernels so far leave in a buffer may be looked at (`CompiledSequence.outputs`)."""
        self._outputs.append((len(self._added), buffer))

    @property
    def kernels(self) -> list[KernelTypes]:
        return [(kernel, tuple(b.dtype for b in buffers)) for kernel, buffers, *_ in self._added]

    def compile(self) -> CompiledSequence:
        """Compiles the kernels that are not compiled yet, and registers their calls with the pool."""
        calls: list[tuple[UOp, tuple[Tensor, ...]]] = []
        indices = []
        programs = self._pool.compile(self.kernels)
        for program, (_, buffers, parts, concurrent) in zip(programs, self._added, strict=True):
            code = get_runtime("CPU", program).addr
            addresses = [memory.address(b) for b in buffers]
            indices.append(self._pool.add(code, addresses, parts, concurrent and bool(calls)))
            calls.append((program, buffers))
        return CompiledSequence(self._pool, indices[0], calls, self._outputs)


@dataclass(frozen=True)
class CompiledSequence:
    """Calls of the pool from index `first` on: programs and their buffers. A call of it runs them all and waits."""

    pool: ThreadPool
    first: int
    programs: Sequence[tuple[UOp, tuple[Tensor, ...]]]
    _outputs: Sequence[tuple[int, Tensor]]

    def __call__(self) -> None:
        self.pool.run(self.first, len(self.programs))

    def outputs(self) -> Iterator[NDArray[np.float32]]:
        """Runs the kernels as far as the next buffer that `KernelSequence.output` named, and gives that."""
        done = 0
        for end, buffer in self._outputs:
            self.pool.run(self.first + done, end - done)
            yield memory.view(buffer)
            done = end

    @property
    def last_output(self) -> NDArray[np.float32]:
        """What the last run left in the last of these buffers."""
        return memory.view(self._outputs[-1][1])

    def call_s(self, i: int) -> float:
        """Runs the i-th kernel alone: the seconds that it takes."""
        return self.pool.call_s(self.first + i)

    @functools.cached_property
    def calls(self) -> list[UOp]:
        """The calls as tinygrad's UOps. A kernel's buffers are numbered from 2, after the part and the number of
        parts, so the first buffer stands in for these two."""
        return [
            program.call(*[buffers[0].uop.base] * 2, *(b.uop.base for b in buffers))
            for program, buffers in self.programs
        ]
