"""Reads the stem of the encoders of DeepSeek-OCR: SAM's, with convolutions after it (https://arxiv.org/abs/2510.18234)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from engine.description.projector_reader import ProjectorReader
from engine.description.sublayers import Weight
from engine.description.vision import (
    Convolution,
    Linear,
    Norm,
    PatchAttention,
    PatchFeedForward,
    PatchSublayer,
    Stem,
)
from engine.formats.gguf import damaged

STEMMED = "deepseekocr", "deepseekocr2"
"""Kinds with a stem."""
STEM_STRIDE = 4
"""How many patches of a stem a side become one of the encoder."""
_EPS = 1e-6
_GLOBAL = 2, 5, 8, 11
"""The layers whose attention has no windows."""
_MOST_LAYERS, _MOST_SIDE, _MOST_HEAD = 1 << 8, 1 << 8, 1 << 9
_KERNELS, _POSITIONS = "v.sam.patch_embd.weight", "v.sam.pos_embd.weight"


def stem_patch(reader: ProjectorReader) -> int:
    """Pixels a side of a patch. Raises ModelFileError."""
    info = reader.file.tensors.get(_KERNELS)
    if info is None or len(info.shape) != 4 or not 0 < info.shape[-1] <= _MOST_SIDE:
        raise damaged(reader.file.path, f"it has no patches in {_KERNELS}")
    return info.shape[-1]


def stem_side(reader: ProjectorReader) -> int:
    """Rows and columns of patches. Raises ModelFileError."""
    info = reader.file.tensors.get(_POSITIONS)
    side = math.isqrt(math.prod(info.shape[:-1])) if info and len(info.shape) > 2 else 0
    if side % STEM_STRIDE or not 0 < side <= _MOST_SIDE:
        raise damaged(reader.file.path, f"the places of {_POSITIONS} are no square")
    return side


def read_stem(reader: ProjectorReader, window: int) -> Stem:
    """Raises ModelFileError."""
    dim, layers = reader.size("sam.embedding_length"), reader.size("sam.block_count")
    heads, side, patch = reader.size("sam.head_count"), stem_side(reader), stem_patch(reader)
    if dim % heads or not 0 < dim // heads <= _MOST_HEAD or layers > _MOST_LAYERS or window > side:
        raise damaged(reader.file.path, f"its stem has {layers} layers of {dim} elements and {heads} heads")
    kernel = Weight(_KERNELS, dim, 3 * patch**2, reader.check(_KERNELS, (dim, 3, patch, patch)))
    shape = reader.file.tensors[_POSITIONS].shape
    first = (1,) * (len(shape) - 3)
    return Stem(
        patch=patch,
        side=side,
        dim=dim,
        window=window,
        kernel=Linear(kernel, reader.vector("v.sam.patch_embd.bias", dim)),
        positions=reader.required(_POSITIONS, *first, side, side, dim),
        sublayers=tuple(
            sublayer
            for i in range(layers)
            for sublayer in _layer(reader, i, dim, heads, 0 if i in _GLOBAL else window)
        ),
        convolutions=tuple(_convolutions(reader, dim)),
    )


def _layer(reader: ProjectorReader, i: int, dim: int, heads: int, window: int) -> Iterator[PatchSublayer]:
    prefix, head = f"v.sam.blk.{i}.", dim // heads
    q, k, v = (reader.linear(f"{prefix}attn.qkv", dim, dim, part * dim, 3 * dim) for part in range(3))
    places = 2 * (window or stem_side(reader)) - 1
    by_rows, by_columns = (reader.required(f"{prefix}attn.pos_{x}.weight", places, head) for x in "hw")
    attention = PatchAttention(
        q=q, k=k, v=v, o=reader.linear(f"{prefix}attn.out", dim, dim), q_norm=None, k_norm=None, v_norm=None,
        heads=heads, head_dim=head, scale=head**-0.5, windowed=window > 0, by_rows=by_rows, by_columns=by_columns,
    )  # fmt: skip
    width = reader.rows_of(f"{prefix}mlp.lin1")
    up, down = (
        reader.linear(f"{prefix}mlp.lin1", width, dim),
        reader.linear(f"{prefix}mlp.lin2", dim, width),
    )
    yield PatchSublayer(_norm(reader, f"{prefix}pre_ln", dim), attention, None)
    fed = PatchFeedForward(None, up, down, "exact gelu")
    yield PatchSublayer(_norm(reader, f"{prefix}post_ln", dim), fed, None)


def _convolutions(reader: ProjectorReader, dim: int) -> Iterator[Convolution]:
    """Two with norms at all places, and two at every other place."""
    convolutions = (
        ("neck.0", 1, 1, "neck.1"),
        ("neck.2", 3, 1, "neck.3"),
        ("net_2", 3, 2, ""),
        ("net_3", 3, 2, ""),
    )
    for name, kernel, stride, norm in convolutions:
        rows = reader.rows_of(f"v.sam.{name}")
        tensor = f"v.sam.{name}.weight"
        weight = Weight(tensor, rows, dim * kernel**2, reader.check(tensor, (rows, dim, kernel, kernel)))
        yield Convolution(weight, kernel, stride, _norm(reader, f"v.sam.{norm}", rows) if norm else None)
        dim = rows
    if dim != reader.dim:
        raise damaged(reader.file.path, f"its stem makes {dim} elements, and its encoder reads {reader.dim}")


def _norm(reader: ProjectorReader, name: str, size: int) -> Norm:
    return replace(reader.norm(name, size), eps=_EPS)
