"""A feed-forward layer and a mixture of experts side by side on a CPU."""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.feed_forward import SideBySide
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.cpu.step_builder import StepBuilder
from engine.targets.cpu.sublayers.dense import DenseHandler
from engine.targets.cpu.sublayers.experts import ExpertsHandler
from engine.targets.cpu.sublayers.handler import Handler, Loading


class SideBySideHandler(Handler):
    """Each of the two has a norm before and one after it, and the router one of its own."""

    def __init__(self, part: SideBySide, norm: Tensor | None, is_added: bool, loading: Loading) -> None:
        vector = loading.weights.vector
        dense_norm, experts_norm = vector(part.dense_norm), vector(part.experts_norm)
        router_norm = vector(part.router_scale)
        self._post_norms = vector(part.dense_post_norm), vector(part.experts_post_norm)
        self._dense = DenseHandler(part.dense, dense_norm, False, loading)
        self._experts = ExpertsHandler(part.experts, experts_norm, False, loading, router_norm)
        self._norms = dense_norm, experts_norm, router_norm, *self._post_norms

    def add_kernels(self, step: StepBuilder) -> None:
        results = step.rows("side result", step.buffers.spec.dim)
        of_dense, of_experts = self._post_norms
        step.multiply(results, *self._dense.hidden(step))
        step.add_normed(step.out, results, of_dense, added=False)
        self._experts.add_to(results, step)
        step.add_normed(step.out, results, of_experts)

    def add_uses(self, uses: BufferUses) -> None:
        uses.add(BufferUse("norm"), *self._norms)
        self._dense.add_uses(uses)
        self._experts.add_uses(uses)
