"""A sequence of kernels over fixed buffers, compiled once and replayed as one graph of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tinygrad import Device, Tensor, UOp
from tinygrad.dtype import DType
from tinygrad.engine.jit import graph_split_rewrite
from tinygrad.engine.realize import compile_linear, run_linear
from tinygrad.uop.ops import Ops

Kernel = Callable[..., UOp]


class Launches:
    """Kernels in the order in which they are added. They need no scheduler: each is a program already, each
    tensor a buffer that is there, and whatever changes from one replay to the next lies in these buffers."""

    def __init__(self) -> None:
        self.calls: list[UOp] = []

    def add(self, kernel: Kernel, *buffers: Tensor) -> None:
        """`kernel` is called with a placeholder for each buffer; the same function always means the same
        kernel. The buffers are realized tensors, whole, and every one of them is used."""
        shapes = tuple((int(b.numel()), b.dtype) for b in buffers)
        self.calls.append(_program(kernel, shapes).call(*(b.uop.base for b in buffers)))

    def compiled(self) -> UOp:
        """The sequence as a LINEAR of calls, what is not compiled yet compiled."""
        return compile_linear(UOp(Ops.LINEAR, src=tuple(self.calls)))

    def captured(self) -> Callable[[], None]:
        """Compiles what is not compiled yet; what comes back launches the sequence and does not wait."""
        linear = self.compiled()
        if Device[Device.DEFAULT].graph is not None:
            linear = graph_split_rewrite(linear, max_batch_size=0)
        return functools.partial(run_linear, linear, jit=True)

    def __len__(self) -> int:
        return len(self.calls)


@functools.cache
def _program(kernel: Kernel, shapes: tuple[tuple[int, DType], ...]) -> UOp:
    return kernel(*(UOp.placeholder((n,), dtype, slot=i) for i, (n, dtype) in enumerate(shapes)))
