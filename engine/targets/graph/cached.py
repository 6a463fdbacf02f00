"""The KV cache of tensor graphs: how keys and values are stored in it, and which of them a query sees."""

from __future__ import annotations

from tinygrad import Tensor, UOp, dtypes

from engine.formats.kv_format import QUANT_BLOCK
from engine.targets.graph.inputs import Step


def stored_in(cache: Tensor, new: Tensor, step: Step) -> Tensor:
    """The cache with the keys and values (2, kv_heads, n, width) of a step."""
    if step.owners is not None:
        new = new.contiguous()[:, :, step.owners.maximum(0)]
        whole = (step.owners >= 0).reshape(1, 1, -1, 1).where(new, cache)
        return Tensor(cache.uop.after(cache.uop.store(whole.uop)))
    stores = [cache[:, :, step.place : step.place + step.head].uop.store(new[:, :, : step.head].uop)]
    if new.shape[2] != 1:
        tail = new[:, :, step.tail : step.tail + step.tail_rows]
        place = step.tail_place
        stores.append(cache[:, :, place : place + step.tail_rows].uop.store(tail.uop))
    return Tensor(cache.uop.after(*stores))


def quantized(x: Tensor) -> Tensor:
    """Elements (..., head_dim) as int8, and after them the bytes of their blocks' float16 scales."""
    blocks = x.reshape(*x.shape[:-1], -1, QUANT_BLOCK)
    scales = blocks.abs().max(-1, keepdim=True) / 127
    quants = (blocks / scales.maximum(1e-30)).round().cast(dtypes.int8).reshape(x.shape)
    return quants.cat(scales.squeeze(-1).cast(dtypes.float16).bitcast(dtypes.int8), dim=-1)


def dequantized(x: Tensor, dim: int) -> Tensor:
    """What `quantized` gave, as float32 (..., dim)."""
    quants, scales = x[..., :dim], x[..., dim:].bitcast(dtypes.float16)
    blocks = quants.reshape(*x.shape[:-1], dim // QUANT_BLOCK, QUANT_BLOCK) * scales.cast(
        dtypes.float32
    ).unsqueeze(-1)
    return blocks.reshape(*x.shape[:-1], dim)


def mask_of(n: int, position: UOp, window: int, unseen: Tensor | None) -> Tensor | None:
    """-inf where a query of n, the first at `position`, does not see a key: (n, position + n). None if all see all.
    `unseen`: where queries see no key if it is not those after their own."""
    if n == 1 and not window:
        return None
    hidden = Tensor.full((n, position + n), float("-inf"))
    mask = hidden.triu(position + 1)  # causal
    if unseen is not None:
        mask = unseen.where(hidden, 0.0)
    return mask + hidden.tril(position - window) if window else mask
