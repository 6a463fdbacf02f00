"""A small encoder of pictures with random weights: a real "mmproj" file of each kind, made in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from engine.description.vision_reader import KINDS

DIM, WIDTH, HEADS, PATCH = 32, 48, 2, 4


def write(
    path: Path, kind: str, *, out: int = 64, half: bool = False, side: int = 0, seed: int = 0, dim: int = DIM,
    width: int = WIDTH, heads: int = HEADS, patch: int = PATCH, deep: bool = False, merged: bool = True,
    choices: Sequence[int] = (), features: Sequence[int] = (), normed: bool = False, version: int = 3,
) -> Path:  # fmt: skip
    """Writes an encoder to `path` and returns it. `half`: matrices are float16. `side`: of pictures, for those that are
    all of one size (gemma3), or at most so long (pixtral). `deep`: of two layers, the first of which has a projector of
    its own (deepstack). `merged`: patches become a token together (pixtral may have no merger).
    `choices`: widths and heights to which a picture is brought before it is cut, `features`: after how many layers the
    projector reads x, and `normed`: it has norms (mlp). `version`: of MiniCPM-V (resampler)."""
    rng, merge, head = np.random.default_rng(seed), KINDS[kind] if merged else 1, dim // heads
    joined = merge**2 * dim
    is_omni = kind == "qwen2.5o"
    named, kind = kind, {"qwen2.5o": "qwen2.5vl_merger", "lightonocr": "pixtral"}.get(kind, kind)
    is_like_siglip = kind in (
        "paddleocr", "kimivl", "kimik25", "lfm2", "mlp", "resampler", "phi4", "janus_pro",
    )  # fmt: skip
    layers = 1 + (deep or kind == "qwen2.5vl_merger")  # the first one of which has windows
    layers = max(features, default=layers) if kind != "gemma4uv" else 0
    side = side or 2 * merge * patch
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_name("random eyes")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", named)
    sizes = {
        "image_size": side, "patch_size": patch, "embedding_length": dim, "feed_forward_length": width,
        "block_count": layers, "projection_dim": out, "attention.head_count": heads,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    is_qwen, is_qwen2 = kind.startswith("qwen"), kind.startswith("qwen2")
    if is_qwen or kind in ("pixtral", "glm4v"):
        writer.add_uint32("clip.vision.spatial_merge_size", merge)
    if features:
        writer.add_array("clip.vision.feature_layer", features)
    if kind in ("dots_ocr", "paddleocr", "phi4", "kimik25"):
        for key, tokens in {"min": 4, "max": 64}.items():
            writer.add_uint32(f"clip.vision.image_{key}_pixels", tokens * (merge * patch) ** 2)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in "mean", "std":
        writer.add_array(f"clip.vision.image_{key}", [0.5, 0.4, 0.6])
    if kind in ("idefics3", "internvl", "dots_ocr", "kimivl", "kimik25", "lfm2", "llama4", "nemotron_v2_vl"):
        writer.add_uint32("clip.vision.projector.scale_factor", merge)
    if kind == "idefics3":
        writer.add_uint32("clip.vision.preproc_image_size", 3 * side)
    if kind == "qwen2.5vl_merger":
        writer.add_uint32("clip.vision.n_wa_pattern", 2)
    if kind == "resampler":
        writer.add_int32("clip.minicpmv_version", version)
        writer.add_uint32("clip.minicpmv_query_num", 5)
    if choices:
        writer.add_array("clip.vision.image_grid_pinpoints", choices)
    has_class = kind in ("internvl", "llama4") or (kind == "mlp" and not features)
    if kind != "qwen2vl_merger" and (kind != "mlp" or features):
        writer.add_bool(
            "clip.use_silu"
            if kind in ("pixtral", "qwen2.5vl_merger", "dots_ocr", "glm4v")
            else "clip.use_gelu",
            True,
        )

    def tensor(name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        data = (mean + std * rng.standard_normal(shape)).astype(np.float32)
        is_matrix = len(shape) > 1 and "position" not in name
        writer.add_tensor(name, data.astype(np.float16) if half and is_matrix else data)

    has_biases, has_gate = (
        is_qwen
        or is_like_siglip
        or kind in ("gemma3", "idefics3", "internvl", "llama4", "nemotron_v2_vl", "gemma4uv"),
        kind in ("gemma4v", "pixtral", "qwen2.5vl_merger", "dots_ocr", "glm4v"),
    )

    def matrix(name: str, *shape: int) -> None:
        tensor(f"{name}.weight", *shape, std=float(np.prod(shape[1:])) ** -0.5)
        if (
            has_biases
            and name not in ("mm.input_projection", "mm.model.fc")
            and not (name == "v.patch_embd" and (is_qwen2 or kind in ("mlp", "llama4", "nemotron_v2_vl")))
            and not (name.startswith("mm.model") and kind in ("llama4", "nemotron_v2_vl"))
            and name not in ("resampler.kv", "resampler.proj")
        ):
            tensor(f"{name}.bias", shape[0])

    def norm(name: str, size: int = dim, has_bias: bool = has_biases and kind != "qwen2.5vl_merger") -> None:
        tensor(f"{name}.weight", size, mean=1.0)
        if has_bias:
            tensor(f"{name}.bias", size)

    if kind == "gemma4uv":
        patch_of_all = 3 * patch
        matrix("v.patch_embd", dim, 3 * patch_of_all**2)
        norm("v.patch_norm.1", 3 * patch_of_all**2)
        norm("v.patch_norm.2")
        norm("v.patch_norm.3")
    elif kind == "llama4":
        matrix("v.patch_embd", dim, 3 * patch**2)
    else:
        matrix("v.patch_embd", dim, 3, patch, patch)
    places = {"qwen3vl_merger": (9, dim), "gemma3": ((side // patch) ** 2, dim), "gemma4v": (2, 128, dim)}
    places |= {"idefics3": places["gemma3"], "internvl": ((side // patch) ** 2 + 1, dim)}
    places |= {"mlp": places["internvl"] if has_class else places["gemma3"], "resampler": (4900, dim)}
    places |= {"phi4": (16, dim), "janus_pro": places["gemma3"], "nemotron_v2_vl": places["gemma3"]}
    places |= {"gemma4uv": places["gemma4v"], "llama4": places["internvl"], "kimik25": (4, 4, dim)}
    places |= {"paddleocr": (9, dim), "kimivl": (16, dim), "lfm2": (256, dim), "glm4v": (36, dim)}
    if kind in places:
        tensor("v.position_embd.weight", *places[kind], std=0.5)
    if kind in ("pixtral", "dots_ocr", "llama4") or (kind == "mlp" and has_class):
        norm("v.pre_ln")
    if kind == "glm4v":
        norm("v.norm_embd")
        tensor("v.patch_embd.bias", dim)
    if has_class:
        tensor("v.class_embd", dim, std=0.5)
    if kind == "nemotron_v2_vl":
        tensor("v.class_embd", 3, dim, std=0.5)
    for i in range(layers):
        prefix = f"v.blk.{i}."
        for name in ["ln1", "ln2", *(["attn_post_norm", "ffn_post_norm"] if kind == "gemma4v" else [])]:
            norm(prefix + name)
        for name in ["ls1", "ls2"] if kind == "internvl" else []:
            tensor(f"{prefix}{name}.weight", dim, mean=0.5)
        if (is_qwen or kind == "glm4v") and i == 0:
            tensor("v.patch_embd.weight.1", dim, 3, patch, patch)
        if kind in ("qwen3vl_merger", "dots_ocr", "nemotron_v2_vl", "kimik25"):
            matrix(prefix + "attn_qkv", 3 * dim, dim)
        else:
            for name in "qkv":
                matrix(f"{prefix}attn_{name}", dim, dim)
        matrix(prefix + "attn_out", dim, dim)
        for name in ["ffn_up", *(["ffn_gate"] if has_gate else [])]:
            matrix(prefix + name, width, dim)
        matrix(prefix + "ffn_down", dim, width)
    if deep:
        norm("v.deepstack.0.norm", joined)
        matrix("v.deepstack.0.fc1", joined, joined)
        matrix("v.deepstack.0.fc2", out, joined)
    match kind:
        case "qwen2vl_merger" | "qwen2.5vl_merger" | "qwen3vl_merger":
            norm("v.post_ln")
            matrix("mm.0", joined, joined)
            matrix("mm.2", out, joined)
        case "gemma3":
            norm("v.post_ln")
            norm("mm.soft_emb_norm", has_bias=False)
            matrix("mm.input_projection", dim, out)
        case "internvl":
            norm("mm.model.mlp.0", joined)
            matrix("mm.model.mlp.1", out, joined)
            matrix("mm.model.mlp.3", out, out)
        case "mlp" | "phi4" | "janus_pro":
            if kind == "janus_pro":
                norm("v.post_ln")
            matrix("mm.0", out, dim * max(len(features), 1))
            if normed:
                norm("mm.1", out)
                norm("mm.4", out)
            matrix("mm.3" if normed else "mm.1" if kind == "janus_pro" else "mm.2", out, out)
        case "resampler":
            norm("v.post_ln")
            tensor("resampler.query", 5, 128)
            tensor("resampler.pos_embed_k", 1, 128)
            matrix("resampler.kv", 128, dim)
            for name in "q", "k", "v", "out":
                matrix(f"resampler.attn.{name}", 128, 128)
            for name in "q", "kv", "post":
                norm(f"resampler.ln_{name}", 128)
            matrix("resampler.proj", 128, 128)
        case "idefics3":
            norm("v.post_ln")
            matrix("mm.model.fc", out, joined)
        case "dots_ocr":
            norm("mm.post_norm")
            norm("mm.input_norm", has_bias=True)
            for name, rows in ("mm.0", joined), ("mm.2", out):
                matrix(name, rows, joined)
                tensor(f"{name}.bias", rows)
        case "glm4v":
            norm("v.post_ln")
            matrix("mm.patch_merger", out, dim, merge, merge)
            tensor("mm.patch_merger.bias", out)
            matrix("mm.model.fc", out, out)
            norm("mm.post_norm", out, has_bias=True)
            matrix("mm.gate", width, out)
            matrix("mm.up", width, out)
            matrix("mm.down", out, width)
        case "llama4":
            norm("v.post_ln")
            matrix("mm.model.mlp.1", width, joined)
            matrix("mm.model.mlp.2", width, width)
            matrix("mm.model.fc", out, width)
        case "nemotron_v2_vl":
            norm("mm.model.mlp.0", joined, has_bias=False)
            matrix("mm.model.mlp.1", width, joined)
            matrix("mm.model.mlp.3", out, width)
        case "gemma4uv":
            matrix("mm.input_projection", out, dim)
        case "paddleocr" | "kimivl" | "kimik25" | "lfm2":
            norm("v.post_ln")
            norm("mm.input_norm", joined if kind == "lfm2" else dim)
            matrix("mm.1", width, joined)
            matrix("mm.2", out, width)
        case "gemma4v":
            for name in "q", "k":
                norm(f"{prefix}attn_{name}_norm", head)
            for end, value in (
                ("input_min", -2.0),
                ("input_max", 2.0),
                ("output_min", -3.0),
                ("output_max", 3.0),
            ):
                tensor(f"{prefix}attn_out.{end}", 1, mean=value, std=0.0)
            tensor("v.std_bias", dim)
            tensor("v.std_scale", dim, mean=1.0)
            matrix("mm.input_projection", out, dim)
        case _:
            if merged:
                norm("mm.input_norm")
                matrix("mm.patch_merger", dim, joined)
            matrix("mm.1", out, dim)
            matrix("mm.2", out, out)
            if named == "pixtral":
                tensor("v.token_embd.img_break", out)
    if is_omni:  # an encoder of sounds beside it
        tensor("a.blk.0.attn_q.weight", dim, dim)
        tensor("mm.a.fc.weight", out, dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
