"""What the buffers of a model on a GPU are for, so that a profile can tell the roles of kernels."""

from __future__ import annotations

from collections.abc import Iterable

from tinygrad import Tensor

from engine.measure.kernel_roles import BufferUse
from engine.model.buffer_uses import BufferUses
from engine.model.lower.gpu_weights import Attention, DeltaNet, FeedForward, GPUModel, Mixture
from engine.model.lower.prescales import Prescales


def uses_of(
    model: GPUModel,
    prescales: Prescales,
    context: int,
    attention_parts: Iterable[Tensor] = (),
) -> BufferUses:
    """The uses of the weights, the cache and the scratch buffers. `attention_parts`: what attention leaves for another
    kernel."""
    uses = BufferUses()
    uses.add(BufferUse("output head"), *model.head.planes)
    uses.add(BufferUse("embedding", "token", model.spec.vocab), *model.embedding.planes)
    tables = [table for tables in model.ropes for table in tables]
    uses.add(BufferUse("attention", "token", context), *tables, *model.temperatures)
    uses.add(BufferUse("attention"), *attention_parts)
    uses.add(BufferUse("norm"), *prescales.norms.values())
    for layer in model.layers:
        uses.add(BufferUse("norm"), layer.post_norm)
        match layer.mix:
            case Attention() as a:
                uses.add(BufferUse("QKV projection"), a.bias, *a.qkv.planes)
                cache = BufferUse("attention", "context", a.heads.slots, a.heads.window)
                uses.add(cache, *a.cache)
                uses.add(BufferUse("attention"), a.tables)
                uses.add(BufferUse("attention output"), *a.o.planes)
            case DeltaNet() as d:
                uses.add(BufferUse("QKV projection"), *d.inputs.planes)
                uses.add(BufferUse("delta net"), d.memory, *d.vectors)
                uses.add(BufferUse("attention output"), *d.out.planes)
            case FeedForward() as f:
                uses.add(BufferUse("FFN gate+up"), *f.gate_up.planes)
                uses.add(BufferUse("FFN down"), *f.down.planes)
            case Mixture() as m:
                uses.add(BufferUse("router"), m.router_rows, m.router_bias, m.choices, *m.router.planes)
                gate_up, down = [m.gate_up_bias, *m.gate_up.planes], [m.down_bias, *m.down.planes]
                uses.add_experts(m.part, m.part.used, gate_up, down)
    return uses
