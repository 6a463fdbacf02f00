"""Streams beside the residual one (`engine.description.altup`) as tensor graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tinygrad import Tensor

from engine.description.altup import Correction, LowRank, Merge, Modes, Prediction
from engine.description.sublayers import Weight
from engine.targets.graph.parts import Parts, Run


class StreamLayers(Parts):
    """The sublayers of models with several streams."""

    def _low_rank(self, operator: LowRank, h: Tensor, run: Run) -> Tensor:
        y = self._product(operator.right, self._product(operator.left, h))
        return h + self._norm(y, operator.norm)

    def _predict(self, operator: Prediction, x: Tensor, run: Run) -> Tensor:
        """Each gives what is added to the first stream, (n, dim); the other streams are in the run."""
        if operator.begins:
            run.others = self._as_long(operator.begins, [x] * len(operator.begins), x)
        streams, count = [x, *run.others], operator.count
        mixed = self._mixed(operator, x)
        sums = [
            sum((mixed[:, j * count + i : j * count + i + 1] * s for i, s in enumerate(streams)), start=x * 0)
            for j in range(count)
        ]
        first, *run.others = run.predicted = [
            (s + added).contiguous().realize() for s, added in zip(streams, sums, strict=True)
        ]
        return first - x

    def _correct(self, operator: Correction, x: Tensor, run: Run) -> Tensor:
        change, correct = (x - run.predicted[0]).contiguous(), self._mixed(operator, x) + 1
        first, *others = (p + change * correct[:, i : i + 1] for i, p in enumerate(run.predicted))
        scaled = (first * self._vectors[operator.scale]).contiguous()
        embedding = operator.embedding
        of_layer = self._product(embedding.gate, scaled).gelu() * run.of_layers[embedding.layer]
        added = self._norm(self._product(embedding.proj, of_layer), operator.embedding_norm)
        run.others = [(o + added).contiguous().realize() for o in others]
        return first - x

    def _merge(self, operator: Merge, x: Tensor, run: Run) -> Tensor:
        streams = self._as_long(operator.ends, run.others, x)
        return sum(streams, start=x) / (len(streams) + 1) - x

    def _mixed(self, operator: Modes, x: Tensor) -> Tensor:
        """The products of coefficients of the streams x (n, dim): (n, rows of the coefficients)."""
        modes = self._product(operator.router, self._norm(x, operator.router_norm)).tanh()
        coefficients = self._vectors[operator.coefficients].reshape(1, -1, operator.count)
        return (coefficients * modes.unsqueeze(1)).sum(-1).contiguous()

    def _as_long(self, weights: Sequence[Weight], rows: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        """The products with rows (n, dim) each, as long as x."""
        length = (x * x).sum(-1, keepdim=True)
        products = [self._product(weight, row) for weight, row in zip(weights, rows, strict=True)]
        return [
            cast(Tensor, y * (length / (y * y).sum(-1, keepdim=True)).sqrt()).contiguous() for y in products
        ]
