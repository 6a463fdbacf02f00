"""A small encoder of pictures with random weights: a real "mmproj" file of each kind, made in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.description.encoder_kinds import KINDS
from engine.description.stem_reader import STEMMED

DIM, WIDTH, HEADS, PATCH = 32, 48, 2, 4


def _sizes_of_tiles(side: int) -> list[int]:
    """Widths and heights of one tile, of two, and of four."""
    return [n * side for n in (1, 1, 1, 2, 2, 1, 2, 2)]


@dataclass
class _Encoder:
    """See `write`."""

    path: Path
    named: str
    out: int = 64
    half: bool = False
    side: int = 0
    seed: int = 0
    dim: int = DIM
    width: int = WIDTH
    heads: int = HEADS
    patch: int = PATCH
    deep: bool = False
    merged: bool = True
    choices: Sequence[int] = ()
    features: Sequence[int] = ()
    normed: bool = False
    version: int = 3
    window: int = 6

    def __post_init__(self) -> None:
        self.kind = {"qwen2.5o": "qwen2.5vl_merger", "lightonocr": "pixtral"}.get(self.named, self.named)
        self.merge = KINDS[self.named] if self.merged else 1
        self.joined = self.merge**2 * self.dim
        # the first one of which has windows, or comes before fewer patches
        layers = 1 + (
            self.deep
            or self.kind
            in ("qwen2.5vl_merger", "minicpmv4_6", "exaone4_5", "muse-glimmer", "youtuvl", "granite4_vision")
        )
        self.layers = max(self.features, default=layers) if self.kind not in ("gemma4uv", "gemma3nv") else 0
        sides = {"step3vl": 16, "deepseekocr": 16, "deepseekocr2": 16, "gemma3nv": 64, "granite4_vision": 8}
        self.side = self.side or sides.get(self.kind, 2 * self.merge) * self.patch
        if self.kind == "granite4_vision":
            self.dim = 64
        self.rng, self.writer = np.random.default_rng(self.seed), gguf.GGUFWriter(str(self.path), "clip")
        self.is_qwen = self.kind.startswith("qwen") or self.kind == "exaone4_5"
        self.has_class = self.kind in ("internvl", "llama4", "deepseekocr") or (
            self.kind == "mlp" and not self.features
        )
        self.has_biases = self.is_qwen or self.kind in (
            "paddleocr", "kimivl", "kimik25", "lfm2", "mlp", "resampler", "phi4", "janus_pro", "gemma3", "idefics3",
            "internvl", "llama4", "nemotron_v2_vl", "gemma4uv", "hunyuanvl", "adapter", "step3vl",
            "deepseekocr", "deepseekocr2", "minicpmv4_6", "muse-glimmer", "youtuvl", "granite4_vision",
        )  # fmt: skip

    def write(self) -> Path:
        self._metadata()
        self._patches()
        for i in range(self.layers):
            self._layer(i)
        if self.kind == "minicpmv4_6":
            self._reduction()
        if self.deep:
            self.norm("v.deepstack.0.norm", self.joined)
            self.matrix("v.deepstack.0.fc1", self.joined, self.joined)
            self.matrix("v.deepstack.0.fc2", self.out, self.joined)
        self._projector()
        if self.named == "qwen2.5o":  # an encoder of sounds beside it
            self.tensor("a.blk.0.attn_q.weight", self.dim, self.dim)
            self.tensor("mm.a.fc.weight", self.out, self.dim)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    # ---- tensors --------------------------------------------------------------------------------------

    def tensor(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        data = (mean + std * self.rng.standard_normal(shape)).astype(np.float32)
        is_matrix = len(shape) > 1 and "position" not in name and name.endswith(".weight")
        self.writer.add_tensor(name, data.astype(np.float16) if self.half and is_matrix else data)

    def matrix(self, name: str, *shape: int) -> None:
        """A matrix, with a bias if its kind has one there."""
        self.tensor(f"{name}.weight", *shape, std=float(np.prod(shape[1:])) ** -0.5)
        kind = self.kind
        if name == "v.patch_embd":
            has_none = kind.startswith("qwen2") or kind in ("mlp", "llama4", "nemotron_v2_vl", "exaone4_5")
        else:
            has_none = name in ("mm.input_projection", "resampler.kv", "resampler.proj")
            has_none |= name == "mm.model.fc" and kind not in ("hunyuanvl", "deepseekocr", "deepseekocr2")
            has_none |= name.startswith("mm.") and kind == "muse-glimmer"
            has_none |= name.startswith("adapter.linear")
            has_none |= name.startswith("mm.model") and kind in ("llama4", "nemotron_v2_vl")
        if self.has_biases and not has_none:
            self.tensor(f"{name}.bias", shape[0])

    def norm(self, name: str, size: int | None = None, has_bias: bool | None = None) -> None:
        """A norm, of `dim` elements unless said, with a bias as its kind has them."""
        size = size or self.dim
        self.tensor(f"{name}.weight", size, mean=1.0)
        if has_bias is None:
            is_rms = self.kind in ("qwen2.5vl_merger", "exaone4_5") or (self.normed and "v.blk" in name)
            is_rms |= self.kind == "deepseekocr2" and name.startswith(("v.blk", "v.post_ln"))
            has_bias = self.has_biases and not is_rms
        if has_bias:
            self.tensor(f"{name}.bias", size)

    # ---- parts of the file ----------------------------------------------------------------------------

    def _metadata(self) -> None:
        writer, kind, merge = self.writer, self.kind, self.merge
        writer.add_name("random eyes")
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_string("clip.projector_type", self.named)
        sizes = {
            "image_size": self.side, "patch_size": self.patch, "embedding_length": self.dim,
            "feed_forward_length": self.width, "block_count": self.layers, "projection_dim": self.out,
            "attention.head_count": self.heads,
        }  # fmt: skip
        if kind == "gemma3nv":  # its files say so, though it has no patches
            sizes["patch_size"] = max(1, self.side // 256)
        for key, value in sizes.items():
            writer.add_uint32(f"clip.vision.{key}", value)
        if self.is_qwen or kind in ("pixtral", "glm4v", "hunyuanvl", "muse-glimmer"):
            writer.add_uint32("clip.vision.spatial_merge_size", merge)
        if self.features:
            writer.add_array("clip.vision.feature_layer", self.features)
        if kind in ("dots_ocr", "paddleocr", "phi4", "kimik25", "hunyuanvl", "exaone4_5"):
            for key, tokens in {"min": 4, "max": 64}.items():
                writer.add_uint32(f"clip.vision.image_{key}_pixels", tokens * (merge * self.patch) ** 2)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        for key in "mean", "std":
            writer.add_array(f"clip.vision.image_{key}", [0.5, 0.4, 0.6])
        if kind in (
            "idefics3",
            "internvl",
            "dots_ocr",
            "kimivl",
            "kimik25",
            "lfm2",
            "llama4",
            "nemotron_v2_vl",
        ):
            writer.add_uint32("clip.vision.projector.scale_factor", merge)
        if kind == "idefics3":
            writer.add_uint32("clip.vision.preproc_image_size", 3 * self.side)
        if kind == "youtuvl":
            writer.add_uint32("clip.vision.window_size", 4 * self.patch)
            writer.add_array("clip.vision.wa_layer_indexes", [1])
        if kind == "granite4_vision":
            writer.add_array("clip.vision.image_grid_pinpoints", self.choices or _sizes_of_tiles(self.side))
            for key, value in {"feature_layer": [0, 1, 1], "projector.spatial_offsets": [-1, 0, 3]}.items():
                writer.add_array(f"clip.vision.{key}", value)
            writer.add_uint32("clip.vision.projector.query_side", 2)
            writer.add_uint32("clip.vision.projector.window_side", 4)
        if kind in ("qwen2.5vl_merger", "exaone4_5"):
            writer.add_uint32("clip.vision.n_wa_pattern", 2)
        if kind in ("exaone4_5", "deepseekocr2"):
            writer.add_uint32("clip.vision.attention.head_count_kv", self.heads // 2)
        if kind == "minicpmv4_6":
            writer.add_uint32("clip.vision.projector.scale_factor", merge)
            writer.add_array("clip.vision.wa_layer_indexes", [0])
        if kind in STEMMED:
            for key, value in {"embedding_length": WIDTH, "block_count": 3, "head_count": 3}.items():
                writer.add_uint32(f"clip.vision.sam.{key}", value)
            writer.add_uint32("clip.vision.window_size", self.window)
        if kind == "resampler":
            writer.add_int32("clip.minicpmv_version", self.version)
            writer.add_uint32("clip.minicpmv_query_num", 5)
        if self.choices and kind == "mlp":
            writer.add_array("clip.vision.image_grid_pinpoints", self.choices)
        if kind not in ("qwen2vl_merger", "step3vl") and (kind != "mlp" or self.features):
            is_silu = kind in ("pixtral", "qwen2.5vl_merger", "exaone4_5", "dots_ocr", "glm4v")
            writer.add_bool("clip.use_silu" if is_silu else "clip.use_gelu", True)

    def _patches(self) -> None:
        """Patches, their places, and what stands before the layers."""
        kind, dim, patch, n = self.kind, self.dim, self.patch, (self.side // self.patch) ** 2
        if kind in STEMMED:
            self._stem()
            n //= 16
            for name, count in ((1024, n), (768, n * 9 // 16)) if kind == "deepseekocr2" else ():
                self.tensor(f"v.resample_query_{name}.weight", count, dim, std=0.5)
        elif kind == "gemma4uv":
            patch_of_all = 3 * patch
            self.matrix("v.patch_embd", dim, 3 * patch_of_all**2)
            self.norm("v.patch_norm.1", 3 * patch_of_all**2)
            self.norm("v.patch_norm.2")
            self.norm("v.patch_norm.3")
        elif kind in ("llama4", "youtuvl"):
            self.matrix("v.patch_embd", dim, 3 * patch**2)
        elif kind == "gemma3nv":
            self._net()
        else:
            self.matrix("v.patch_embd", dim, 3, patch, patch)
        places = {
            "qwen3vl_merger": (9,), "gemma3": (n,), "gemma4v": (2, 128), "gemma4uv": (2, 128), "idefics3": (n,),
            "internvl": (n + 1,), "llama4": (n + 1,), "mlp": (n + self.has_class,), "resampler": (4900,),
            "phi4": (16,), "janus_pro": (n,), "nemotron_v2_vl": (n,), "kimik25": (4, 4), "paddleocr": (9,),
            "kimivl": (16,), "lfm2": (256,), "glm4v": (36,), "hunyuanvl": (36,),
            "deepseekocr": (n + 1,), "minicpmv4_6": (4900,), "muse-glimmer": (36,),
            "granite4_vision": (n,), "adapter": (n,), "step3vl": (n,),
        }  # fmt: skip
        if kind in places:
            self.tensor("v.position_embd.weight", *places[kind], dim, std=0.5)
        if kind in ("pixtral", "dots_ocr", "llama4", "deepseekocr", "muse-glimmer", "step3vl") or (
            kind == "mlp" and self.has_class
        ):
            self.norm("v.pre_ln")
        if kind == "glm4v":
            self.norm("v.norm_embd")
            self.tensor("v.patch_embd.bias", dim)
        if self.has_class:
            self.tensor("v.class_embd", dim, std=0.5)
        if kind == "nemotron_v2_vl":
            self.tensor("v.class_embd", 3, dim, std=0.5)

    def _net(self) -> None:
        """MobileNet: a stage of blocks that grow at once, two of those that grow channel by channel, one of
        attention."""

        def convolution(name: str, rows: int, cols: int, kernel: int, norm: str = "") -> None:
            self.tensor(f"{name}.weight", rows, cols, kernel, kernel, std=(cols * kernel**2) ** -0.5)
            if norm:
                self.tensor(f"{norm}.weight", rows, mean=1.0)

        convolution("v.conv_stem.conv", 8, 3, 3, "v.conv_stem.bn")
        self.tensor("v.conv_stem.conv.bias", 1, 8, 1, 1)
        for i in range(2):
            convolution(f"v.blk.0.{i}.conv_exp", 16, 8, 3, f"v.blk.0.{i}.bn1")
            convolution(f"v.blk.0.{i}.conv_pwl", 8, 16, 1, f"v.blk.0.{i}.bn2")
        for stage, rows, cols in (1, 12, 8), (2, 16, 12), (3, 24, 16):
            for i, (before, kernel) in enumerate(((cols, 5), (rows, 0))):
                prefix = f"v.blk.{stage}.{i}."
                convolution(prefix + "dw_start.conv", before, 1, 3, prefix + "dw_start.bn")
                convolution(prefix + "pw_exp.conv", 2 * rows, before, 1, prefix + "pw_exp.bn")
                if kernel:
                    convolution(prefix + "dw_mid.conv", 2 * rows, 1, kernel, prefix + "dw_mid.bn")
                convolution(prefix + "pw_proj.conv", rows, 2 * rows, 1, prefix + "pw_proj.bn")
                self.tensor(prefix + "layer_scale.gamma", 1, rows, 1, 1, mean=0.5)
        for i, stage, rows in (2, 2, 16), (2, 3, 24):
            prefix = f"v.blk.{stage}.{i}."
            self.tensor(prefix + "norm.weight", rows, mean=1.0)
            for name, width in ("query", 16), ("key", 8), ("value", 8):
                convolution(f"{prefix}attn.{name}.proj", width, rows, 1)
                if stage == 2 and name != "query":
                    convolution(f"{prefix}attn.{name}.down_conv", rows, 1, 3, f"{prefix}attn.{name}.norm")
            convolution(prefix + "attn.output.proj", rows, 16, 1)
            self.tensor(prefix + "layer_scale.gamma", 1, rows, 1, 1, mean=0.5)
        convolution("v.msfa.ffn.pw_exp.conv", 48, 40, 1, "v.msfa.ffn.pw_exp.bn")
        convolution("v.msfa.ffn.pw_proj.conv", self.dim, 48, 1, "v.msfa.ffn.pw_proj.bn")
        self.tensor("v.msfa.norm.weight", self.dim, mean=1.0)

    def _stem(self) -> None:
        """Three layers, the last of which has no windows, and convolutions."""
        dim, n = WIDTH, self.side // self.patch
        self.tensor("v.sam.patch_embd.weight", dim, 3, self.patch, self.patch)
        self.tensor("v.sam.patch_embd.bias", dim)
        self.tensor("v.sam.pos_embd.weight", n, n, dim, std=0.5)
        for i in range(3):
            prefix, places = f"v.sam.blk.{i}.", 2 * (n if i == 2 else self.window) - 1
            for name in "pre_ln", "post_ln":
                self.norm(prefix + name, dim)
            for name, rows, cols in (
                ("attn.qkv", 3 * dim, dim),
                ("attn.out", dim, dim),
                ("mlp.lin1", 2 * dim, dim),
                ("mlp.lin2", dim, 2 * dim),
            ):
                self.matrix(prefix + name, rows, cols)
            for name in "hw":
                self.tensor(f"{prefix}attn.pos_{name}.weight", places, dim // 3, std=0.3)
        for name, rows, cols, kernel in (
            ("neck.0", 24, dim, 1), ("neck.2", 24, 24, 3), ("net_2", 28, 24, 3), ("net_3", self.dim, 28, 3),
        ):  # fmt: skip
            self.tensor(f"v.sam.{name}.weight", rows, cols, kernel, kernel, std=(cols * kernel**2) ** -0.5)
        self.norm("v.sam.neck.1", 24)
        self.norm("v.sam.neck.3", 24)

    def _layer(self, i: int) -> None:
        kind, dim, prefix = self.kind, self.dim, f"v.blk.{i}."
        for name in ["attn_q_norm", "attn_k_norm"] if self.normed and kind == "internvl" else []:
            self.norm(prefix + name, has_bias=False)
        for name in ["ln1", "ln2", *(["attn_post_norm", "ffn_post_norm"] if kind == "gemma4v" else [])]:
            self.norm(prefix + name)
        for name in ["ls1", "ls2"] if kind in ("internvl", "step3vl") else []:
            self.tensor(f"{prefix}{name}.weight", dim, mean=0.5)
        if (self.is_qwen or kind == "glm4v") and i == 0:
            self.tensor("v.patch_embd.weight.1", dim, 3, self.patch, self.patch)
        if kind in ("qwen3vl_merger", "exaone4_5", "dots_ocr", "nemotron_v2_vl", "kimik25", "deepseekocr"):
            self.matrix(prefix + "attn_qkv", (2 if kind == "exaone4_5" else 3) * dim, dim)
        else:
            for name in "qkv":
                is_shared = kind == "deepseekocr2" and name != "q"
                self.matrix(f"{prefix}attn_{name}", dim // 2 if is_shared else dim, dim)
        self.matrix(prefix + "attn_out", dim, dim)
        self.matrix(prefix + "ffn_up", self.width, dim)
        if kind in (
            "gemma4v", "pixtral", "qwen2.5vl_merger", "exaone4_5", "dots_ocr", "glm4v", "deepseekocr2",
        ):  # fmt: skip
            self.matrix(prefix + "ffn_gate", self.width, dim)
        self.matrix(prefix + "ffn_down", dim, self.width)

    def _reduction(self) -> None:
        """Attention within squares of patches, and what makes one row of each."""
        prefix, joined = "v.vit_merger.", 4 * self.dim
        self.norm(prefix + "ln1")
        for name in "attn_q", "attn_k", "attn_v", "attn_out":
            self.matrix(prefix + name, self.dim, self.dim)
        self.norm(prefix + "ds_ln", joined)
        self.matrix(prefix + "ds_ffn_up", 4 * self.width, joined)
        self.matrix(prefix + "ds_ffn_down", self.dim, 4 * self.width)

    def _window_projector(self, i: int) -> None:
        prefix, dim = f"v.proj_blk.{i}.", self.dim
        self.tensor(prefix + "query", 1, 4, dim, std=0.5)
        self.tensor(prefix + "img_pos", 1, 16, dim, std=0.5)
        for name in "norm", "post_norm", "self_attn_norm", "cross_attn_norm", "ffn_norm":
            self.norm(prefix + name)
        for name in (f"{kind}_attn_{x}" for kind in ("self", "cross") for x in ("q", "k", "v", "out")):
            self.matrix(prefix + name, dim, dim)
        self.matrix(prefix + "ffn_up", self.width, dim)
        self.matrix(prefix + "ffn_down", dim, self.width)
        self.matrix(prefix + "linear", self.out, dim)

    def _projector(self) -> None:
        match self.kind:
            case "granite4_vision":
                self.norm("v.post_ln")  # which is not read
                self.tensor("v.image_newline", self.out)
                for i in range(3):
                    self._window_projector(i)
            case "gemma3nv":
                self.norm("mm.soft_emb_norm", has_bias=False)
                self.matrix("mm.input_projection", self.out, self.dim)
            case "youtuvl":
                self.norm("v.post_ln")
                self.norm("mm.input_norm", has_bias=False)
                self.matrix("mm.0", self.joined, self.joined)
                self.matrix("mm.2", self.out, self.joined)
            case "muse-glimmer":
                self.norm("v.post_ln")
                for i, cols in enumerate((self.joined, self.width, self.width)):
                    self.matrix(f"mm.{i}", self.out if i == 2 else self.width, cols)
            case "minicpmv4_6":
                self.norm("v.post_ln")
                self.norm("mm.input_norm", 4 * self.dim)
                self.matrix("mm.up", 4 * self.dim, 4 * self.dim)
                self.matrix("mm.down", self.out, 4 * self.dim)
            case "qwen2vl_merger" | "qwen2.5vl_merger" | "qwen3vl_merger" | "exaone4_5":
                self.norm("v.post_ln")
                self.matrix("mm.0", self.joined, self.joined)
                self.matrix("mm.2", self.out, self.joined)
            case "gemma3":
                self.norm("v.post_ln")
                self.norm("mm.soft_emb_norm", has_bias=False)
                self.matrix("mm.input_projection", self.dim, self.out)
            case "internvl":
                self.norm("mm.model.mlp.0", self.joined)
                self.matrix("mm.model.mlp.1", self.out, self.joined)
                self.matrix("mm.model.mlp.3", self.out, self.out)
            case "mlp" | "phi4" | "janus_pro":
                if self.kind == "janus_pro":
                    self.norm("v.post_ln")
                self.matrix("mm.0", self.out, self.dim * max(len(self.features), 1))
                if self.normed:
                    self.norm("mm.1", self.out)
                    self.norm("mm.4", self.out)
                last = "mm.3" if self.normed else "mm.1" if self.kind == "janus_pro" else "mm.2"
                self.matrix(last, self.out, self.out)
            case "resampler":
                self.norm("v.post_ln")
                self.tensor("resampler.query", 5, 128)
                self.tensor("resampler.pos_embed_k", 1, 128)
                self.matrix("resampler.kv", 128, self.dim)
                for name in "q", "k", "v", "out":
                    self.matrix(f"resampler.attn.{name}", 128, 128)
                for name in "q", "kv", "post":
                    self.norm(f"resampler.ln_{name}", 128)
                self.matrix("resampler.proj", 128, 128)
            case "idefics3":
                self.norm("v.post_ln")
                self.matrix("mm.model.fc", self.out, self.joined)
            case "dots_ocr":
                self.norm("mm.post_norm")
                self.norm("mm.input_norm", has_bias=True)
                for name, rows in ("mm.0", self.joined), ("mm.2", self.out):
                    self.matrix(name, rows, self.joined)
                    self.tensor(f"{name}.bias", rows)
            case "glm4v":
                self.norm("v.post_ln")
                self.matrix("mm.patch_merger", self.out, self.dim, self.merge, self.merge)
                self.tensor("mm.patch_merger.bias", self.out)
                self.matrix("mm.model.fc", self.out, self.out)
                self.norm("mm.post_norm", self.out, has_bias=True)
                self.matrix("mm.gate", self.width, self.out)
                self.matrix("mm.up", self.width, self.out)
                self.matrix("mm.down", self.out, self.width)
            case "hunyuanvl":
                wide = 2 * self.dim
                self.norm("mm.pre_norm", has_bias=False)
                self.matrix("mm.0", wide, self.dim, self.merge, self.merge)
                self.matrix("mm.2", 2 * wide, wide, 1, 1)
                self.tensor("v.image_newline", 2 * wide, std=0.5)
                self.tensor("v.view_seperator", self.out)
                self.matrix("mm.model.fc", self.out, 2 * wide)
                for name in "begin", "end":
                    self.tensor(f"mm.image_{name}", self.out, std=0.5)
                self.norm("mm.post_norm", self.out, has_bias=False)
            case "step3vl":
                wide = 2 * self.dim
                self.matrix("mm.0", wide, self.dim, 3, 3)
                self.matrix("mm.1", 2 * wide, wide, 3, 3)
                self.matrix("mm.model.fc", self.out, 2 * wide)
            case "adapter":
                wide, hidden = 2 * self.dim, "adapter.linear."
                self.norm("v.post_ln")
                self.matrix("adapter.conv", wide, self.dim, self.merge, self.merge)
                for name, rows, cols in (
                    ("linear", self.out, wide), ("gate", self.width, self.out),
                    ("dense_h_to_4h", self.width, self.out), ("dense_4h_to_h", self.out, self.width),
                ):  # fmt: skip
                    self.matrix(hidden + name, rows, cols)
                self.norm(f"{hidden}norm1", self.out)
                for name in "boi", "eoi":
                    self.tensor(f"adapter.{name}", self.out, std=0.5)
            case "deepseekocr2":
                self.norm("v.post_ln")
                self.matrix("mm.model.fc", self.out, self.dim)
                self.tensor("v.view_seperator", 1, self.out)
            case "deepseekocr":
                self.matrix("mm.model.fc", self.out, 2 * self.dim)
                self.tensor("v.image_newline", self.out)
                self.tensor("v.view_seperator", 1, self.out)
            case "llama4":
                self.norm("v.post_ln")
                self.matrix("mm.model.mlp.1", self.width, self.joined)
                self.matrix("mm.model.mlp.2", self.width, self.width)
                self.matrix("mm.model.fc", self.out, self.width)
            case "nemotron_v2_vl":
                self.norm("mm.model.mlp.0", self.joined, has_bias=False)
                self.matrix("mm.model.mlp.1", self.width, self.joined)
                self.matrix("mm.model.mlp.3", self.out, self.width)
            case "gemma4uv":
                self.matrix("mm.input_projection", self.out, self.dim)
            case "paddleocr" | "kimivl" | "kimik25" | "lfm2":
                self.norm("v.post_ln")
                self.norm("mm.input_norm", self.joined if self.kind == "lfm2" else self.dim)
                self.matrix("mm.1", self.width, self.joined)
                self.matrix("mm.2", self.out, self.width)
            case "gemma4v":
                for name in "q", "k":
                    self.norm(f"v.blk.{self.layers - 1}.attn_{name}_norm", self.dim // self.heads)
                limits = {"input_min": -2.0, "input_max": 2.0, "output_min": -3.0, "output_max": 3.0}
                for end, value in limits.items():
                    self.tensor(f"v.blk.{self.layers - 1}.attn_out.{end}", 1, mean=value, std=0.0)
                self.tensor("v.std_bias", self.dim)
                self.tensor("v.std_scale", self.dim, mean=1.0)
                self.matrix("mm.input_projection", self.out, self.dim)
            case _:
                if self.merged:
                    self.norm("mm.input_norm")
                    self.matrix("mm.patch_merger", self.dim, self.joined)
                self.matrix("mm.1", self.out, self.dim)
                self.matrix("mm.2", self.out, self.out)
                if self.named == "pixtral":
                    self.tensor("v.token_embd.img_break", self.out)


def write(path: Path, kind: str, **how: Any) -> Path:
    """Writes an encoder to `path` and returns it. `half`: matrices are float16. `side`: of pictures, for those that are
    all of one size (gemma3), or at most so long (pixtral). `deep`: of two layers, the first of which has a projector of
    its own (deepstack). `merged`: patches become a token together (pixtral may have no merger). `choices`: widths and
    heights to which a picture is brought before it is cut, `features`: after how many layers the projector reads x, and
    `normed`: it has norms (mlp). `normed` of internvl: queries and keys are normed over all heads, and norms are RMS
    norms. `version`: of MiniCPM-V (resampler). Others: see `_Encoder`."""
    return _Encoder(path, kind, **how).write()
