"""What the buffers of a model on a GPU are for, so that a profile can tell the roles of kernels."""

from __future__ import annotations

from collections.abc import Iterable

from tinygrad import Tensor

from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.weights import GPUModel


def uses_of(
    model: GPUModel, input_scales: InputScales, context: int, attention_parts: Iterable[Tensor]
) -> BufferUses:
    """The uses of the weights, the cache and the scratch buffers. `attention_parts`: what attention leaves for another
    kernel."""
    uses = BufferUses()
    uses.add(BufferUse("output head"), *model.head.planes)
    uses.add(BufferUse("embedding", "token", model.spec.vocab), *model.embedding.planes)
    if model.positions:
        uses.add(BufferUse("embedding", "token", model.positions.single_matrix.rows), *model.positions.planes)
    tables = [table for tables in model.ropes for table in tables]
    uses.add(BufferUse("attention", "token", context), *tables, model.temperature)
    uses.add(BufferUse("attention"), *attention_parts)
    uses.add(BufferUse("norm"), *input_scales.norms.values())
    if model.layer_tables:
        model.layer_tables.roles(uses)
    for layer in model.layers:
        uses.add(BufferUse("norm"), layer.post_norm, layer.scale)
        layer.handler.roles(uses)
    return uses
