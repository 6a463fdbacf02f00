"""What the buffers of a model on a GPU are for, so that a profile can tell the roles of kernels."""

from __future__ import annotations

from collections.abc import Iterable

from tinygrad import Tensor

from engine.measure.kernel_roles import BufferUse
from engine.model.buffer_uses import BufferUses
from engine.model.lower.gpu_layers import Attention, DeltaNet, Embedded, FeedForward, Mix, Mixture, SideBySide
from engine.model.lower.gpu_weights import GPUModel
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
    uses.add(BufferUse("attention", "token", context), *tables, model.temperature)
    uses.add(BufferUse("attention"), *attention_parts)
    uses.add(BufferUse("norm"), *prescales.norms.values())
    if tables_of_layers := model.layer_tables:
        table = BufferUse("embedding", "token", model.spec.vocab)
        uses.add(table, *tables_of_layers.table.planes)
        uses.add(BufferUse("embedding"), *tables_of_layers.projection.planes)
    for layer in model.layers:
        uses.add(BufferUse("norm"), layer.post_norm, layer.scale)
        _add(uses, layer.mix)
    return uses


def _add(uses: BufferUses, mix: Mix) -> None:
    """Adds those of a layer."""
    match mix:
        case Attention() as a:
            uses.add(BufferUse("QKV projection"), a.bias, *a.qkv.planes)
            cache = BufferUse("attention", "context", a.heads.slots, a.heads.window)
            uses.add(cache, *a.cache)
            uses.add(BufferUse("attention"), a.tables)
            uses.add(BufferUse("attention output"), *a.o.planes)
        case DeltaNet() as d:
            uses.add(BufferUse("QKV projection"), *d.inputs.planes)
            uses.add(BufferUse("delta net"), d.memory, *d.vectors.values())
            uses.add(BufferUse("attention output"), *d.out.planes)
        case FeedForward() as f:
            uses.add(BufferUse("FFN gate+up"), *f.gate_up.planes)
            uses.add(BufferUse("FFN down"), *f.down.planes)
        case Mixture() as m:
            router = m.router_rows, m.router_bias, m.choices, m.scales, *m.router.planes
            uses.add(BufferUse("router"), *router)
            gate_up, down = [m.gate_up_bias, *m.gate_up.planes], [m.down_bias, *m.down.planes]
            uses.add_experts(m.part, m.part.used, gate_up, down)
        case SideBySide() as both:
            uses.add(BufferUse("norm"), both.dense_post_norm, both.experts_post_norm)
            _add(uses, both.dense)
            _add(uses, both.experts)
        case Embedded() as e:
            uses.add(BufferUse("FFN gate+up"), *e.gate.planes)
            uses.add(BufferUse("FFN down"), *e.proj.planes)
