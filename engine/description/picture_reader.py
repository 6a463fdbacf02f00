"""What an encoder's file says of pictures: their colours, to which sizes they are brought, and how they are cut."""

from __future__ import annotations

import math

import numpy as np

from engine.description.checked_file import CheckedFile
from engine.description.picture_size import SizeRule, TileRule
from engine.description.stem_reader import STEMMED
from engine.description.vision import Padding
from engine.formats.gguf import damaged

MAX_SIDE = 1 << 14
"""Pixels."""
QWEN_TOKENS = {"qwen2vl_merger": (4, 4096), "qwen2.5vl_merger": (4, 4096), "qwen3vl_merger": (64, 4096)}
"""The least are those of the published processors. The most is llama.cpp's: the published 16384 fill most contexts."""
_AREA_TOKENS = QWEN_TOKENS | {"kimivl": (8, 1024), "lfm2": (64, 256), "glm4v": (8, 4096)}
_SAID_AREAS = "dots_ocr", "paddleocr", "phi4", "kimik25", "hunyuanvl", "exaone4_5"
"""Kinds whose files say the least and the most pixels of a picture."""
_KIMI_TOKENS = 2, 4096
"""Of Kimi K2.5's pictures, where a file does not say it."""
_MOST_TOKENS = 8192
"""Of a picture of these: dots.ocr's 14400 would take minutes on most machines."""
_TILES_A_SIDE, _MOST_TILES = 4, 65
_GEMMA4_TOKENS, _MUSE_TOKENS = 280, 4096
_MOST_WHOLE = 320
"""The most tokens of a picture that has to be in one step; published files have 256."""
_MOST_SLICES = 9
_CHOICES = "image_grid_pinpoints"
_LLAMA4_TILES = 16
_STEP3_LONGEST, _STEP3_TILES = 3024, 36
_LFM2_TILES = 2, 10
_LFM2_TOLERANCE = 2
"""A picture is cut if it has so many times the pixels that one may have."""


class PictureReader(CheckedFile):
    """Reads a file that is `named` by its projector and has the encoder of a `kind`, with patches of `patch` pixels a
    side, of which `merge` a side become a token. All methods raise ModelFileError."""

    kind: str
    named: str
    patch: int
    merge: int

    def colours(self, key: str) -> tuple[float, float, float]:
        """Three numbers of the metadata, for red, green and blue of 0 to 1: "image_mean", what is taken off, or
        "image_std", what that is divided by. Raises ModelFileError."""
        values = self.file.metadata.get(self.key(key))
        if not isinstance(values, np.ndarray) or values.shape != (3,) or values.dtype.kind not in "iuf":
            raise damaged(self.file.path, f"{self.key(key)} is not a number for each of three colours")
        red, green, blue = (float(value) for value in values)
        if not all(map(math.isfinite, (red, green, blue))) or (
            key == "image_std" and 0 in (red, green, blue)
        ):
            raise damaged(self.file.path, f"{self.key(key)} cannot be what colours are divided by")
        if self.kind == "gemma4v":  # its encoder takes 2 colour - 1, which its files leave out
            return (0.5, 0.5, 0.5)
        return red, green, blue

    def padding(self) -> Padding | None:
        """The mean of colours. LLaVA 1.6 stretches the whole picture."""
        red, green, blue = (int(255 * min(max(mean, 0.0), 1.0)) for mean in self.colours("image_mean"))
        is_padded = self.kind in ("mlp", "janus_pro", *STEMMED) and not self.has_choices
        return Padding((red, green, blue), self.kind in STEMMED) if is_padded else None

    @property
    def has_choices(self) -> bool:
        """Whether the file says to which sizes pictures are brought before they are cut (LLaVA 1.6, Granite 4
        Vision)."""
        return self.kind in ("mlp", "granite4_vision") and self.key(_CHOICES) in self.file.metadata

    def size_rule(self) -> SizeRule:
        """To which size a picture, or a tile of it, is brought. Raises ModelFileError."""
        align = self.patch * self.merge
        tokens = _AREA_TOKENS.get(self.kind)
        if self.kind == "kimik25" and self.key("image_max_pixels") not in self.file.metadata:
            tokens = _KIMI_TOKENS
        if tokens:
            return SizeRule("area", align, *(n * align**2 for n in reversed(tokens)))
        if self.kind in _SAID_AREAS:
            least, most = self.size("image_min_pixels"), self.size("image_max_pixels")
            if not least <= most >= align**2:
                raise damaged(self.file.path, f"its pictures would have {least} to {most} pixels")
            return SizeRule("area", align, min(most, _MOST_TOKENS * align**2), least)
        if self.kind in ("gemma4v", "gemma4uv"):
            return SizeRule("tokens", align, _GEMMA4_TOKENS, longest=self.places // self.merge * align)
        if self.kind == "muse-glimmer":
            return SizeRule("shape", align, _MUSE_TOKENS)
        side = self.size("image_size")
        if self.kind == "youtuvl":
            most = self.size("image_max_pixels", _MOST_TOKENS * align**2)
            return SizeRule("up", align, max(1, min(most // align**2, _MOST_TOKENS)))
        if self.named == "lightonocr":
            side = self.size("preproc_image_size", side)
        if self.kind in ("resampler", "minicpmv4_6") and align <= side <= MAX_SIDE:
            return SizeRule("mean", align, side)
        is_tiled = self.kind in (
            "idefics3", "internvl", "mlp", "resampler", "janus_pro", "llama4", "nemotron_v2_vl",
            "granite4_vision", "gemma3nv", "adapter", "step3vl",
        )  # fmt: skip
        if is_tiled and (side // self.patch) % self.merge == 0 < side // align:
            return SizeRule("square", align, side // align * align)
        is_odd = self.kind == "gemma3" and (side % align or (side // align) ** 2 > _MOST_WHOLE)
        if side > MAX_SIDE or is_odd or is_tiled:
            raise damaged(self.file.path, f"its pictures have sides of {side} pixels")
        return SizeRule("square" if self.kind == "gemma3" else "sides", align, side)

    def tile_rule(self) -> TileRule | None:
        """Older files do not say the longer side of all tiles; published models have four. Nor do those of InternVL say
        how many there may be, nor those of LFM2-VL anything."""
        side, align = self.size("image_size"), self.patch * self.merge
        match self.kind:
            case "idefics3":
                longest = self.size("preproc_image_size", _TILES_A_SIDE * side)
                rule = TileRule(side, "longest", longest)
            case "internvl":
                least, most = self.size("preproc_min_tiles", 1), self.size("preproc_max_tiles", 12)
                rule = TileRule(side, "shape", least=least, most=most)
            case "deepseekocr" | "deepseekocr2":  # published: 640 and 768 of 1024 pixels
                eighths, published = (5, 9) if self.kind == "deepseekocr" else (6, 6)
                least, most = self.size("preproc_min_tiles", 2), self.size("preproc_max_tiles", published)
                side = self.size_rule().most * eighths // 8 // align * align
                rule = TileRule(side, "shape", least=least, most=most, whole=side)
            case "lfm2":
                least, most = _LFM2_TILES
                side = math.isqrt(_AREA_TOKENS[self.kind][1]) * align
                area = _LFM2_TOLERANCE * side**2
                rule = TileRule(side, "shape", least=least, most=most, area=area, align=align)
            case "resampler" | "minicpmv4_6":
                rule = TileRule(side, "mean", most=_MOST_SLICES, align=align)
            case "step3vl":  # published: 504 of 728 pixels
                longest = self.size("preproc_image_size", _STEP3_LONGEST)
                part = side * 9 // 13 // align * align
                rule = TileRule(part, "windows", longest, most=_STEP3_TILES, area=side)
            case "llama4":
                rule = TileRule(side, "canvas", most=_LLAMA4_TILES)
            case "mlp" | "granite4_vision" if self.has_choices:
                sizes = self.file.get(self.key(_CHOICES), np.ndarray)
                is_whole = sizes.dtype.kind in "iu" and len(sizes) and not (sizes % side).any()
                if len(sizes) % 2 or not is_whole or sizes.min() < side:
                    raise damaged(self.file.path, f"{self.key(_CHOICES)} are no sizes of tiles")
                choices = tuple((across, down) for across, down in sizes.reshape(-1, 2).tolist())
                most = max(across * down for across, down in choices) // side**2
                is_alone = self.kind == "granite4_vision"
                rule = TileRule(side, "choices", most=most, choices=choices, alone=is_alone)
            case "granite4_vision":
                raise damaged(self.file.path, f"{self.key(_CHOICES)} is missing")
            case _:
                return None
        if rule.side < align:
            raise damaged(self.file.path, f"its tiles would have sides of {rule.side} pixels")
        if rule.least > rule.most > 0:
            raise damaged(self.file.path, f"its pictures would have {rule.least} tiles of {rule.most}")
        if rule.most_tiles > _MOST_TILES:
            raise damaged(self.file.path, f"its pictures would have {rule.most_tiles} tiles")
        return rule

    @property
    def places(self) -> int:
        """The rows of each half of gemma4's table of positions: the most patches a side."""
        info = self.file.tensors.get("v.position_embd.weight")
        if info is None or len(info.shape) != 3 or info.shape[1] < self.merge:
            raise damaged(self.file.path, "its table of positions has no place for a token")
        return info.shape[1]
