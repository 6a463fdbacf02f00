"""RWKV 6's time mixing as data, read from a file, also that of the layers of Qwen 2 that became such ones.

Names of tensors and formulas: src/models/rwkv6-base.cpp, rwkv6.cpp and rwkv6qwen2.cpp of llama.cpp. What they are for:
https://arxiv.org/abs/2404.05892.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.description.checked_file import CheckedFile
from engine.description.mixing_heads import MixingHeads, read_head_size
from engine.description.sublayers import Roles, Vector, Weight
from engine.formats.gguf import damaged

_PARTS = "wkvrg"
"""In the order of the file."""


@dataclass(frozen=True)
class OlderTimeMix(MixingHeads):
    """Of a token's x and that of the token before, p (zeros before the first one), it reads x + l * (p - x), with an l
    each for w, k, v, r and g: one of `lerps`, plus its `mixing` of its part of tanh(`shared` (x + `lerp_x` * (p - x))),
    whose parts are as many elements each. So x_r and so on:

    r = `receptance` x_r;  k = `key` x_k;  v = `value` x_v, with their biases, a k and v for as many heads each
    log w = -exp(decay[1] tanh(decay[0] x_w) + `decay_bias`);  g = silu(`gate` x_g)

    With a state S (size keys, size values) for each of the heads, a token computes y = S^T r + (sum of r * `first` * k)
    v and then S = w S (by rows) + k v^T. A LayerNorm of y is taken in each head, with `norm` and `norm_bias`, and the
    result is `out` (y * g). A sequence keeps the S, and the last x.

    Without `first`, k is times 1 - w, g is the sigmoid, S comes before y, which is S^T r / sqrt(size), and is not
    normed."""

    gate: Weight
    shared: Weight
    mixing: tuple[Weight, ...]
    decay: tuple[Weight, Weight]
    receptance_bias: Vector | None
    key_bias: Vector | None
    value_bias: Vector | None
    lerp_x: Vector
    lerps: tuple[Vector, ...]
    first: Vector | None
    words = "RWKV 6's time mixing"

    @property
    def key_heads(self) -> int:
        return self.key.rows // self.size

    @property
    def vectors(self) -> tuple[Vector, ...]:
        return *super().vectors, *self.lerps

    @property
    def roles(self) -> Roles:
        inputs = self.shared, *self.mixing, *self.decay, self.receptance, self.key, self.value, self.gate
        return {"QKV projection": inputs, "attention output": (self.out,)}


def has_older_mixing(file: CheckedFile, prefix: str) -> bool:
    """Whether a layer mixes tokens so."""
    return file.has(f"{prefix}time_mix_decay_w1.weight")


def read_older_mix(file: CheckedFile, i: int, dim: int) -> OlderTimeMix:
    """The time mixing of layer i. Raises ModelFileError."""
    prefix, size = f"blk.{i}.time_mix_", read_head_size(file, dim)
    heads, rank, low = dim // size, file.size("time_mix_extra_dim"), file.size("time_decay_extra_dim")
    has_fewer = file.file.get(file.key("attention.head_count_kv"), int, 0) != 0
    key_heads = file.size("attention.head_count_kv") if has_fewer else heads
    if heads % key_heads:
        raise damaged(file.file.path, f"{heads} heads share {key_heads} keys")

    def vector(name: str) -> Vector:
        """Of one element each, whatever sides of 1 it has besides."""
        info = file.file.tensors.get(f"{prefix}{name}.weight")
        is_flat = info is not None and math.prod(info.shape) == dim
        return file.required(f"{prefix}{name}.weight", *(info.shape if info and is_flat else (dim,)))

    def lerps() -> tuple[Vector, ...]:
        fused = f"{prefix}lerp_fused.weight"
        if not file.has(fused):
            return tuple(vector(f"lerp_{part}") for part in _PARTS)
        file.check(fused, (len(_PARTS), 1, 1, dim))
        return tuple(Vector(fused, dim, n * dim) for n in range(len(_PARTS)))

    mixing, has_first = f"{prefix}w2.weight", file.has(f"{prefix}first.weight")
    kind = file.check(mixing, (len(_PARTS), dim, rank))
    widths = {"receptance": dim, "key": key_heads * size, "value": key_heads * size}
    r, k, v = (file.weight(f"{prefix}{name}", n, dim) for name, n in widths.items())
    biases = [file.vector(f"{prefix}{name}.bias", n) for name, n in widths.items()]
    return OlderTimeMix(
        receptance=r, key=k, value=v,
        gate=file.weight(f"{prefix}gate", dim, dim), out=file.weight(f"{prefix}output", dim, dim),
        shared=file.weight(f"{prefix}w1", len(_PARTS) * rank, dim),
        mixing=tuple(Weight(mixing, dim, rank, kind, n * dim) for n in range(len(_PARTS))),
        decay=(file.weight(f"{prefix}decay_w1", low, dim), file.weight(f"{prefix}decay_w2", dim, low)),
        receptance_bias=biases[0], key_bias=biases[1], value_bias=biases[2],
        decay_bias=vector("decay"), lerp_x=vector("lerp_x"), lerps=lerps(),
        first=file.required(f"{prefix}first.weight", heads, size) if has_first else None,
        norm=vector("ln") if has_first else None,
        norm_bias=file.required(f"{prefix}ln.bias", dim) if has_first else None,
        heads=heads, size=size,
    )  # fmt: skip
