"""Reads an "mmproj" file into the description of its encoder of pictures. No other file knows its families.

Names and keys: tools/mtmd/clip-impl.h of llama.cpp. Where its encoders differ from the published ones, these count:
the exact GELU in mergers, and the form with tanh where a file of Gemma 4 names none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from engine.description.convolution_reader import TOKENS_A_SIDE, read_net
from engine.description.encoder_kinds import KINDS, MINICPM_2_5
from engine.description.picture_reader import MAX_SIDE
from engine.description.picture_size import SizeRule
from engine.description.place_reader import PlaceReader
from engine.description.stem_reader import STEM_STRIDE, STEMMED, read_stem, stem_patch, stem_side
from engine.description.vision import (
    ConvolutionNet,
    Ends,
    FixedRow,
    Linear,
    Norm,
    OwnQueries,
    PatchAttention,
    PatchFeedForward,
    PatchSublayer,
    Projector,
    ProjectorStep,
    Reduction,
    Stem,
    VisionSpec,
)
from engine.description.window_query_reader import window_projectors, window_sides
from engine.errors import ModelFileError
from engine.formats.dequantize import HOST_TYPES
from engine.formats.ggml_types import TYPES
from engine.formats.gguf import GGUF, damaged, printable

ARCHITECTURE = "clip"
_SAME = {"qwen2.5o": "qwen2.5vl_merger", "lightonocr": "pixtral"}
"""Kinds whose encoder of pictures is that of another: Qwen 2.5 Omni has one of sounds beside it, LightOnOCR no ends of
lines."""
_MAX_MERGE, _MAX_HEAD, _MAX_LAYERS = 16, 1 << 10, 1 << 10
_REDUCTION = "v.vit_merger."
"""How the names of tensors begin between two layers of MiniCPM-V 4.6, where four patches become one row."""
_WINDOW = 112
"""The side of a window in pixels, of files that do not say it, as those of Qwen 2.5 VL."""
_GLOBAL_EVERY = 4
"""Of so many layers of Muse Glimmer the last has no windows."""
_MOST_PATCHES = 1 << 15
"""Of a picture. Published files have at most half as many; attention of far more would take hours."""
_LINE, _SEPARATOR = "v.image_newline", "v.view_seperator"
_UNUSED = "a.", "mm.a.", "resampler.pos_embed_k", "model.image_newline", _LINE, _SEPARATOR
"""Encoders of sounds; places that are computed for each size; ends of lines, which llama.cpp leaves out, too; what
stands between views, of which a picture has one."""
_OLDEST_MINICPM = 2
"""The number of MiniCPM-V 2.5, which is meant if a file has none."""
_MOST_SUMMARIES = 64


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


class _Reader(PlaceReader):
    """Reads one file. All methods raise ModelFileError."""

    def __init__(self, file: GGUF) -> None:
        super().__init__(file, f"{ARCHITECTURE}.vision")
        kind = file.get("clip.projector_type", str, "") or file.get(self.key("projector_type"), str, "")
        if not kind and file.get("clip.has_llava_projector", bool, False):
            kind = "mlp"
        version = file.get("clip.minicpmv_version", int, 0) or _OLDEST_MINICPM
        if kind == "resampler" and version < _OLDEST_MINICPM:
            raise ModelFileError(
                f"{self.name} is of an older MiniCPM-V than 2.5 (its version is {version}), which orin-chat does not "
                "run.",
                "MiniCPM-V 2.5 and newer ones see.",
            )
        if kind not in KINDS and file.get("clip.has_audio_encoder", bool, False):
            raise ModelFileError(
                f"{self.name} is an encoder of sounds, and orin-chat hears none.",
                "Leave out --mmproj: the model answers texts.",
            )
        if kind not in KINDS:
            raise ModelFileError(
                f"{self.name} has a projector of the type {printable(kind) or 'none'}, which orin-chat does not run.",
                f"orin-chat runs these: {', '.join(KINDS)}.",
            )
        self.named, self.kind = kind, _SAME.get(kind, kind)
        if kind == "resampler" and version == _OLDEST_MINICPM:
            self.named = MINICPM_2_5
        self.dim, self.patch = self.size("embedding_length"), self.size("patch_size")
        if kind in STEMMED:  # its file says those of the encoder that has the stem now
            self.patch = stem_patch(self) * STEM_STRIDE
        if kind == "gemma3nv":
            self.patch = max(1, self.size("image_size") // TOKENS_A_SIDE)
        self.has_layers = kind not in ("gemma4uv", "gemma3nv")
        self.heads = self.size("attention.head_count") if self.has_layers else self.dim // 4
        self.head_dim = self.dim // self.heads
        if self.dim % self.heads or self.head_dim % 4 or self.head_dim > _MAX_HEAD or self.patch > MAX_SIDE:
            raise damaged(file.path, f"{self.dim} elements cannot be {self.heads} heads of patches")
        # Pixtral 12B has no merger
        self.is_merged = kind != "pixtral" or "mm.patch_merger.weight" in file.tensors
        merge = self.size("projector.scale_factor", KINDS[kind] if self.is_merged else 1)
        self.merge = self.size("spatial_merge_size", merge)
        if kind == "granite4_vision":
            self.merge = window_sides(self)[1]
        if kind == "gemma4uv":  # its patches are those of what others merge
            self.patch, self.merge = self.patch * self.size("projector.scale_factor", 3), 1
        if self.merge > _MAX_MERGE or (self.merge > 1 and not self.is_merged):
            raise damaged(file.path, f"{self.merge} patches a side become a token")
        self.eps = self.number("attention.layer_norm_epsilon", 1e-6)
        if kind == "deepseekocr":
            self.eps = 1e-5
        if not 0 < self.eps < 1:
            raise damaged(file.path, f"the epsilon of its norms is {self.eps}")

    def spec(self) -> VisionSpec:
        layers = self.size("block_count") if self.has_layers else 0
        if layers > _MAX_LAYERS:
            raise damaged(self.file.path, f"it has {layers} layers")
        stem = self.stem()
        sublayers = [sublayer for i in range(layers) for sublayer in self.layer(i)]
        reduction = self.reduction(layers)
        if reduction:  # attention within its squares comes right before it
            attend = PatchSublayer(self.norm(f"{_REDUCTION}ln1"), self.attention(_REDUCTION, True), None)
            sublayers.insert(reduction.sublayers - 1, attend)
        if self.kind == "granite4_vision":
            out, projectors = self.size("projection_dim"), tuple(window_projectors(self, layers))
            self.used |= {name for name in self.file.tensors if name.startswith("v.post_ln.")}  # not read
        else:
            out, steps = self.projector()
            *earlier, last = self.features or [layers]
            read = len(sublayers) if reduction else 2 * last
            first = Projector(read, steps, tuple(2 * i for i in earlier), self.kind == "deepseekocr")
            projectors = first, *self.later_projectors(layers, out)
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
            kernels=() if stem else tuple(self.kernels()),
            bias=None if stem else self.vector("v.patch_embd.bias", self.dim),
            positions=self.positions(),
            norm=self.first_norm(),
            sublayers=tuple(sublayers),
            rotations=self.rotations(),
            projectors=projectors,
            ends=self.ends(out, projectors[0].steps),
            window=self.window,
            tiles=self.tile_rule(),
            whole_first=self.kind in ("mlp", "resampler", "minicpmv4_6", "granite4_vision"),
            padding=self.padding(),
            summary=self.required("v.class_embd", *self.summary_shape) if self.has_summary else None,
            pixel_norm=self.patch_norm(1, 3 * self.patch**2) if self.kind == "gemma4uv" else None,
            colours_last=self.kind == "youtuvl",
            stem=stem,
            reduction=reduction,
            own_queries=self.own_queries(),
        )
        if isinstance(stem, Stem):
            self.used.add("v.patch_embd.weight")  # of an encoder without the stem
        if spec.most_patches > _MOST_PATCHES:
            raise damaged(self.file.path, "its pictures would have too many patches")
        unread = [name for name in self.file.tensors.keys() - self.used if not name.startswith(_UNUSED)]
        if unread:
            raise ModelFileError(
                f"{self.name} holds {printable(min(unread))}, which orin-chat does not know in an encoder of the type "
                f"{self.kind}.",
                "It is of a variant that orin-chat does not run. Choose another one.",
            )
        return spec

    @property
    def summary_shape(self) -> tuple[int, ...]:
        """Nemotron's encoder has several."""
        info = self.file.tensors.get("v.class_embd")
        n = info.shape[0] if info and len(info.shape) == 2 else 0
        return (n, self.dim) if 0 < n <= _MOST_SUMMARIES else (self.dim,)

    def stem(self) -> Stem | ConvolutionNet | None:
        if self.kind in STEMMED:
            return read_stem(self, self.size("window_size"))
        return read_net(self, self.size("image_size")) if self.kind == "gemma3nv" else None

    def size_rule(self) -> SizeRule:
        if self.kind not in STEMMED:
            return super().size_rule()
        return SizeRule("square", self.patch, stem_side(self) * stem_patch(self))

    def own_queries(self) -> OwnQueries | None:
        """DeepSeek-OCR 2's, for whole pictures and for tiles."""
        if self.kind != "deepseekocr2":
            return None
        tiles = self.tile_rule()
        assert tiles
        sides = {1024: self.size_rule().most, 768: tiles.side}
        tables = [
            self.required(f"v.resample_query_{name}.weight", (side // self.patch) ** 2, self.dim)
            for name, side in sides.items()
        ]
        rates = 1e6 ** (-2 * np.arange(self.head_dim // 2) / self.head_dim)
        return OwnQueries(tuple(tables), tuple(rates.tolist()))

    def fixed_row(self, name: str, size: int) -> FixedRow:
        """A vector, which some files have as a matrix of one row."""
        info = self.file.tensors.get(name)
        return FixedRow(self.required(name, *((1, size) if info and len(info.shape) == 2 else (size,))))

    def ends(self, out: int, steps: tuple[ProjectorStep, ...]) -> Ends | None:
        """`steps`: of the projector."""
        if self.named == "pixtral":
            return Ends(FixedRow(self.required("v.token_embd.img_break", out)))
        if self.kind == "deepseekocr":
            line, end = (self.fixed_row(name, out) for name in (_LINE, _SEPARATOR))
            return Ends(line, end=end, page=line)
        if self.kind == "adapter":
            begin, end = (self.fixed_row(f"adapter.{name}", out) for name in ("boi", "eoi"))
            return Ends(None, begin, end)
        if self.kind == "deepseekocr2":
            rows = self.size_rule().most // self.patch
            return Ends(end=self.fixed_row(_SEPARATOR, out), ended=rows)
        if self.kind == "granite4_vision":
            return Ends(page=self.fixed_row(_LINE, out))
        if self.kind != "hunyuanvl":
            return None
        *_, last, norm = steps
        assert isinstance(last, Linear) and isinstance(norm, Norm)
        if TYPES[last.weight.type].name not in HOST_TYPES:
            raise ModelFileError(
                f"{self.name} holds {last.weight.tensor} as {TYPES[last.weight.type].name}, which orin-chat does not "
                "run there.",
                f"Choose an encoder with other quantization types: {', '.join(sorted(HOST_TYPES))}.",
            )
        line = FixedRow(self.required(_LINE, last.weight.cols), (last, norm))
        begin, end = (FixedRow(self.required(f"mm.image_{name}", out), (norm,)) for name in ("begin", "end"))
        return Ends(line, begin, end)

    # --- layers ----------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """The side of a window in tokens, 0 if no layer has windows."""
        has_some = self.kind == "exaone4_5" and self.key("n_wa_pattern") in self.file.metadata
        if self.kind == "muse-glimmer":  # as wide as its table of positions
            table = self.file.tensors.get("v.position_embd.weight")
            pixels = (math.isqrt(table.shape[0]) if table and table.shape else 0) * self.patch
        elif self.kind == "granite4_vision":
            return window_sides(self)[0]
        elif self.kind in ("qwen2.5vl_merger", "youtuvl") or has_some:
            pixels = self.size("window_size", _WINDOW)
        else:
            return 0
        if (side := pixels // (self.patch * self.merge)) == 0:
            raise damaged(
                self.file.path, f"its windows have no place for a token of {self.patch * self.merge} pixels"
            )
        return side

    def has_windows(self, i: int) -> bool:
        """Whether layer i attends within windows."""
        if self.kind == "granite4_vision":
            return False
        if self.kind == "youtuvl":
            return i not in self.file.get(self.key("wa_layer_indexes"), np.ndarray)
        if self.kind == "muse-glimmer":
            return (i + 1) % _GLOBAL_EVERY > 0 and i + 1 < self.size("block_count")
        return self.window > 0 and (i + 1) % self.size("n_wa_pattern") > 0

    def reduction(self, layers: int) -> Reduction | None:
        """The reduction of MiniCPM-V 4.6. Files with `merge` 2 have none."""
        if self.kind != "minicpmv4_6" or self.merge == 2:
            return None
        if self.merge != 4:
            raise damaged(self.file.path, f"{self.merge} patches a side become a token")
        key = self.key("wa_layer_indexes")
        found = self.file.get(key, np.ndarray, np.zeros(1, np.int32))
        after = int(found[0]) if len(found) and found.dtype.kind in "iu" else -1
        if not 0 <= after < layers:
            raise damaged(self.file.path, f"{key} is no layer of {layers}")
        joined, width = 4 * self.dim, self.rows_of(f"{_REDUCTION}ds_ffn_up")
        up = self.linear(f"{_REDUCTION}ds_ffn_up", width, joined)
        down = self.linear(f"{_REDUCTION}ds_ffn_down", self.dim, width)
        norm = self.norm(f"{_REDUCTION}ds_ln", joined)
        return Reduction(2 * after + 3, 2, norm, PatchFeedForward(None, up, down, "gelu"))

    def layer(self, i: int) -> Iterator[PatchSublayer]:
        def post(name: str, scale: str) -> Norm | None:
            if self.has(f"{prefix}{scale}.weight"):
                return Norm(None, self.required(f"{prefix}{scale}.weight", self.dim))
            return self.norm(prefix + name) if self.has(f"{prefix}{name}.weight") else None

        prefix = f"v.blk.{i}."
        yield PatchSublayer(
            self.norm(f"{prefix}ln1"),
            self.attention(prefix, self.has_windows(i)),
            post("attn_post_norm", "ls1"),
        )
        yield PatchSublayer(
            self.norm(f"{prefix}ln2"), self.feed_forward(prefix), post("ffn_post_norm", "ls2")
        )

    def attention(self, prefix: str, windowed: bool) -> PatchAttention:
        dim, order = self.dim, self.order
        has_fewer = self.kind in ("exaone4_5", "deepseekocr2")
        kv_heads = self.size("attention.head_count_kv", self.heads) if has_fewer else self.heads
        if kv_heads > self.heads or self.heads % kv_heads:
            raise damaged(self.file.path, f"{self.heads} heads share {kv_heads} heads of keys")
        of_keys = kv_heads * self.head_dim
        firsts, orders = {"q": 0, "k": dim, "v": dim + of_keys}, {"q": order, "k": order}

        def rows_of(x: str) -> Linear:
            rows, is_fused = dim if x == "q" else of_keys, self.has(f"{prefix}attn_qkv.weight")
            name, first, of = ("attn_qkv", firsts[x], dim + 2 * of_keys) if is_fused else (f"attn_{x}", 0, 0)
            return self.linear(prefix + name, rows, dim, first, of, orders.get(x))

        q, k, v = map(rows_of, "qkv")

        def head_norm(name: str) -> Norm | None:
            info = self.file.tensors.get(f"{prefix}{name}.weight")
            # InternVL's encoder of 6 billion parameters has them over all heads.
            is_whole = self.kind == "internvl" and info is not None and info.shape == (dim,)
            weight = self.vector(f"{prefix}{name}.weight", dim if is_whole else self.head_dim, order)
            return Norm(self.eps, weight) if weight else None

        is_gemma4 = self.kind == "gemma4v"
        return PatchAttention(
            q=q, k=k, v=v, o=self.linear(f"{prefix}attn_out", dim, dim),
            q_norm=head_norm("attn_q_norm"), k_norm=head_norm("attn_k_norm"),
            v_norm=Norm(self.eps) if is_gemma4 else None,
            heads=self.heads, head_dim=self.head_dim, scale=1.0 if is_gemma4 else self.head_dim**-0.5,
            windowed=windowed, kv_heads=kv_heads if kv_heads < self.heads else 0,
        )  # fmt: skip

    def feed_forward(self, prefix: str) -> PatchFeedForward:
        up, down = "ffn_up", "ffn_down"
        info = self.file.tensors.get(f"{prefix}{up}.weight")
        if info and len(info.shape) == 2 and info.shape[0] == self.dim != info.shape[1]:
            up, down = down, up  # older files have the two names swapped
        # Files of Qwen 2 VL say the width of its model in place of the layer's.
        width = self.rows_of(prefix + up)
        has_gate = self.has(f"{prefix}ffn_gate.weight")
        return PatchFeedForward(
            gate=self.linear(f"{prefix}ffn_gate", width, self.dim) if has_gate else None,
            up=self.linear(prefix + up, width, self.dim),
            down=self.linear(prefix + down, self.dim, width),
            activation=self.activation,
        )
