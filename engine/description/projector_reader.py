"""The parts of an encoder of pictures, read from a file, and its projector: what makes embeddings of patches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from engine.description.checked_file import CheckedFile
from engine.description.sublayers import Weight
from engine.description.vision import (
    Activate,
    Activation,
    Affine,
    Limits,
    Linear,
    Merge,
    Neighbours,
    Norm,
    PatchFeedForward,
    Projector,
    ProjectorStep,
    QueryAttention,
)
from engine.errors import ModelFileError
from engine.formats.gguf import damaged
from engine.formats.rope_order import HeadOrder

_PROJECTOR_EPS = {
    "internvl": 1e-5,
    "mlp": 1e-5,
    "paddleocr": 1e-5,
    "kimivl": 1e-5,
    "kimik25": 1e-5,
    "lfm2": 1e-5,
    "glm4v": 1e-5,
    "adapter": 1e-5,
    "dots_ocr": 1e-6,
}
"""Of the norm of a projector, where it is not the encoder's: PyTorch's, or one in the published code."""
_EXACT_GELU = "internvl", "llama4", "nemotron_v2_vl", "hunyuanvl", "muse-glimmer"
_QUERY_HEAD = 128
"""Elements of a head of fixed queries."""
_MOST_QUERIES = 1024
_MOST_FEATURES = 16


class ProjectorReader(CheckedFile):
    """Reads an encoder of a `kind`, with `dim` elements of a patch, of which `merge` a side become a token. `eps`: that
    of its norms. All methods raise ModelFileError."""

    kind: str
    dim: int
    merge: int
    eps: float
    is_merged: bool

    def norm(self, name: str, size: int = 0) -> Norm:
        """A norm of `size` elements (`dim` unless said). One with a bias takes the mean off."""
        centred = self.has(f"{name}.bias")
        weight = self.required(f"{name}.weight", size or self.dim)
        return Norm(self.eps, weight, self.vector(f"{name}.bias", size or self.dim), centred)

    def linear(
        self, name: str, rows: int, cols: int, first: int = 0, of: int = 0, order: HeadOrder | None = None
    ) -> Linear:
        """The matrix `name`, (rows, cols), with its bias, and the limits of what it reads and gives (Gemma 4) if the
        file has them. `first`, `of` and `order`: as in `Weight`. Raises ModelFileError."""

        def limits(end: str) -> Limits | None:
            names = [f"{name}.{end}_{side}" for side in ("min", "max")]
            if not any(map(self.has, names)):
                return None
            low, high = map(self.scalar, names)
            if low > high:
                raise damaged(self.file.path, f"{names[0]} is above {names[1]}")
            return Limits(low, high)

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

    def rows_of(self, name: str) -> int:
        """The rows of a matrix, 0 if there is none."""
        info = self.file.tensors.get(f"{name}.weight")
        return info.shape[0] if info and info.shape else 0

    @property
    def activation(self) -> Activation:
        """The activation of the encoder's feed-forward layers. Raises ModelFileError."""
        if self.file.get("clip.use_silu", bool, False):
            return "silu"
        if self.kind == "mlp" and not self.has("v.class_embd"):  # SigLIP's, which its files do not say
            return "gelu"
        if self.kind in ("deepseekocr", "deepseekocr2"):  # CLIP's and Qwen's; the file means that of the stem
            return "quick gelu" if self.kind == "deepseekocr" else "silu"
        if self.kind in ("qwen2vl_merger", "mlp", "step3vl") and not self.file.get(
            "clip.use_gelu", bool, False
        ):
            return "quick gelu"
        if self.kind not in ("gemma4v", "muse-glimmer", "gemma3nv") and not self.file.get(
            "clip.use_gelu", bool, False
        ):
            raise ModelFileError(
                f"{self.name} has an activation that orin-chat does not run.", "Choose another encoder."
            )
        return "exact gelu" if self.kind in _EXACT_GELU else "gelu"

    # --- the projector ---------------------------------------------------------------------------------

    def projector(self) -> tuple[int, tuple[ProjectorStep, ...]]:
        """The elements of an embedding, and the steps to it."""
        if self.kind in ("mlp", "phi4", "janus_pro"):  # some files say other numbers in its place
            return self.llava_steps()
        if self.kind == "resampler":
            return self.query_steps()
        if self.kind == "muse-glimmer":
            return self.shuffled_steps()
        if self.kind == "adapter":
            return self.adapter_steps()
        out, dim, joined = self.size("projection_dim"), self.dim, self.merge**2 * self.dim
        match self.kind:
            case "youtuvl":
                return out, self.normed_steps(out)
            case "gemma3nv":
                norm = Norm(self.eps, self.required("mm.soft_emb_norm.weight", dim))
                return out, (norm, self.linear("mm.input_projection", out, dim), Norm(self.eps))
            case "qwen2vl_merger" | "qwen2.5vl_merger" | "qwen3vl_merger" | "exaone4_5":
                first, last = self.linear("mm.0", joined, joined), self.linear("mm.2", out, joined)
                steps = self.norm("v.post_ln"), Merge("join"), first, Activate("exact gelu"), last
            case "gemma3":
                name = "mm.input_projection.weight"
                weight = Weight(name, dim, out, self.check(name, (dim, out)))
                norms = self.norm("v.post_ln"), self.norm("mm.soft_emb_norm")
                return out, (norms[0], Merge("mean"), norms[1], Linear(weight, transposed=True))
            case "idefics3":
                return out, (self.norm("v.post_ln"), Merge("join"), self.linear("mm.model.fc", out, joined))
            case "internvl":
                norm = self.projector_norm("mm.model.mlp.0", joined)
                first, last = (
                    self.linear("mm.model.mlp.1", out, joined),
                    self.linear("mm.model.mlp.3", out, out),
                )
                return out, (Merge("join"), norm, first, Activate("exact gelu"), last)
            case "llama4":
                hidden, width = (self.rows_of(f"mm.model.mlp.{i}") for i in (1, 2))
                first = self.linear("mm.model.mlp.1", hidden, joined)
                second = self.linear("mm.model.mlp.2", width, hidden)
                gelu, last = Activate("exact gelu"), self.linear("mm.model.fc", out, width)
                return out, (*self.last_norms(), Merge("join"), first, gelu, second, gelu, last)
            case "nemotron_v2_vl":
                hidden, norm = self.rows_of("mm.model.mlp.1"), self.norm("mm.model.mlp.0", joined)
                first = self.linear("mm.model.mlp.1", hidden, joined)
                last = self.linear("mm.model.mlp.3", out, hidden)
                return out, (Merge("join"), norm, first, Activate("relu2"), last)
            case "gemma4uv":
                norms = replace(self.norm("v.patch_norm.3"), eps=1e-5), Norm(self.eps)
                return out, (*norms, self.linear("mm.input_projection", out, dim))
            case "paddleocr" | "kimivl" | "kimik25" | "lfm2" | "dots_ocr":
                return out, self.steps_of_two(out)
            case "glm4v":
                return out, self.gated_steps(out)
            case "step3vl":
                return out, self.downsampled_steps(out)
            case "hunyuanvl":
                return out, self.convolved_steps(out)
            case "minicpmv4_6":
                return out, self.last_four_steps(out)
            case "deepseekocr" | "deepseekocr2":
                cols = 2 * dim if self.kind == "deepseekocr" else dim
                return out, (*self.last_norms(), self.linear("mm.model.fc", out, cols))
            case "gemma4v":
                scaled = Affine(math.sqrt(dim))
                if self.has("v.std_bias"):
                    minus, times = (self.required(f"v.std_{x}", dim) for x in ("bias", "scale"))
                    scaled = Affine(scaled.factor, minus, times)
                last = self.linear("mm.input_projection", out, dim)
                return out, (Merge("mean"), scaled, Norm(self.eps), last)
            case _:
                first, last = self.linear("mm.1", out, dim), self.linear("mm.2", out, out)
                last_steps = first, Activate("exact gelu"), last
                if not self.is_merged:
                    return out, last_steps
                merger = self.linear("mm.patch_merger", dim, joined)
                return out, (self.norm("mm.input_norm"), Merge("channels"), merger, *last_steps)
        return out, steps

    def projector_norm(self, name: str, size: int) -> Norm:
        """A LayerNorm, also where it has no bias."""
        return replace(self.norm(name, size), eps=_PROJECTOR_EPS[self.kind], centred=True)

    def last_norms(self, name: str = "v.post_ln") -> list[ProjectorStep]:
        """The norm after all layers, if there is one."""
        return [self.norm(name)] if self.has(f"{name}.weight") else []

    def steps_of_two(self, out: int) -> tuple[ProjectorStep, ...]:
        """The steps of a projector of two products, with a norm of patches before they are merged, or of what they
        become (LFM2), which may be left out."""
        dim, joined, is_dots = self.dim, self.merge**2 * self.dim, self.kind == "dots_ocr"
        steps = self.last_norms("mm.post_norm" if is_dots else "v.post_ln")
        size = joined if self.kind == "lfm2" else dim
        norms = [self.projector_norm("mm.input_norm", size)] if self.has("mm.input_norm.weight") else []
        merge = Merge("join")
        steps += [merge, *norms] if self.kind == "lfm2" else [*norms, merge]
        first, last = ("mm.0", "mm.2") if is_dots else ("mm.1", "mm.2")
        width = self.rows_of(first)
        return (
            *steps,
            self.linear(first, width, joined),
            Activate("exact gelu"),
            self.linear(last, out, width),
        )

    @cached_property
    def features(self) -> list[int]:
        """After how many layers x is read, each time as a part of the input of LLaVA's projector (Granite Vision); []
        if a file does not say so."""
        key = self.key("feature_layer")
        if self.kind != "mlp" or key not in self.file.metadata:
            return []
        layers = self.size("block_count")
        found = self.file.get(key, np.ndarray)
        features = found.tolist() if found.dtype.kind in "iu" and len(found) <= _MOST_FEATURES else []
        if (
            not features
            or sorted(set(features)) != features
            or not 0 <= features[0] <= features[-1] <= layers
        ):
            raise damaged(self.file.path, f"{key} are no layers of {layers}")
        return features

    def llava_steps(self) -> tuple[int, tuple[ProjectorStep, ...]]:
        """LLaVA's: two products, or one, or two that are normed (Yi-VL). Files leave out the layers whose results it
        does not read."""
        features = len(self.features)
        width, last = self.rows_of("mm.0"), "mm.1" if self.kind == "janus_pro" else "mm.2"
        steps = [] if features else self.last_norms()
        steps.append(self.linear("mm.0", width, self.dim * max(features, 1)))
        if self.has("mm.3.weight"):
            out = self.rows_of("mm.3")
            norms = self.projector_norm("mm.1", width), self.projector_norm("mm.4", out)
            steps += [norms[0], Activate("exact gelu"), self.linear("mm.3", out, width), norms[1]]
            return out, tuple(steps)
        out = self.rows_of(last) or width
        if self.has(f"{last}.weight"):
            steps += [Activate("exact gelu"), self.linear(last, out, width)]
        return out, tuple(steps)

    def query_steps(self) -> tuple[int, tuple[ProjectorStep, ...]]:
        """MiniCPM-V's: some fixed queries attend to all patches."""
        shape = self.file.tensors["resampler.query"].shape if self.has("resampler.query") else ()
        count, out = shape if len(shape) == 2 else (0, 0)
        if not 0 < count <= _MOST_QUERIES or not out or out % _QUERY_HEAD:
            raise damaged(self.file.path, f"its queries have the shape {shape}")
        q, k, v, o = (self.linear(f"resampler.attn.{x}", out, out) for x in ("q", "k", "v", "out"))
        queries, norm = self.required("resampler.query", count, out), self.norm("resampler.ln_q", out)
        attend = QueryAttention(queries, count, norm, q, k, v, o, out // _QUERY_HEAD, _QUERY_HEAD)
        steps = [
            *self.last_norms(),
            self.linear("resampler.kv", out, self.dim),
            self.norm("resampler.ln_kv", out),
        ]
        last = self.norm("resampler.ln_post", out), self.linear("resampler.proj", out, out)
        return out, (*steps, attend, *last)

    def merging(self, name: str, side: int = 0, cols: int = 0) -> Linear:
        """A convolution of squares of `side` places (those of a token unless said), of which it reads `cols` channels
        (`dim` unless said), channel by channel."""
        rows, m, dim, kernel = self.rows_of(name), side or self.merge, cols or self.dim, f"{name}.weight"
        weight = Weight(kernel, rows, m * m * dim, self.check(kernel, (rows, dim, m, m)))
        return Linear(weight, self.vector(f"{name}.bias", rows))

    def downsampled_steps(self, out: int) -> tuple[ProjectorStep, ...]:
        """The steps of Step3-VL's projector: two convolutions at every other place."""
        if self.merge != 4:
            raise damaged(self.file.path, f"{self.merge} patches a side become a token")
        first = self.merging("mm.0", 3)
        second = self.merging("mm.1", 3, first.weight.rows)
        last = self.linear("mm.model.fc", out, second.weight.rows)
        return (*self.last_norms(), Neighbours(3, 2, 4), first, Neighbours(3, 2, 2), second, last)

    def convolved_steps(self, out: int) -> tuple[ProjectorStep, ...]:
        """The steps of HunyuanOCR's projector: two convolutions, the second one of a single place."""
        first, name = self.merging("mm.0"), "mm.2"
        width, cols = self.rows_of(name), first.weight.rows
        weight = Weight(f"{name}.weight", width, cols, self.check(f"{name}.weight", (width, cols, 1, 1)))
        return (
            *self.last_norms(),
            self.norm("mm.pre_norm"),
            Merge("channels"),
            first,
            Activate("exact gelu"),
            Linear(weight, self.vector(f"{name}.bias", width)),
            self.linear("mm.model.fc", out, width),
            self.norm("mm.post_norm", out),
        )

    def shuffled_steps(self) -> tuple[int, tuple[ProjectorStep, ...]]:
        """Muse Glimmer's: three products of what patches become channel by channel, and a norm, which llama.cpp leaves
        to the model."""
        widths = [self.merge**2 * self.dim, *(self.rows_of(f"mm.{i}") for i in range(3))]
        first, second, last = (self.linear(f"mm.{i}", widths[i + 1], widths[i]) for i in range(3))
        gelu, norm = Activate("exact gelu"), Norm(1e-5)
        return widths[-1], (*self.last_norms(), Merge("channels"), first, gelu, second, gelu, last, norm)

    def last_four_steps(self, out: int) -> tuple[ProjectorStep, ...]:
        """The steps of MiniCPM-V 4.6's projector, of four rows a token."""
        joined, width = 4 * self.dim, self.rows_of("mm.up")
        first, last = self.linear("mm.up", width, joined), self.linear("mm.down", out, width)
        norm = self.norm("mm.input_norm", joined)
        return (*self.last_norms(), Merge("join"), norm, first, Activate("exact gelu"), last)

    def normed_steps(self, out: int) -> tuple[ProjectorStep, ...]:
        """The steps of Youtu-VL's projector, which norms patches twice."""
        width = self.rows_of("mm.0")
        norms = *self.last_norms(), replace(self.norm("mm.input_norm"), eps=1e-6)
        first, last = self.linear("mm.0", width, self.merge**2 * self.dim), self.linear("mm.2", out, width)
        return (*norms, Merge("join"), first, Activate("exact gelu"), last)

    def gated_steps(self, out: int) -> tuple[ProjectorStep, ...]:
        """The steps of GLM's projector: patches are merged by a convolution, and a feed-forward layer comes last."""
        width, hidden = (self.rows_of(x) for x in ("mm.model.fc", "mm.gate"))
        merger, gate, up = (
            self.merging("mm.patch_merger"),
            *(self.linear(f"mm.{x}", hidden, width) for x in ("gate", "up")),
        )
        return (
            *self.last_norms(),
            Merge("channels"),
            merger,
            self.linear("mm.model.fc", width, merger.weight.rows),
            self.projector_norm("mm.post_norm", width),
            Activate("exact gelu"),
            PatchFeedForward(gate, up, self.linear("mm.down", out, hidden), self.activation),
        )

    def adapter_steps(self) -> tuple[int, tuple[ProjectorStep, ...]]:
        """GLM-Edge's: patches are merged by a convolution, and a feed-forward layer comes last."""
        prefix = "adapter.linear."
        width, hidden, out = (self.rows_of(prefix + x) for x in ("linear", "gate", "dense_4h_to_h"))
        merger = self.merging("adapter.conv")
        gate, up = (self.linear(prefix + x, hidden, width) for x in ("gate", "dense_h_to_4h"))
        return out, (
            *self.last_norms(),
            Merge("channels"),
            merger,
            self.linear(f"{prefix}linear", width, merger.weight.rows),
            self.projector_norm(f"{prefix}norm1", width),
            Activate("exact gelu"),
            PatchFeedForward(gate, up, self.linear(f"{prefix}dense_4h_to_h", out, hidden), "silu"),
        )

    def later_projectors(self, layers: int, out: int) -> Iterator[Projector]:
        """The projectors of some layers, whose results the model adds later (deepstack of Qwen3-VL)."""
        joined = self.merge**2 * self.dim
        for i in range(layers):
            if self.has(f"{(prefix := f'v.deepstack.{i}')}.fc1.weight"):
                first = self.linear(f"{prefix}.fc1", joined, joined)
                last = self.linear(f"{prefix}.fc2", out, joined)
                norm = self.norm(f"{prefix}.norm", joined)
                yield Projector(2 * i + 2, (Merge("join"), norm, first, Activate("exact gelu"), last))
