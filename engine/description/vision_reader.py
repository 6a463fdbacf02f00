"""Reads an "mmproj" file into the description of its encoder of pictures. No other file knows its families.

Names and keys: tools/mtmd/clip-impl.h of llama.cpp. Where its encoders differ from the published ones, these count:
the exact GELU in mergers, and the form with tanh where a file of Gemma 4 names none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.description.checked_file import CheckedFile
from engine.description.picture_size import SizeRule, TileRule
from engine.description.sublayers import Weight
from engine.description.vision import (
    Activation,
    Affine,
    Bend,
    Linear,
    Merge,
    Norm,
    PatchAttention,
    PatchFeedForward,
    PatchSublayer,
    Positions,
    Projector,
    ProjectorStep,
    Rotations,
    VisionSpec,
)
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged, printable
from engine.formats.rope_order import HeadOrder

ARCHITECTURE = "clip"
KINDS = {
    "qwen2vl_merger": 2,
    "qwen2.5vl_merger": 2,
    "qwen2.5o": 2,
    "qwen3vl_merger": 2,
    "gemma3": 4,
    "gemma4v": 3,
    "pixtral": 2,
    "idefics3": 2,
    "internvl": 2,
}
"""The projector types that the engine runs, and how many patches a side become a token if a file does not say."""
FITTING = {
    "qwen2vl": ("qwen2.5vl_merger", "qwen2vl_merger", "qwen2.5o"),
    "qwen35": ("qwen3vl_merger",),
    "qwen35moe": ("qwen3vl_merger",),
    "qwen3vl": ("qwen3vl_merger",),
    "qwen3vlmoe": ("qwen3vl_merger",),
    "gemma3": ("gemma3",),
    "gemma4": ("gemma4v",),
    "mistral3": ("pixtral",),
    "llama": ("pixtral", "idefics3", "internvl"),
    "internlm2": ("internvl",),
    "phi3": ("internvl",),
    "qwen2": ("internvl",),
    "qwen3": ("internvl",),
    "qwen3moe": ("internvl",),
}
"""The kinds of encoders that models of an architecture have."""

_SAME = {"qwen2.5o": "qwen2.5vl_merger"}
"""Kinds whose encoder of pictures is that of another: Qwen 2.5 Omni has one of sounds beside it."""
_MAX_MERGE, _MAX_SIDE, _MAX_HEAD, _MAX_LAYERS = 16, 1 << 14, 1 << 10, 1 << 10
_QWEN_TOKENS = {"qwen2vl_merger": (4, 4096), "qwen2.5vl_merger": (4, 4096), "qwen3vl_merger": (64, 4096)}
"""The least are those of the published processors. The most is llama.cpp's: the published 16384 fill most contexts."""
_TILES_A_SIDE, _MOST_TILES = 4, 65
_PROJECTOR_EPS = 1e-5
"""Of InternVL's projector, which is PyTorch's."""
_WINDOW = 112
"""The side of a window of Qwen 2.5 VL in pixels."""
_GEMMA4_TOKENS = 280
_MOST_WHOLE = 320
"""The most tokens of a picture that has to be in one step; published files have 256."""
_MOST_PATCHES = 1 << 15
"""Of a picture. Published files have at most half as many; attention of far more would take hours."""
_AUDIO = "a.", "mm.a."


def is_encoder(file: GGUF) -> bool:
    """Whether a file holds an encoder, and no language model."""
    return file.get("general.architecture", str, "") == ARCHITECTURE


def read_vision(file: GGUF) -> VisionSpec:
    """Raises ModelFileError for a file that is no encoder of pictures, for a kind of encoder that the engine does not
    run, and for damaged metadata."""
    name = printable(file.path.name)
    if not is_encoder(file):
        raise ModelFileError(
            f"{name} is not an encoder of pictures.",
            'Choose the file that came with the model; its name usually has "mmproj" in it.',
        )
    try:
        return _Reader(file).spec()
    except (ArithmeticError, ValueError):
        raise damaged(file.path, "its metadata has numbers that nothing can be computed with") from None


class _Reader(CheckedFile):
    """Reads one file. All methods raise ModelFileError."""

    def __init__(self, file: GGUF) -> None:
        super().__init__(file, f"{ARCHITECTURE}.vision")
        kind = file.get("clip.projector_type", str, "") or file.get(self.key("projector_type"), str, "")
        if kind not in KINDS:
            raise ModelFileError(
                f"{self.name} has a projector of the type {printable(kind) or 'none'}, which orin-chat does not run.",
                f"orin-chat runs these: {', '.join(KINDS)}.",
            )
        self.named, self.kind = kind, _SAME.get(kind, kind)
        self.dim, self.patch = self.size("embedding_length"), self.size("patch_size")
        self.heads = self.size("attention.head_count")
        self.head_dim = self.dim // self.heads
        if self.dim % self.heads or self.head_dim % 4 or self.head_dim > _MAX_HEAD or self.patch > _MAX_SIDE:
            raise damaged(file.path, f"{self.dim} elements cannot be {self.heads} heads of patches")
        self.is_merged = (
            kind != "pixtral" or "mm.patch_merger.weight" in file.tensors
        )  # Pixtral 12B has no merger
        merge = self.size("projector.scale_factor", KINDS[kind] if self.is_merged else 1)
        self.merge = self.size("spatial_merge_size", merge)
        if self.merge > _MAX_MERGE or (self.merge > 1 and not self.is_merged):
            raise damaged(file.path, f"{self.merge} patches a side become a token")
        self.eps = self.number("attention.layer_norm_epsilon", 1e-6)
        if not 0 < self.eps < 1:
            raise damaged(file.path, f"the epsilon of its norms is {self.eps}")

    def spec(self) -> VisionSpec:
        layers = self.size("block_count")
        if layers > _MAX_LAYERS:
            raise damaged(self.file.path, f"it has {layers} layers")
        out, steps = self.projector()
        projectors = Projector(2 * layers, steps), *self.later_projectors(layers, out)
        spec = VisionSpec(
            kind=self.named,
            name=self.file.get("general.name", str, self.file.path.stem),
            dim=self.dim,
            patch=self.patch,
            merge=self.merge,
            out=out,
            mean=self.colours("image_mean"),
            std=self.colours("image_std"),
            size=self.size_rule(),
            kernels=tuple(self.kernels()),
            bias=self.vector("v.patch_embd.bias", self.dim),
            positions=self.positions(),
            norm=self.norm("v.pre_ln") if self.has("v.pre_ln.weight") else None,
            sublayers=tuple(sublayer for i in range(layers) for sublayer in self.layer(i)),
            rotations=self.rotations(),
            projectors=projectors,
            line_end=self.required("v.token_embd.img_break", out) if self.kind == "pixtral" else None,
            window=self.window,
            tiles=self.tile_rule(),
            summary=self.required("v.class_embd", self.dim) if self.kind == "internvl" else None,
        )
        if spec.most_patches > _MOST_PATCHES:
            raise damaged(self.file.path, "its pictures would have too many patches")
        unread = [name for name in self.file.tensors.keys() - self.used if not name.startswith(_AUDIO)]
        if unread:
            raise ModelFileError(
                f"{self.name} holds {printable(min(unread))}, which orin-chat does not know in an encoder of the type "
                f"{self.kind}.",
                "It is of a variant that orin-chat does not run. Choose another one.",
            )
        return spec

    # --- pictures --------------------------------------------------------------------------------------

    def colours(self, key: str) -> tuple[float, float, float]:
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

    def size_rule(self) -> SizeRule:
        align = self.patch * self.merge
        if self.kind in _QWEN_TOKENS:
            return SizeRule("area", align, *(n * align**2 for n in reversed(_QWEN_TOKENS[self.kind])))
        if self.kind == "gemma4v":
            return SizeRule("tokens", align, _GEMMA4_TOKENS, longest=self.places // self.merge * align)
        side = self.size("image_size")
        is_tiled = self.kind in ("idefics3", "internvl")
        if is_tiled and (side // self.patch) % self.merge == 0 < side // align:
            return SizeRule("square", align, side // align * align)
        is_odd = self.kind == "gemma3" and (side % align or (side // align) ** 2 > _MOST_WHOLE)
        if side > _MAX_SIDE or is_odd or is_tiled:
            raise damaged(self.file.path, f"its pictures have sides of {side} pixels")
        return SizeRule("square" if self.kind == "gemma3" else "sides", align, side)

    def tile_rule(self) -> TileRule | None:
        """Older files do not say the longer side of all tiles; published models have four. Nor do those of InternVL say
        how many there may be."""
        side = self.size("image_size")
        match self.kind:
            case "idefics3":
                longest = self.size("preproc_image_size", _TILES_A_SIDE * side)
                rule = TileRule(side, "longest", longest)
            case "internvl":
                least, most = self.size("preproc_min_tiles", 1), self.size("preproc_max_tiles", 12)
                rule = TileRule(side, "shape", least=least, most=most)
            case _:
                return None
        if rule.least > rule.most > 0:
            raise damaged(self.file.path, f"its pictures would have {rule.least} tiles of {rule.most}")
        if rule.most_tiles > _MOST_TILES:
            raise damaged(self.file.path, f"its pictures would have {rule.most_tiles} tiles")
        return rule

    # --- the first product -----------------------------------------------------------------------------

    def kernels(self) -> Iterator[Weight]:
        """The kernels of patches: those of a second frame get the same picture."""
        for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
            if self.has(name) or name == "v.patch_embd.weight":
                type = self.check(name, (self.dim, 3, self.patch, self.patch))
                yield Weight(name, self.dim, 3 * self.patch**2, type)

    @property
    def places(self) -> int:
        """The rows of each half of gemma4's table of positions: the most patches a side."""
        info = self.file.tensors.get("v.position_embd.weight")
        if info is None or len(info.shape) != 3 or info.shape[1] < self.merge:
            raise damaged(self.file.path, "its table of positions has no place for a token")
        return info.shape[1]

    def positions(self) -> Positions | None:
        name = "v.position_embd.weight"
        if self.kind in ("pixtral", "qwen2vl_merger", "qwen2.5vl_merger"):
            return None
        shape = self.file.tensors[name].shape if self.has(name) else ()
        if self.kind == "gemma4v":
            return Positions(self.required(name, 2, self.places, self.dim), "column and row")
        rows = shape[0] if shape else 0
        if self.kind in ("gemma3", "idefics3", "internvl"):
            places = (self.size("image_size") // self.patch) ** 2 + (self.kind == "internvl")
            return Positions(self.required(name, places, self.dim), "patch")
        if math.isqrt(rows) ** 2 != rows or not rows:
            raise damaged(self.file.path, f"the places of {name} are no square")
        return Positions(self.required(name, rows, self.dim), "stretched")

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
        if self.kind in _QWEN_TOKENS:
            rates = tuple((10000.0 ** (-2 * i / (d // 2))).tolist())
            return Rotations(by_row=(*rates, *none), by_column=(*none, *rates))
        return None

    @property
    def order(self) -> HeadOrder | None:
        """The order of the rows of queries and keys in the file."""
        if self.kind == "gemma4v":
            return HeadOrder(self.head_dim, self.head_dim, False, halves=True)
        return HeadOrder(self.head_dim, self.head_dim, True) if self.kind == "pixtral" else None

    # --- layers ----------------------------------------------------------------------------------------

    def norm(self, name: str, size: int = 0) -> Norm:
        centred = self.has(f"{name}.bias")
        weight = self.required(f"{name}.weight", size or self.dim)
        return Norm(self.eps, weight, self.vector(f"{name}.bias", size or self.dim), centred)

    def linear(
        self, name: str, rows: int, cols: int, first: int = 0, of: int = 0, order: HeadOrder | None = None
    ) -> Linear:
        def limits(end: str) -> tuple[float, float] | None:
            names = [f"{name}.{end}_{side}" for side in ("min", "max")]
            if not any(map(self.has, names)):
                return None
            low, high = map(self.scalar, names)
            if low > high:
                raise damaged(self.file.path, f"{names[0]} is above {names[1]}")
            return low, high

        weight = self.weight(name, rows, cols, first, of, order)
        bias = self.vector(f"{name}.bias", rows, order, first, of)
        return Linear(weight, bias, limits("input"), limits("output"))

    def scalar(self, tensor: str) -> float:
        """A tensor of one float32."""
        if self.check(tensor, (1,)) != 0:
            raise damaged(self.file.path, f"{tensor} is no float32")
        value = float(self.file.tensors[tensor].read().view(np.float32)[0])
        if math.isnan(value):
            raise damaged(self.file.path, f"{tensor} is {value}")
        return value

    @property
    def window(self) -> int:
        """The side of a window in tokens, 0 if no layer has windows."""
        if self.kind != "qwen2.5vl_merger":
            return 0
        if (side := _WINDOW // (self.patch * self.merge)) == 0:
            raise damaged(
                self.file.path, f"its windows have no place for a token of {self.patch * self.merge} pixels"
            )
        return side

    def layer(self, i: int) -> Iterator[PatchSublayer]:
        def post(name: str, scale: str) -> Norm | None:
            if self.has(f"{prefix}{scale}.weight"):
                return Norm(None, self.required(f"{prefix}{scale}.weight", self.dim))
            return self.norm(prefix + name) if self.has(f"{prefix}{name}.weight") else None

        prefix = f"v.blk.{i}."
        windowed = self.window > 0 and (i + 1) % self.size("n_wa_pattern") > 0
        yield PatchSublayer(
            self.norm(f"{prefix}ln1"), self.attention(prefix, windowed), post("attn_post_norm", "ls1")
        )
        yield PatchSublayer(
            self.norm(f"{prefix}ln2"), self.feed_forward(prefix), post("ffn_post_norm", "ls2")
        )

    def attention(self, prefix: str, windowed: bool) -> PatchAttention:
        dim, order = self.dim, self.order
        if self.has(f"{prefix}attn_qkv.weight"):
            q, k, v = (
                self.linear(f"{prefix}attn_qkv", dim, dim, i * dim, 3 * dim, order if i < 2 else None)
                for i in range(3)
            )
        else:
            q, k, v = (
                self.linear(f"{prefix}attn_{x}", dim, dim, order=order if x != "v" else None) for x in "qkv"
            )

        def head_norm(name: str) -> Norm | None:
            info = self.file.tensors.get(f"{prefix}{name}.weight")
            if info and info.shape == (dim,) != (
                self.head_dim,
            ):  # InternVL's encoder of 6 billion parameters
                raise ModelFileError(
                    f"{self.name} norms queries and keys over all heads, which orin-chat does not run.",
                    "Choose a model with another encoder.",
                )
            weight = self.vector(f"{prefix}{name}.weight", self.head_dim, order)
            return Norm(self.eps, weight) if weight else None

        is_gemma4 = self.kind == "gemma4v"
        return PatchAttention(
            q=q, k=k, v=v, o=self.linear(f"{prefix}attn_out", dim, dim),
            q_norm=head_norm("attn_q_norm"), k_norm=head_norm("attn_k_norm"),
            v_norm=Norm(self.eps) if is_gemma4 else None,
            heads=self.heads, head_dim=self.head_dim, scale=1.0 if is_gemma4 else self.head_dim**-0.5,
            windowed=windowed,
        )  # fmt: skip

    def feed_forward(self, prefix: str) -> PatchFeedForward:
        up, down = "ffn_up", "ffn_down"
        info = self.file.tensors.get(f"{prefix}{up}.weight")
        if info and len(info.shape) == 2 and info.shape[0] == self.dim != info.shape[1]:
            up, down = down, up  # older files have the two names swapped
        # Files of Qwen 2 VL say the width of its model in place of the layer's.
        info = self.file.tensors.get(f"{prefix}{up}.weight")
        width = info.shape[0] if info and info.shape else 0
        has_gate = self.has(f"{prefix}ffn_gate.weight")
        return PatchFeedForward(
            gate=self.linear(f"{prefix}ffn_gate", width, self.dim) if has_gate else None,
            up=self.linear(prefix + up, width, self.dim),
            down=self.linear(prefix + down, self.dim, width),
            activation=self.activation,
        )

    @property
    def activation(self) -> Activation:
        if self.file.get("clip.use_silu", bool, False):
            return "silu"
        if self.kind == "qwen2vl_merger" and not self.file.get("clip.use_gelu", bool, False):
            return "quick gelu"
        if self.kind != "gemma4v" and not self.file.get("clip.use_gelu", bool, False):
            raise ModelFileError(
                f"{self.name} has an activation that orin-chat does not run.", "Choose another encoder."
            )
        return "exact gelu" if self.kind == "internvl" else "gelu"

    # --- the projector ---------------------------------------------------------------------------------

    def projector(self) -> tuple[int, tuple[ProjectorStep, ...]]:
        """The elements of an embedding, and the steps to it."""
        out, dim, joined = self.size("projection_dim"), self.dim, self.merge**2 * self.dim
        match self.kind:
            case "qwen2vl_merger" | "qwen2.5vl_merger" | "qwen3vl_merger":
                first, last = self.linear("mm.0", joined, joined), self.linear("mm.2", out, joined)
                steps = self.norm("v.post_ln"), Merge("join"), first, Bend("exact gelu"), last
            case "gemma3":
                name = "mm.input_projection.weight"
                weight = Weight(name, dim, out, self.check(name, (dim, out)))
                norms = self.norm("v.post_ln"), self.norm("mm.soft_emb_norm")
                return out, (norms[0], Merge("mean"), norms[1], Linear(weight, transposed=True))
            case "idefics3":
                return out, (self.norm("v.post_ln"), Merge("join"), self.linear("mm.model.fc", out, joined))
            case "internvl":
                norm = replace(self.norm("mm.model.mlp.0", joined), eps=_PROJECTOR_EPS)
                first, last = (
                    self.linear("mm.model.mlp.1", out, joined),
                    self.linear("mm.model.mlp.3", out, out),
                )
                return out, (Merge("join"), norm, first, Bend("exact gelu"), last)
            case "gemma4v":
                scaled = Affine(math.sqrt(dim))
                if self.has("v.std_bias"):
                    minus, times = (self.required(f"v.std_{x}", dim) for x in ("bias", "scale"))
                    scaled = Affine(scaled.factor, minus, times)
                last = self.linear("mm.input_projection", out, dim)
                return out, (Merge("mean"), scaled, Norm(self.eps), last)
            case _:
                first, last = self.linear("mm.1", out, dim), self.linear("mm.2", out, out)
                last_steps = first, Bend("exact gelu"), last
                if not self.is_merged:
                    return out, last_steps
                merger = self.linear("mm.patch_merger", dim, joined)
                return out, (self.norm("mm.input_norm"), Merge("channels"), merger, *last_steps)
        return out, steps

    def later_projectors(self, layers: int, out: int) -> Iterator[Projector]:
        """The projectors of some layers, whose results the model adds later (deepstack of Qwen3-VL)."""
        joined = self.merge**2 * self.dim
        for i in range(layers):
            if self.has(f"{(prefix := f'v.deepstack.{i}')}.fc1.weight"):
                first = self.linear(f"{prefix}.fc1", joined, joined)
                last = self.linear(f"{prefix}.fc2", out, joined)
                norm = self.norm(f"{prefix}.norm", joined)
                yield Projector(2 * i + 2, (Merge("join"), norm, first, Bend("exact gelu"), last))
