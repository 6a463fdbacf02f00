"""tinygrad 0.14.0: nodes of graphs are made with less work.

The way from a kernel's graph to code takes tens of thousands of nodes. For each, tinygrad goes through a list of
operations to tell its type, builds lists of its sources' types, and walks over its graph for each property. Here, what
is so for nearly all nodes is looked at first. The results are the same.
"""

from __future__ import annotations

import weakref
from typing import Any

from tinygrad.dtype import DType, dtypes, least_upper_dtype
from tinygrad.uop import ops, weak
from tinygrad.uop.ops import GroupOp, Ops, UOp, UOpMetaClass

from engine.fixes import once

_stock_make, _stock_dtype = UOpMetaClass.__call__, ops.dtype_from_uop
_stock_property = ops.recursive_property.__get__

_OF_ALL = GroupOp.Broadcastable - GroupOp.Comparison - {Ops.WHERE, Ops.SHL, Ops.SHR}
_OF_FIRST = {Ops.LOAD, Ops.AFTER, Ops.RANGE, Ops.REDUCE}
_VOID = {Ops.STORE, Ops.SINK, Ops.END, Ops.GROUP}


@once("Nodes of graphs")
def apply() -> None:
    """Changes tinygrad in this process, once. Raises BackendError if another version is installed."""
    ops.promo_dtype, ops._rebuild_dtype = _common_dtype, _rebuilt_dtype
    ops.dtype_from_uop = weak.dtype_from_uop = _dtype
    ops.recursive_property.__get__ = _property
    if ops.SPEC.value <= 1:  # else tinygrad checks each node
        UOpMetaClass.__call__ = _make
    UOp.__del__ = _forget


def _common_dtype(sources: tuple[UOp, ...]) -> DType:
    """In the place of promo_dtype."""
    first = sources[0].dtype
    for source in sources:
        if source.dtype is not first:
            return least_upper_dtype(*[s.dtype for s in sources])
    return first


def _dtype(op: Ops, src: tuple[UOp, ...], arg: Any) -> DType | None:
    """In the place of dtype_from_uop."""
    if op in _OF_ALL:
        return _common_dtype(src)
    if op in GroupOp.Comparison:
        return dtypes.bool
    if op in _OF_FIRST:
        return src[0].dtype
    if op in _VOID:
        return dtypes.void
    return _stock_dtype(op, src, arg)


def _rebuilt_dtype(node: UOp, src: tuple[UOp, ...]) -> DType:
    """In the place of _rebuild_dtype: the type of a node with new sources."""
    for old, new in zip(node.src, src, strict=False):
        if old.dtype is not new.dtype:
            return _dtype(node.op, src, node.arg) or node.dtype
    return node.dtype


def _property(self: Any, node: UOp | None, owner: Any = None) -> Any:
    """In the place of recursive_property.__get__. Mostly the sources have the property."""
    if node is None:
        return self
    known, name = node.__dict__, self.nm
    if name in known:
        return known[name]
    for source in node.src:
        if name not in source.__dict__:
            return _stock_property(self, node, owner)
    value = known[name] = self.fxn(node)
    return value


def _make(
    cls: type[UOp],
    op: Ops,
    dtype: DType | None = None,
    src: tuple[UOp, ...] = (),
    arg: Any = None,
    tag: Any = None,
    metadata: Any = None,
    _buffer: Any = None,
) -> UOp:
    """In the place of UOpMetaClass.__call__, without its checks of nodes, which are off."""
    if dtype is None:
        dtype = _dtype(op, src, arg) or dtypes.void
    key, all_nodes = (op, dtype, src, arg, tag), UOpMetaClass.ucache
    if (reference := all_nodes.get(key)) is not None and (node := reference()) is not None:
        return node
    if _buffer is not None or metadata is not None:
        return _stock_make(cls, *key, metadata, _buffer)
    node = object.__new__(cls)
    node.op, node.dtype, node.src, node.arg, node.tag = key
    all_nodes[key] = weakref.ref(node)
    return node


def _forget(
    node: UOp, Ops: Any = Ops, buffers: Any = ops.buffers, all_nodes: Any = UOpMetaClass.ucache
) -> None:
    """In the place of UOp.__del__. What it needs are its defaults: modules are gone at the end of the process."""
    try:
        if node.op is Ops.BUFFER and (buffer := buffers.get(node)) is not None:
            buffer.ref(-1)
        del all_nodes[node.op, node.dtype, node.src, node.arg, node.tag]
    except (AttributeError, KeyError):  # it was made in part, or is another's by now
        pass
