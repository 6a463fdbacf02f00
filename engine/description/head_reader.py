"""The heads of a layer's attention and their rotary embedding, read from a file's metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.description.checked_file import CheckedFile
from engine.description.families import Family, Grid
from engine.description.spec import Rope
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged, printable
from engine.formats.rope_order import HeadOrder

MAX_HEAD = 1 << 13  # elements: published models have at most 576


@dataclass(frozen=True)
class AttentionHeads:
    """`count` query heads that share `kv` heads of keys and values, of `dim` elements each, of which the first
    `rotated` are rotated; values have `values`. `order`: that of a head's rows in the file, None if it is the
    engine's."""

    count: int
    kv: int
    dim: int
    rotated: int
    order: HeadOrder | None
    values: int = 0


class HeadReader(CheckedFile):
    """Reads the heads of `layers`. `ropes`: the rotary embeddings of those so far. All methods raise ModelFileError."""

    def __init__(self, file: GGUF, architecture: str, family: Family) -> None:
        super().__init__(file, architecture)
        self.family = family
        self.ropes: list[Rope] = []
        self.dim, self.context = self.size("embedding_length"), self.size("context_length")
        self.layers = self.size("block_count")
        self.unsaid_factor = family.long_rope_factor if self.context >= 1 << 17 else 1.0

    def heads(self, i: int, has_window: bool, interleaved: bool) -> AttentionHeads:
        """The heads of layer i. Those of layers with a window may have another size (gemma4)."""
        count = self.size_of_layer("attention.head_count", i)
        kv = self.size_of_layer("attention.head_count_kv", i, count)

        def size(key: str, default: int) -> int:
            whole = self.size(key, default)
            return self.size(f"{key}_swa", whole) if has_window else whole

        dim = size("attention.key_length", self.dim // count)
        rotated = size("rope.dimension_count", dim)
        if self.family.halves_rotation and not has_window:
            rotated //= 2
        values = size("attention.value_length", dim)
        if (
            values > dim
            or dim % 2
            or dim > MAX_HEAD  # before tables of this size are made
            or count % kv
            or rotated % 2
            or rotated > dim
        ):
            raise ModelFileError(
                f"{self.name} has attention heads of a shape that orin-chat does not run.",
                "Choose another model.",
            )
        order = HeadOrder(dim, rotated, interleaved)
        return AttentionHeads(count, kv, dim, rotated, None if order.is_engines else order, values)

    # --- rotary embedding ------------------------------------------------------------------------------

    @property
    def original_context(self) -> int:
        return self.size("rope.scaling.original_context_length", self.context)

    def rope(self, heads: AttentionHeads, is_rotated: bool, plain: bool, grid: Grid = None) -> int:
        """The index of a layer's rotary embedding. `plain`: with the base of layers with a window, and no scaling
        (gemma3.cpp). `grid`: how the sections of the file turn pairs, if it says some (`Family.grid`)."""
        rope = self.rotation(heads, plain) if is_rotated else Rope(heads.dim // 2)
        return self.add_rope(
            replace(rope, sections=self.sections(4 if grid == "four blocks" else 3), blocks=grid != "in turn")
            if grid
            else rope
        )

    def add_rope(self, rope: Rope) -> int:
        """The index of a rotary embedding."""
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def sections(self, count: int = 3) -> tuple[int, ...]:
        """How many pairs turn by each of the first `count` positions of a token, if the file says it."""
        sections = self.file.metadata.get(self.key("rope.dimension_sections"))
        if sections is None:
            return ()
        if not isinstance(sections, np.ndarray) or len(sections) < count or sections.dtype.kind not in "iu":
            raise damaged(self.file.path, f"its rotary embeddings have no {count} sections")
        return tuple(min(max(int(n), 0), MAX_HEAD) for n in sections[:count])

    def rotation(self, heads: AttentionHeads, plain: bool) -> Rope:
        """See `rope`. Raises ModelFileError. A factor without a type is linear, as in llama.cpp, and 0 stands for none;
        older files have it as scale_linear."""
        base = self.number("rope.freq_base", self.family.rope_base)
        if (alpha := self.number("rope.scaling.alpha", 0.0)) > 0 and heads.dim > 2:  # Hunyuan's
            base *= alpha ** (heads.dim / (heads.dim - 2))
        if plain:
            base = self.number("rope.freq_base_swa", self.family.window_base or base)
            kind, scale = "none", 1.0
        else:
            kind = self.file.get(self.key("rope.scaling.type"), str, "linear")
            unsaid = self.number("rope.scale_linear", self.unsaid_factor)
            scale = self.number("rope.scaling.factor", unsaid) or 1.0
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise ModelFileError(
                f"{self.name} uses RoPE scaling {printable(kind)}, which orin-chat does not run.",
                "Choose another model.",
            )
        rotated = heads.rotated
        whole, long, short = (
            None if plain else self._factors(name, rotated)
            for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
        )
        magnitude = self.number("rope.scaling.attn_factor", 1.0)

        def frequencies(factors: NDArray[np.float32] | None) -> tuple[float, ...]:
            with np.errstate(all="ignore"):  # checked below
                rates = np.float64(base) ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
                if factors is not None:
                    rates = rates / factors
                if kind in ("linear", "longrope"):
                    rates = rates / scale
                if kind == "yarn":
                    kept = self._yarn_share(base, rotated)
                    rates = rates * kept + rates / scale * (1 - kept)
            if not (np.isfinite(rates).all() and (rates > 0).all()):
                raise damaged(self.file.path, "its RoPE frequencies are not positive")
            return tuple(rates.tolist())

        if kind == "yarn":
            if scale <= 0:
                raise damaged(self.file.path, "its RoPE frequencies are not positive")
            log_multiplier = self.number("rope.scaling.yarn_log_multiplier", 0.0)
            magnitude *= (1 + 0.1 * math.log(scale)) / (1 + 0.1 * log_multiplier * math.log(scale))
        return Rope(
            pairs=heads.dim // 2,
            frequencies=frequencies(whole if whole is not None else short),
            long_frequencies=frequencies(long) if long is not None and whole is None else (),
            short_context=self.original_context,
            magnitude=1.0 if plain else magnitude,
        )

    def _yarn_share(self, base: float, dims: int) -> NDArray[np.float64]:
        """The share of each pair's frequency that yarn keeps: rope_yarn in ggml/src/ggml-cpu/ops.cpp, and
        ggml_rope_yarn_corr_dims in ggml/src/ggml.c."""
        original = self.original_context

        def pair(turns: float) -> float:
            if not (turns > 0 and base > 1):
                raise damaged(self.file.path, "its RoPE scaling yarn has no bounds")
            return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(pair(self.number("rope.scaling.yarn_beta_fast", 32.0))))
        high = min(dims - 1, math.ceil(pair(self.number("rope.scaling.yarn_beta_slow", 1.0))))
        ramp = np.clip((np.arange(dims // 2) - low) / max(0.001, high - low), 0, 1)
        return np.asarray(1 - ramp, np.float64)

    def _factors(self, name: str, rotated: int) -> NDArray[np.float32] | None:
        """Divisors of the frequencies, float32 (rotated / 2,): freq_factors of ggml_rope_ext. Layers that rotate fewer
        dimensions than others take the first ones."""
        tensor = f"{name}.weight"
        if not self.has(tensor):
            return None
        info = self.file.tensors[tensor]
        n = rotated if self.family.halves_rotation else rotated // 2
        if info.type != 0 or info.shape not in ((n,), (rotated // 2,)):
            raise damaged(self.file.path, f"the shape or type of {tensor} does not fit its heads")
        self.used.add(tensor)
        return info.read().view(np.float32)[: rotated // 2]
