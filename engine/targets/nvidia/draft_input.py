"""The begin of a draft head's residual stream on a GPU: the products with an embedding and with what the model made of
the token before (`engine.description.spec.Join`, `Narrowing`)."""

from __future__ import annotations

from tinygrad import Tensor

from engine.description.spec import Join, Narrowing
from engine.loading.weights import Weights
from engine.targets.nvidia.kernels.residual_stream.joining import add_sums
from engine.targets.nvidia.matrices import product_of
from engine.targets.nvidia.norms import Norm, no_norm
from engine.targets.nvidia.prompt_step import PromptStep


class DraftInput:
    """The matrices and norms of a `Join`, or of a `Narrowing`, which has none and a matrix `back`."""

    def __init__(self, join: Join | Narrowing, weights: Weights) -> None:
        """Raises ModelFileError."""
        self.of_embedding, self.of_hidden = product_of(join.of_embedding), product_of(join.of_hidden)
        self.products = [self.of_embedding, self.of_hidden]
        self._width = join.of_embedding.cols
        if isinstance(join, Narrowing):
            self.back = product_of(join.back)
            self.products.append(self.back)
            self._norms = [no_norm(self._width)] * 2
        else:
            self._norms = [Norm(weights.vector(norm)) for norm in (join.embedding_norm, join.hidden_norm)]

    def begin(self, step: PromptStep, embedded: Tensor, hidden: Tensor) -> None:
        """Adds the kernels that make the stream of embeddings and of `hidden`, float32 (tokens * width,) each."""
        stream, sums = step.h, []
        names = "joined_embedding", "joined_hidden"
        for rows, norm, product, name in zip(
            (embedded, hidden), self._norms, self.products, names, strict=False
        ):
            step.h, step.width = rows, self._width
            step.norm(norm)
            sums.append(step.product(product.single_matrix, step.x, name))
        step.h, step.width = stream, step.spec.dim
        kernel = add_sums(step.tokens, step.spec.dim, (sums[0].parts, sums[1].parts))
        step.add(kernel, out=stream, first=sums[0].tensor, second=sums[1].tensor)
