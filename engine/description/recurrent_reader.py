"""The layers of a model that keep a state of each sequence in place of keys and values, read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from engine.description.head_reader import MAX_HEAD, HeadReader
from engine.description.recurrent import DeltaNet, KeyedDeltaNet, Mamba, Recurrent, SelectiveScan, ShortConv
from engine.description.sublayers import Vector, Weight
from engine.errors import ModelFileError
from engine.formats.gguf import damaged


class RecurrentReader(HeadReader):
    """Reads recurrent layers. All methods raise ModelFileError."""

    @property
    def is_all_recurrent(self) -> bool:
        """Whether no layer has attention."""
        counts = self.file.metadata.get(self.key("attention.head_count"))
        return isinstance(counts, int) and counts == 0

    def is_recurrent(self, i: int) -> bool:
        """Whether layer i keeps a state: `recurrent_layers` tells it, or the number of layers of which the last has
        attention, or that it has no heads of keys or none at all."""
        if i >= self.layers:  # a draft head has attention
            return False
        if self.is_all_recurrent:
            return True
        if not self.family.attention_every:
            counts = self.file.metadata.get(self.key("attention.head_count_kv"))
            return isinstance(counts, np.ndarray) and i < len(counts) and counts[i] == 0
        layers = self.file.metadata.get(self.key("attention.recurrent_layers"))
        if isinstance(layers, np.ndarray):
            if len(layers) < self.layers:
                raise damaged(self.file.path, f"{len(layers)} of its layers are recurrent or not")
            return bool(layers[i])
        return (i + 1) % self.size("full_attention_interval", self.family.attention_every) != 0

    def recurrent(self, prefix: str) -> Recurrent:
        """The layer that keeps a state."""
        match self.family.recurrent:
            case "delta net":
                return self.delta(prefix)
            case "keyed delta net":
                return self.keyed_delta(prefix)
            case "short conv":
                return self.short_conv(prefix)
            case "mamba":
                return self.mamba(prefix)
            case "scan":
                return self.scan(prefix)
            case "head scan":
                return self.head_scan(prefix)

    def scan(self, prefix: str) -> SelectiveScan:
        """A Mamba layer of the first kind."""
        width, rank, size, taps = (
            *(self.size(f"ssm.{key}") for key in ("inner_size", "time_step_rank", "state_size")),
            self.taps("ssm.conv_kernel"),
        )
        dim, rows = self.dim, (rank, size, size)
        channels, gate = (
            self.weight(f"{prefix}ssm_in", width, dim, first, 2 * width) for first in (0, width)
        )
        low, b, c = (
            self.weight(f"{prefix}ssm_x", n, width, first, sum(rows))
            for n, first in zip(rows, accumulate(rows, initial=0), strict=False)
        )
        is_normed = self.file.get(self.key("ssm.dt_b_c_rms"), bool, False)  # without weights (falcon-mamba)
        norms = [
            self.vector(f"{prefix}ssm_{x}_norm.weight", n) or (Vector("", n) if is_normed else None)
            for x, n in zip(("dt", "b", "c"), rows, strict=True)
        ]
        return SelectiveScan(
            channels=channels, gate=gate, low=low, b=b, c=c,
            step=self.weight(f"{prefix}ssm_dt", width, rank),
            out=self.weight(f"{prefix}ssm_out", dim, width),
            conv=self.required(f"{prefix}ssm_conv1d.weight", width, taps),
            conv_bias=self.required(f"{prefix}ssm_conv1d.bias", width),
            low_norm=norms[0], b_norm=norms[1], c_norm=norms[2],
            step_bias=self.required(f"{prefix}ssm_dt.bias", width),
            decay=self.required(f"{prefix}ssm_a", width, size),
            skip=self.required(f"{prefix}ssm_d", width), size=size, taps=taps,
        )  # fmt: skip

    def head_scan(self, prefix: str) -> SelectiveScan:
        """A Mamba layer whose heads have a step, a decay and a skip each (PLaMo 2). In ssm_in, the gates of a head come
        before its channels, and in ssm_x, B and C before what steps are made of."""
        width, heads, size, taps = (
            *(self.size(f"ssm.{key}") for key in ("inner_size", "time_step_rank", "state_size")),
            self.taps("ssm.conv_kernel"),
        )
        if width % heads:
            raise damaged(self.file.path, f"it has {heads} heads of {width} channels")
        dim, of_head = self.dim, width // heads
        step = self.file.tensors.get(f"{prefix}ssm_dt.weight")
        rows = size, size, step.shape[-1] if step else 1
        gate, channels = (
            self.weight(f"{prefix}ssm_in", width, dim, first, 2 * width, every=2 * of_head, run=of_head)
            for first in (0, of_head)
        )
        b, c, low = (
            self.weight(f"{prefix}ssm_x", n, width, first, sum(rows))
            for n, first in zip(rows, accumulate(rows, initial=0), strict=False)
        )

        def norm(x: str, n: int) -> Vector | None:
            return self.vector(self.norm_named(f"{prefix}ssm_{x}_norm"), n)

        def of_heads(tensor: str, each: int) -> Vector:
            return replace(self.required(f"{prefix}{tensor}", heads), size=heads * each, each=each)

        return SelectiveScan(
            channels=channels, gate=gate, low=low, b=b, c=c,
            step=self.weight(f"{prefix}ssm_dt", heads, rows[2]),
            out=self.weight(f"{prefix}ssm_out", dim, width),
            conv=self.required(f"{prefix}ssm_conv1d.weight", width, taps),
            conv_bias=self.vector(f"{prefix}ssm_conv1d.bias", width),
            low_norm=norm("dt", rows[2]), b_norm=norm("b", size), c_norm=norm("c", size),
            step_bias=of_heads("ssm_dt.bias", of_head), decay=of_heads("ssm_a", of_head * size),
            skip=of_heads("ssm_d", of_head), size=size, taps=taps,
        )  # fmt: skip

    def mamba(self, prefix: str) -> Mamba:
        """A Mamba 2 layer. Raises ModelFileError for a shape that the engine does not run."""
        heads, groups = self.size("ssm.time_step_rank"), self.size("ssm.group_count")
        size, taps, width = (
            self.size("ssm.state_size"),
            self.taps("ssm.conv_kernel"),
            self.size("ssm.inner_size"),
        )
        if width % heads or heads % groups or size > MAX_HEAD:
            raise ModelFileError(
                f"{self.name} has Mamba 2 layers of a shape that orin-chat does not run.",
                "Choose another model.",
            )
        channels = width + 2 * groups * size
        rows = width, channels, heads
        gate, inputs, step = (
            self.weight(f"{prefix}ssm_in", n, self.dim, first, sum(rows))
            for n, first in zip(rows, accumulate(rows, initial=0), strict=False)
        )
        has_norm = self.has(f"{prefix}ssm_norm.weight")
        return Mamba(
            gate=gate, channels=inputs, step=step,
            out=self.weight(f"{prefix}ssm_out", self.dim, width),
            conv=self.required(f"{prefix}ssm_conv1d.weight", channels, taps),
            conv_bias=self.vector(f"{prefix}ssm_conv1d.bias", channels),
            decay=self.required(f"{prefix}ssm_a", heads, 1),
            step_bias=self.required(f"{prefix}ssm_dt.bias", heads),
            skip=self.required(f"{prefix}ssm_d", heads, 1),
            norm=self.required(f"{prefix}ssm_norm.weight", groups, width // groups) if has_norm else None,
            heads=heads, groups=groups, head_dim=width // heads, size=size, taps=taps,
        )  # fmt: skip

    def taps(self, key: str) -> int:
        """The tokens that a convolution reads."""
        taps = self.size(key)
        if taps < 2:
            raise damaged(self.file.path, f"its convolutions read {taps} token")
        return taps

    def short_conv(self, prefix: str) -> ShortConv:
        dim, taps = self.dim, self.taps("shortconv.l_cache")
        return ShortConv(
            inputs=self.weight(f"{prefix}shortconv.in_proj", 3 * dim, dim),
            out=self.weight(f"{prefix}shortconv.out_proj", dim, dim),
            conv=self.required(f"{prefix}shortconv.conv.weight", dim, taps),
            channels=dim,
            taps=taps,
        )

    def keyed_delta(self, prefix: str) -> KeyedDeltaNet:
        """A delta net whose keys have decays. Those and the gates may be of two matrices, the first one narrow."""
        heads, size, taps = (
            self.size("attention.head_count"),
            self.size("kda.head_dim"),
            self.taps("ssm.conv_kernel"),
        )
        width, dim = heads * size, self.dim
        if max(heads, size) > MAX_HEAD:
            raise ModelFileError(
                f"{self.name} has delta nets of a shape that orin-chat does not run.", "Choose another model."
            )

        def both(x: str) -> tuple[Weight, ...]:
            if not self.has(f"{prefix}ssm_{x}_b.weight"):
                return (self.weight(f"{prefix}ssm_{x}_a", width, dim),)
            narrow = self.file.tensors[f"{prefix}ssm_{x}_b.weight"].shape[-1]
            first = self.weight(f"{prefix}ssm_{x}_a", narrow, dim)
            return first, self.weight(f"{prefix}ssm_{x}_b", width, narrow)

        def flat(tensor: str, *shape: int) -> Vector:
            """A vector of this shape, which may have sides of 1 besides."""
            info = self.file.tensors.get(tensor)
            sides = tuple(n for n in info.shape if n > 1) if info else ()
            whole = tuple(n for n in shape if n > 1)
            return self.required(tensor, *(info.shape if info and sides == whole else shape))

        if self.has(f"{prefix}attn_qkv.weight"):
            qkv = [self.weight(f"{prefix}attn_qkv", width, dim, i * width, 3 * width) for i in range(3)]
        else:
            qkv = [self.weight(f"{prefix}attn_{x}", width, dim) for x in "qkv"]
        return KeyedDeltaNet(
            qkv=tuple(qkv), gates=both("g"), beta=self.weight(f"{prefix}ssm_beta", heads, dim), alphas=both("f"),
            out=self.weight(f"{prefix}attn_output", dim, width),
            convs=tuple(flat(f"{prefix}ssm_conv1d_{x}.weight", width, taps) for x in "qkv"),
            decay=flat(f"{prefix}ssm_a", heads), decay_bias=self.required(f"{prefix}ssm_dt.bias", width),
            norm=self.required(f"{prefix}ssm_norm.weight", size),
            heads=heads, size=size, taps=taps, bound=self.number("kda.gate_lower_bound", 0.0),
        )  # fmt: skip

    def delta(self, prefix: str) -> DeltaNet:
        """A gated delta net. Raises ModelFileError for one that is cut into other heads than the engine's."""
        key_heads, value_heads = self.size("ssm.group_count"), self.size("ssm.time_step_rank")
        size, taps = self.size("ssm.state_size"), self.taps("ssm.conv_kernel")
        dim, channels, values = self.dim, (2 * key_heads + value_heads) * size, value_heads * size
        # only files of Ollama say it
        in_turn = self.file.get(self.key("ssm.v_head_reordered"), bool, self.family.shares_in_turn)
        fits = not value_heads % key_heads and self.size("ssm.inner_size", values) == values
        if size > MAX_HEAD or not fits:
            raise ModelFileError(
                f"{self.name} has gated delta nets of a shape that orin-chat does not run.",
                "Choose another model.",
            )

        def of_keys(tensor: str, runs: Sequence[int]) -> list[Weight]:
            """The matrices of a tensor that has, of each key head, so many rows of each."""
            every, firsts = sum(runs), accumulate(runs, initial=0)
            whole = key_heads * every
            return [
                self.weight(f"{prefix}{tensor}", key_heads * run, dim, first, whole, every=every, run=run)
                for first, run in zip(firsts, runs, strict=False)
            ]

        shared_by = value_heads // key_heads
        if self.has(f"{prefix}ssm_in.weight"):  # older files of Qwen3 Next
            *qkv, gate = of_keys("ssm_in", [size, size, shared_by * size, shared_by * size])
        else:
            qkv = [self.weight(f"{prefix}attn_qkv", channels, dim)]
            gate = self.weight(f"{prefix}attn_gate", values, dim)
        if self.has(f"{prefix}ssm_ba.weight"):
            beta, alpha = of_keys("ssm_ba", [shared_by, shared_by])
        else:
            beta, alpha = (self.weight(f"{prefix}ssm_{x}", value_heads, dim) for x in ("beta", "alpha"))
        return DeltaNet(
            qkv=tuple(qkv), gate=gate, beta=beta, alpha=alpha,
            out=self.weight(f"{prefix}ssm_out", dim, values),
            conv=self.required(f"{prefix}ssm_conv1d.weight", channels, taps),
            decay=self.required(f"{prefix}ssm_a", value_heads),
            decay_bias=self.required(f"{prefix}ssm_dt.bias", value_heads),
            norm=self.required(f"{prefix}ssm_norm.weight", size),
            key_heads=key_heads, value_heads=value_heads, size=size, taps=taps, shares_in_turn=in_turn,
            gating="sigmoid" if self.family.sigmoid_delta else "silu",
        )  # fmt: skip
