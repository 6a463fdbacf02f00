"""tinygrad 0.14.0 on CUDA: copies of a part of a matrix to shared memory by one instruction, on GPUs of compute
capability 9.0.

A thread asks for a whole tile, whose place and strides a descriptor tells (PTX ISA, "cp.async.bulk.tensor"; CUDA driver
API, "Tensor Map Object Management"), and the copy takes neither registers nor instructions of others. Rows of 128 bytes
arrive swizzled, as `engine.fixes.warpgroup_products` reads them. Each operation here is one instruction, put into a
kernel's graph as Ops.CUSTOM. They are effects, which the graph orders by their sources.

A tile has arrived when a barrier in shared memory has counted its bytes, so there is a barrier for each buffer. It
flips between two phases, each time that all bytes are there that somebody said would come.
"""

from __future__ import annotations

from tinygrad import UOp, dtypes
from tinygrad.uop.ops import Ops

_ORDERED = '"memory"'
_SHARED = '"r"((uint)__cvta_generic_to_shared({%d}))'
_GLOBAL, _WORD = '"l"({%d})', '"r"((uint){%d})'


def _if(ok: int, instruction: str, *operands: str) -> str:
    """An instruction that a thread executes if that operand is not 0."""
    text = f"{{{{ .reg .pred p; setp.ne.u32 p, %{ok}, 0; @p {instruction}; }}}}"
    return f'asm volatile("{text}" :: {", ".join(operands)} : {_ORDERED});'


def _copy(dimensions: int, coordinates: str, *more: str) -> str:
    kind = f"cp.async.bulk.tensor.{dimensions}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    operands = _SHARED % 0, _GLOBAL % 1, _WORD % 2, _WORD % 3, _SHARED % 4, _WORD % 5, *more
    return _if(5, f"{kind} [%0], [%1, {{{{{coordinates}}}}}], [%4]", *operands)


_BEGIN = _if(1, "mbarrier.init.shared::cta.b64 [%0], 1", _SHARED % 0, _WORD % 1)
_SHOW = f'asm volatile("fence.mbarrier_init.release.cluster;" ::: {_ORDERED});'
_EXPECT = _if(1, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %2", _SHARED % 0, _WORD % 1, _WORD % 2)
_KNOW = _if(1, "fence.proxy.tensormap::generic.acquire.gpu [%0], 128", _GLOBAL % 0, _WORD % 1)
_COPY, _COPY_PAIRS = _copy(2, "%2, %3"), _copy(4, "%2, %6, %6, %3", '"r"(0)')
_WAIT = (
    'asm volatile("{{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra AGAIN; }}" '
    f":: {_SHARED % 0}, {_WORD % 1} : {_ORDERED});"
)


def begun(barrier: UOp, ok: UOp) -> UOp:
    """Makes an element of uint64 in shared memory a barrier, if it is `ok`."""
    return UOp(Ops.CUSTOM, dtypes.void, (barrier, ok), _BEGIN)


def shown(*begun: UOp) -> UOp:
    """Lets copies see barriers that were begun."""
    return UOp(Ops.CUSTOM, dtypes.void, begun, _SHOW)


def expected(barrier: UOp, n_bytes: int, ok: UOp, *after: UOp) -> UOp:
    """Says that so many bytes will come, if it is `ok`."""
    return UOp(Ops.CUSTOM, dtypes.void, (barrier, ok, UOp.const(n_bytes), *after), _EXPECT)


def known(map: UOp, ok: UOp, *after: UOp) -> UOp:
    """Lets a thread's copies see a descriptor, if it is `ok`: its first element of a buffer."""
    return UOp(Ops.CUSTOM, dtypes.void, (map, ok, *after), _KNOW)


def asked(
    target: UOp, map: UOp, source: UOp, place: tuple[UOp, UOp], barrier: UOp, ok: UOp, *after: UOp,
    in_pairs: bool = False,
) -> UOp:  # fmt: skip
    """Asks for the tile at a `place`, its first column and row, if it is `ok`. `source`: an element of the matrix that
    the descriptor `map` tells of, by which the wait for the kernel before knows what is read
    (`engine.fixes.early_launch`). `in_pairs`: the row is a number of 16 rows, of a descriptor with four dimensions:
    columns, pairs of rows, rows of a pair, 16 rows."""
    sources = target, map, *place, barrier, ok, source, *after
    return UOp(Ops.CUSTOM, dtypes.void, sources, _COPY_PAIRS if in_pairs else _COPY)


def arrived(barrier: UOp, phase: UOp, *after: UOp) -> UOp:
    """Waits until all bytes of a phase have come, 0 or 1 in turn."""
    return UOp(Ops.CUSTOM, dtypes.void, (barrier, phase, *after), _WAIT)
