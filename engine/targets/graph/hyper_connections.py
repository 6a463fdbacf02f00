"""Several residual streams (`engine.description.hyper_connections`) as tensor graphs."""

from __future__ import annotations

from typing import cast

from tinygrad import Tensor

from engine.description.hyper_connections import HashedEmbedding, HyperConnection, Mixing
from engine.description.sublayers import Vector
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.targets.graph.delta_net import convolved
from engine.targets.graph.parts import Parts, Run, normed


class ConnectedLayers(Parts):
    """The sublayers of models with hyper-connections. Each gives what is added to the first stream, (n, dim); the other
    streams are in the run."""

    def _connected(self, operator: HyperConnection, x: Tensor, run: Run) -> Tensor:
        mixing = operator.mixing
        streams = self._streams(x, run, mixing.count)
        n = self._normed_streams(streams, mixing.norm)
        y = self._computed(operator.of, self._mean(mixing, n), run)
        shares = (self._product(operator.inject, n) / mixing.count).sigmoid() * 2
        return self._add(streams, (y.unsqueeze(1) * shares.unsqueeze(-1)).contiguous(), run)

    def _mixed_at_last(self, operator: Mixing, x: Tensor, run: Run) -> Tensor:
        streams = self._streams(x, run, operator.count)
        return self._mean(operator, self._normed_streams(streams, operator.norm)) - x

    def _hashed_embedding(self, operator: HashedEmbedding, x: Tensor, run: Run) -> Tensor:
        step, states, hashed, o = run.step, next(run.states), self.spec.hashed, operator
        assert hashed
        streams, n = self._streams(x, run, o.count), cast(int, x.shape[0])
        rows = n * len(hashed.sizes)
        table = QuantizedMatrix(hashed.table.type, rows, hashed.table.cols)
        e = table.dequantize_rows(step.rows, rows).reshape(n, -1)
        key = self._product(o.key, e).reshape(n, o.count, -1)
        key, query = self._normed_streams(key, o.key_norm), self._normed_streams(streams, o.query_norm)
        a = (key * query).reshape(n, o.count, -1).sum(-1, keepdim=True) / self.spec.dim**0.5
        gate = (a.sign() * a.abs().maximum(1e-6).sqrt()).sigmoid()
        gated = (gate * self._product(o.value, e).unsqueeze(1)).contiguous()
        [before] = states.of(step.sequence)
        taps, inputs = self._vectors[o.conv], self._normed_streams(gated, o.conv_norm)
        y, inputs = convolved(inputs, taps, before, step.used, o.dilation)
        y = states.store(step.sequence, y.silu(), inputs).reshape(gated.shape)
        return self._add(streams, (gated + y).contiguous(), run)

    def _streams(self, x: Tensor, run: Run, count: int) -> Tensor:
        """All streams, of which x (n, dim) is the first: (n, count, dim)."""
        return Tensor.stack(x, *(run.others or [x] * (count - 1)), dim=1)

    def _add(self, streams: Tensor, added: Tensor, run: Run) -> Tensor:
        """Adds to all streams but the first, and gives what is to be added to that."""
        count = cast(int, streams.shape[1])
        run.others = [(streams[:, i] + added[:, i]).contiguous().realize() for i in range(1, count)]
        return added[:, 0]

    def _normed_streams(self, streams: Tensor, norm: Vector) -> Tensor:
        """Streams (n, count, dim) normed each by itself, one after the other: (n, count * dim)."""
        n = cast(int, streams.shape[0])
        y = normed(streams, self.spec.eps).reshape(n, -1) * self._vectors[norm]
        return y.contiguous()

    def _mean(self, mixing: Mixing, n: Tensor) -> Tensor:
        """What is read of normed streams."""
        low = (self._product(mixing.down, n) / mixing.count).silu()
        y = n * self._product(mixing.up, low).sigmoid()
        return y.reshape(y.shape[0], mixing.count, -1).mean(1).contiguous()
