"""A small model whose first layers add parts of pictures (deepstack), and prompts with pictures for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.description.spec import ModelSpec
from engine.formats.templates.prompt_pictures import PlacedPicture, SizedPicture
from engine.runtime.pictures import Encoding, Pictures, picture_ids
from tests import generated_model


def model_with_parts(path: Path, count: int = 2) -> Path:
    """Writes one of three layers, of which the first `count` add a part."""
    return generated_model.write(
        path, architecture="qwen3vl", quant="F32", layers=3, dim=64, heads=2, kv_heads=1, ffn=64,
        keys={"n_deepstack_layers": count},
    )  # fmt: skip


def seen_tokens(spec: ModelSpec, count: int) -> tuple[list[int], Pictures, NDArray[np.float32]]:
    """A prompt of 20 tokens, of which `count` are pictures of one token each, whose positions are those of a text; and
    the embeddings of these, zeros where a token is none: float32 (20, picture_width)."""
    rng = np.random.default_rng(count)
    tokens = rng.integers(3, 200, 20).tolist()
    embeddings = np.zeros((len(tokens), spec.picture_width), np.float32)
    placed = []
    for at in range(2, 2 + 3 * count, 3):
        embeddings[at] = rng.standard_normal(spec.picture_width)
        ids = picture_ids(f"{at}", 1)
        tokens[at] = ids[0]
        placed.append(PlacedPicture(at, SizedPicture((), 1, 1, ids, f"{at}")))
    pictures = Pictures(placed)
    for i, at in enumerate(placed):
        pictures.encodings[i] = Encoding(at.picture, iter(()), embeddings[at.first][None])  # type: ignore[arg-type]
    return tokens, pictures, embeddings
