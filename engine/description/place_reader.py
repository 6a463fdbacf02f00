"""What an encoder's file says of patches: the matrices that read their pixels, their places, and how heads turn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.description.picture_reader import QWEN_TOKENS, PictureReader
from engine.description.projector_reader import ProjectorReader
from engine.description.stem_reader import STEM_STRIDE, stem_side
from engine.description.sublayers import Weight
from engine.description.vision import Norm, Positions, ResizedPositions, Rotations
from engine.formats.gguf import damaged
from engine.formats.rope_order import HeadOrder

_WITHOUT_PLACES = (
    "pixtral",
    "qwen2vl_merger",
    "qwen2.5vl_merger",
    "exaone4_5",
    "dots_ocr",
    "youtuvl",
    "gemma3nv",
    "deepseekocr2",
)
_GLM_NORM = "v.norm_embd"
"""A norm of patches, before their positions are added."""
_RESIZED: dict[str, ResizedPositions] = {
    "paddleocr": "bilinear",
    "step3vl": "bilinear",
    "hunyuanvl": "bilinear",
    "muse-glimmer": "faded",
    "kimivl": "bicubic",
    "kimik25": "bicubic",
    "glm4v": "bicubic",
    "lfm2": "smoothed",
    "phi4": "smoothed",
}
_MORE_PLACES = {"hunyuanvl": 0.1}
"""`Positions.more` of the published code, which guards so against sizes that are rounded down."""


class PlaceReader(ProjectorReader, PictureReader):
    """Reads an encoder with `heads` of `head_dim` elements, if it `has_layers`. All methods raise ModelFileError."""

    heads: int
    head_dim: int
    has_layers: bool

    @property
    def has_summary(self) -> bool:
        always = self.kind in ("internvl", "llama4", "nemotron_v2_vl", "deepseekocr")
        return always or (self.kind == "mlp" and self.has("v.class_embd"))

    def kernels(self) -> Iterator[Weight]:
        """The kernels of patches: those of a second frame get the same picture."""
        is_flat = self.kind in ("gemma4uv", "llama4", "youtuvl")
        shape = (3 * self.patch**2,) if is_flat else (3, self.patch, self.patch)
        for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
            if self.has(name) or name == "v.patch_embd.weight":
                yield Weight(name, self.dim, 3 * self.patch**2, self.check(name, (self.dim, *shape)))

    def positions(self) -> Positions | None:
        """The table of places that is added to patches, and how it is read for another number of them; None without
        one. Raises ModelFileError."""
        name = "v.position_embd.weight"
        if self.kind in _WITHOUT_PLACES:
            return None
        if self.kind == "glm4v" and not self.has(name):  # GLM-OCR
            return None
        shape = self.file.tensors[name].shape if self.has(name) else ()
        if self.kind in ("gemma4v", "gemma4uv"):
            table = self.required(name, 2, self.places, self.dim)
            return Positions(table, "column and row", after_norm=not self.has_layers)
        if self.kind == "kimik25" and len(shape) == 3 and shape[0] == shape[1]:
            return Positions(self.required(name, *shape[:2], self.dim), "bicubic")
        if self.kind == "deepseekocr":
            places = (stem_side(self) // STEM_STRIDE) ** 2
            return Positions(self.required(name, places + 1, self.dim), "smoothed bicubic")
        rows = shape[0] if shape else 0
        places = (self.size("image_size") // self.patch) ** 2
        if self.kind == "nemotron_v2_vl":
            return Positions(self.required(name, places, self.dim), "patch", of_summary="none")
        if self.kind in (
            "gemma3",
            "idefics3",
            "internvl",
            "mlp",
            "janus_pro",
            "llama4",
            "granite4_vision",
            "adapter",
        ):
            table = self.required(name, places + self.has_summary, self.dim)
            return Positions(table, "patch", of_summary="last" if self.kind == "llama4" else "first")
        least, is_smoothed = self.size_rule().least // self.patch**2, _RESIZED.get(self.kind) == "smoothed"
        if math.isqrt(rows) ** 2 != rows or not rows or (is_smoothed and rows > 4 * least):
            raise damaged(self.file.path, f"the places of {name} are no square")
        table = self.required(name, rows, self.dim)
        if self.kind in ("resampler", "minicpmv4_6"):
            return Positions(table, "nearest")
        is_later, more = self.has(f"{_GLM_NORM}.weight"), _MORE_PLACES.get(self.kind, 0.0)
        return Positions(table, _RESIZED.get(self.kind, "stretched"), is_later, more=more)

    def patch_norm(self, i: int, size: int) -> Norm:
        """A norm of the encoder without layers: of pixels, of their product, and of that with positions."""
        return replace(self.norm(f"v.patch_norm.{i}", size), eps=1e-5)

    def first_norm(self) -> Norm | None:
        if self.kind == "gemma4uv":
            return self.patch_norm(2, self.dim)
        found = [name for name in ("v.pre_ln", _GLM_NORM) if self.has(f"{name}.weight")]
        return self.norm(found[0]) if found else None

    def rotations(self) -> Rotations | None:
        """See `engine.formats.rope_order`: the pairs are half a head apart."""
        d, n = self.head_dim, self.head_dim // 4
        none, i = (0.0,) * n, np.arange(n)
        if self.kind == "gemma4v":
            rates = tuple((100.0 ** (-2 * i / (d // 2))).tolist())
            return Rotations(by_row=(*none, *rates), by_column=(*rates, *none))
        if self.kind == "pixtral":
            rows = 10000.0 ** (-4 * i / d)
            columns = tuple((rows * 10000.0 ** (-2 / d)).tolist())
            return Rotations(by_row=(*rows.tolist(), *none), by_column=(*none, *columns))
        rates = tuple((10000.0 ** (-2 * i / (d // 2))).tolist())
        if self.kind in ("kimivl", "kimik25", "llama4", "muse-glimmer", "step3vl"):
            first = int(self.kind in ("llama4", "muse-glimmer"))
            return Rotations(by_row=(*none, *rates), by_column=(*rates, *none), first=first)
        if self.kind in (*QWEN_TOKENS, "exaone4_5", "dots_ocr", "paddleocr", "glm4v", "youtuvl"):
            return Rotations(by_row=(*rates, *none), by_column=(*none, *rates))
        return None

    @property
    def order(self) -> HeadOrder | None:
        """The order of the rows of queries and keys in the file."""
        if self.kind == "gemma4v":
            return HeadOrder(self.head_dim, self.head_dim, False, halves=True)
        has_pairs = self.kind in ("pixtral", "kimivl", "kimik25", "llama4", "muse-glimmer", "step3vl")
        return HeadOrder(self.head_dim, self.head_dim, True) if has_pairs else None
