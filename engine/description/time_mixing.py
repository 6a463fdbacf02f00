"""RWKV 7's sublayers as data, read from a file: time mixing, which keeps a state of each head, and channel mixing. Both
also read the token before their own.

Names of tensors and formulas: src/models/rwkv7.cpp, rwkv7-base.cpp and arwkv7.cpp of llama.cpp. What they are for:
https://arxiv.org/abs/2503.14456.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engine.description.checked_file import CheckedFile
from engine.description.mixing_heads import MixingHeads, read_head_size
from engine.description.older_time_mixing import has_older_mixing, read_older_mix
from engine.description.recurrent import Recurrent
from engine.description.spec import Sublayer
from engine.description.sublayers import Operator, Roles, Vector, Weight
from engine.formats.gguf import damaged

LowRank = tuple[Weight, Weight]
"""Two matrices, one after the other."""

_LERP = "time_mix_lerp_fused.weight"


@dataclass(frozen=True)
class TimeMix(MixingHeads):
    """Of a token's x and that of the token before, p (zeros before the first one), it reads x + l * (p - x), with an l
    each for r, w, k, v, a and g, one after the other in `lerp`: x_r and so on. With s the sigmoid:

    r = `receptance` x_r;  k = `key` x_k;  v = `value` x_v;  a = s(`rate` x_a + `rate_bias`)
    g = gate[1] s(gate[0] x_g);  log w = -e**-0.5 s(decay[1] tanh(decay[0] x_w) + `decay_bias`)

    With a `mix`, v += (v of the first layer - v) * s(`mix` x_v + `mix_bias`). c = k * `removed`, divided by the length
    that it has in each head; and then k *= 1 + (a - 1) * `replaced`. With a state S (size keys, size values) for each
    of the heads, a token computes, all at once: S = w S (by rows) - (a * c) (S^T c)^T + k v^T;  y = S^T r.

    To y, of which a LayerNorm is taken in each head if there is a `norm`, which has a bias then, each head's sum of
    r * k * `bonus`, times v, is added. The result is `out` (y * g), or without a gate `out` y. A sequence keeps the S,
    and the last x."""

    decay: LowRank
    rate: LowRank
    mix: LowRank | None
    gate: LowRank | None
    rate_bias: Vector
    mix_bias: Vector | None
    lerp: Vector
    removed: Vector
    replaced: Vector
    bonus: Vector
    words = "time mixing"

    @property
    def roles(self) -> Roles:
        low = *self.decay, *self.rate, *(self.mix or ()), *(self.gate or ())
        return {
            "QKV projection": (self.receptance, self.key, self.value, *low),
            "attention output": (self.out,),
        }


@dataclass(frozen=True)
class ChannelMix(Recurrent):
    """`down` (max(`up` (x + lerp * (p - x)), 0) ** 2), with p as in `TimeMix`. A sequence keeps the last x. With a
    `receptance` (RWKV 6), it is times sigmoid(`receptance` (x + `receptance_lerp` * (p - x)))."""

    up: Weight
    down: Weight
    lerp: Vector
    receptance: Weight | None = None
    receptance_lerp: Vector | None = None
    words = "channel mixing"

    @property
    def row_elements(self) -> int:
        """Also x, and what is read of it."""
        return super().row_elements + 2 * self.down.rows

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((1, self.down.rows),)

    @property
    def roles(self) -> Roles:
        return {"FFN gate+up": (self.up, self.receptance), "FFN down": (self.down,)}


def has_time_mixing(file: CheckedFile, prefix: str) -> bool:
    """Whether a layer mixes tokens so."""
    return file.has(f"{prefix}{_LERP}")


def has_channel_mixing(file: CheckedFile, prefix: str) -> bool:
    """Whether a layer has that in place of a feed-forward layer."""
    return file.has(f"{prefix}channel_mix_key.weight")


def read_mixing_layer(file: CheckedFile, i: int, dim: int) -> Iterator[Sublayer]:
    """Layer i, of both. Raises ModelFileError."""
    prefix = f"blk.{i}."
    width = file.size("feed_forward_length")
    has_receptance = file.has(f"{prefix}channel_mix_receptance.weight")
    channel_mix = ChannelMix(
        file.weight(f"{prefix}channel_mix_key", width, dim),
        file.weight(f"{prefix}channel_mix_value", dim, width),
        file.required(f"{prefix}channel_mix_lerp_k.weight", dim),
        file.weight(f"{prefix}channel_mix_receptance", dim, dim) if has_receptance else None,
        file.required(f"{prefix}channel_mix_lerp_r.weight", dim) if has_receptance else None,
    )
    time_mix = (read_older_mix if has_older_mixing(file, prefix) else read_time_mix)(file, i, dim)
    every = file.file.get(file.key("rescale_every_n_layers"), int, 0)
    factor = 0.5 if every > 0 and (i + 1) % every == 0 else 1.0  # of the stream, in float16's range (RWKV 6)
    of: tuple[tuple[str, Operator, float], ...] = (
        ("attn_norm", time_mix, 1.0),
        ("attn_norm_2", channel_mix, factor),
    )
    for name, operator, times in of:
        norm = file.required(f"{prefix}{name}.weight", dim)
        bias = file.required(f"{prefix}{name}.bias", dim)
        yield Sublayer(norm, operator, None, norm_bias=bias, factor=times)


def read_time_mix(file: CheckedFile, i: int, dim: int) -> TimeMix:
    """The time mixing of layer i. Raises ModelFileError."""
    prefix, size = f"blk.{i}.time_mix_", read_head_size(file, dim)
    if not has_time_mixing(file, "blk.0."):  # whose values the others read
        raise damaged(file.file.path, f"layer {i} mixes tokens in time, and the first one does not")
    has_gate, has_norm = (file.has(f"{prefix}{name}.weight") for name in ("g1", "ln"))
    parts = 6 if has_gate else 5

    def vector(name: str) -> Vector:
        return file.required(f"{prefix}{name}.weight", dim)

    def matrix(name: str) -> Weight:
        return file.weight(f"{prefix}{name}", dim, dim)

    def low_rank(name: str, key: str) -> LowRank:
        rank = file.size(f"attention.{key}_lora_rank")
        down, up = (f"{prefix}{name}{n}" for n in (1, 2))
        return file.weight(down, rank, dim), file.weight(up, dim, rank)

    if not i:  # the file may have what is not needed
        file.used.update(f"{prefix}v{n}.weight" for n in range(3))
    lerp = file.file.tensors.get(f"blk.{i}.{_LERP}")
    shape = lerp.shape if lerp and math.prod(lerp.shape) == parts * dim else (parts, 1, 1, dim)
    return TimeMix(
        receptance=matrix("receptance"), key=matrix("key"), value=matrix("value"), out=matrix("output"),
        decay=low_rank("w", "decay"), rate=low_rank("a", "iclr"),
        mix=low_rank("v", "value_residual_mix") if i else None,
        gate=low_rank("g", "gate") if has_gate else None,
        decay_bias=vector("w0"), rate_bias=vector("a0"), mix_bias=vector("v0") if i else None,
        lerp=file.required(f"blk.{i}.{_LERP}", *shape),
        removed=vector("k_k"), replaced=vector("k_a"), bonus=vector("r_k"),
        norm=vector("ln") if has_norm else None,
        norm_bias=file.required(f"{prefix}ln.bias", dim) if has_norm else None,
        heads=dim // size, size=size,
    )  # fmt: skip
