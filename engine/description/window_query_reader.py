"""Reads the projectors of Granite 4 Vision: queries in windows of the patches after some layers, a projector for each
of the parts of a picture that the model's layers add (tools/mtmd/models/granite4-vision.cpp of llama.cpp)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.description.projector_reader import ProjectorReader
from engine.description.sublayers import Vector
from engine.description.vision import (
    CrossAttention,
    Linear,
    Norm,
    PatchFeedForward,
    Projector,
    WindowQueries,
)
from engine.formats.gguf import damaged

_EPS, _HEAD = 1e-12, 64
_MOST_PROJECTORS = 32


def window_sides(reader: ProjectorReader) -> tuple[int, int]:
    """The side of a window in tokens, and that of a token in patches. Raises ModelFileError."""
    tokens, patches = reader.size("projector.query_side"), reader.size("projector.window_side")
    if patches % tokens:
        raise damaged(reader.file.path, f"{tokens} queries a side have windows of {patches} patches a side")
    if (side := reader.size("image_size") // reader.size("patch_size")) % patches:
        raise damaged(reader.file.path, f"{side} patches a side are no windows of {patches}")
    return tokens, patches // tokens


def window_projectors(reader: ProjectorReader, layers: int) -> Iterator[Projector]:
    """Raises ModelFileError."""
    out = reader.size("projection_dim")
    read, offsets = _numbers(reader, "feature_layer"), _numbers(reader, "projector.spatial_offsets")
    if len(read) != len(offsets) or any(not 0 <= layer < layers for layer in read):
        raise damaged(reader.file.path, f"its projectors read the layers {read} of {layers}")
    tokens, side = window_sides(reader)
    if reader.dim % _HEAD or any(not -1 <= offset < side**2 for offset in offsets):
        raise damaged(reader.file.path, f"its queries are those of the patches {offsets}")
    for i, (layer, offset) in enumerate(zip(read, offsets, strict=True)):
        queries = _queries(reader, i, None if offset < 0 else offset, tokens, side)
        yield Projector(2 * layer + 2, (queries, reader.linear(f"v.proj_blk.{i}.linear", out, reader.dim)))


def _numbers(reader: ProjectorReader, key: str) -> list[int]:
    found = reader.file.get(reader.key(key), np.ndarray, np.zeros(0, np.int32))
    if found.dtype.kind not in "iu" or not 0 < len(found) <= _MOST_PROJECTORS:
        raise damaged(reader.file.path, f"{reader.key(key)} has not a number for each projector")
    return [int(number) for number in found]


def _queries(reader: ProjectorReader, i: int, patch: int | None, tokens: int, side: int) -> WindowQueries:
    prefix, dim = f"v.proj_blk.{i}.", reader.dim

    def norm(name: str) -> Norm:
        return replace(reader.norm(prefix + name), eps=_EPS)

    def linear(name: str, rows: int = dim, cols: int = dim) -> Linear:
        return reader.linear(prefix + name, rows, cols)

    def attention(name: str) -> CrossAttention:
        q, k, v, o = (linear(f"{name}_{x}") for x in ("q", "k", "v", "out"))
        return CrossAttention(q, k, v, o, norm(f"{name}_norm"), dim // _HEAD, _HEAD)

    def table(name: str, count: int) -> Vector:
        info = reader.file.tensors.get(prefix + name)
        first = info.shape[:-2] if info and math.prod(info.shape[:-2]) == 1 else ()
        return reader.required(prefix + name, *first, count, dim)

    width = reader.rows_of(f"{prefix}ffn_up")
    return WindowQueries(
        norm=reader.norm(f"{prefix}norm"),
        patch=patch,
        queries=table("query", tokens**2),
        places=table("img_pos", (tokens * side) ** 2),
        query_norm=norm("post_norm"),
        own=attention("self_attn"),
        cross=attention("cross_attn"),
        feed_forward=PatchFeedForward(
            None, linear("ffn_up", width), linear("ffn_down", dim, width), "exact gelu"
        ),
        last_norm=norm("ffn_norm"),
    )
