"""What a user reads when a step's logits are no finite numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.description.spec import ModelSpec
from engine.description.sublayers import Operator
from engine.errors import ModelFileError


def not_finite(spec: ModelSpec, outputs: Iterable[NDArray[np.float32]]) -> ModelFileError:
    """`outputs`: the residual stream of a token after the embedding and after each sublayer, float32 (dim,), which are
    looked at until one is not finite."""
    places = ["the embedding", *(_place(sublayer.operator) for sublayer in spec.sublayers)]
    broken = (place for place, x in zip(places, outputs, strict=True) if not np.isfinite(x).all())
    return ModelFileError(
        f"The weights of this model are damaged: the output of {next(broken, 'the last product')} is not finite.",
        "Get the file again. If it is whole, its numbers are too large here: take another quantization.",
    )


def _place(operator: Operator) -> str:
    """Where a sublayer is in the file: layer 3 (attn_q, attn_k, attn_v, attn_output)."""
    names = dict.fromkeys(weight.name for weight in operator.weights)
    return f"layer {operator.weights[0].tensor.split('.')[1]} ({', '.join(names)})"
