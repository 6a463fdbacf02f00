"""Several residual streams whose mean each sublayer reads (hyper-connections, https://arxiv.org/abs/2409.19606), and
what the last tokens give a layer (hashed n-grams), as data: Qwen 4's layers. The formulas are those of
src/models/qwen4exp.cpp of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.description.checked_file import CheckedFile
from engine.description.recurrent import Recurrent
from engine.description.spec import HashedRows, Sublayer
from engine.description.sublayers import Operator, Roles, Vector, Weight
from engine.formats.gguf import damaged

_MOST_HEADS, _MOST_TOKENS = 1 << 10, 1 << 4


@dataclass(frozen=True)
class Mixing(Operator):
    """What is read of `count` streams s: with n = norm(s), each stream by itself, and g = `up` silu(`down` n / count),
    the mean of all n * sigmoid(g). `norm` has the norm's weights, stream by stream. All streams begin as the embedding.
    After the last layer this is what the head reads, without a norm of its own."""

    norm: Vector
    down: Weight
    up: Weight
    count: int
    words = "hyper-connections"

    @property
    def roles(self) -> Roles:
        return {"FFN gate+up": (self.down,), "FFN down": (self.up,)}


@dataclass(frozen=True)
class HyperConnection(Operator):
    """A sublayer y = `of` (what `mixing` reads), which is added to each stream: s_i += 2 sigmoid(w_i / count) y, with
    w = `inject` n of the mixing's n, a number for each stream."""

    mixing: Mixing
    inject: Weight
    of: Operator
    words = Mixing.words

    @property
    def count(self) -> int:
        return self.mixing.count

    @property
    def is_keeping(self) -> bool:
        return self.of.is_keeping

    @property
    def roles(self) -> Roles:
        return {"router": (self.inject,)}


@dataclass(frozen=True)
class HashedEmbedding(Recurrent):
    """What a token's rows of `ModelSpec.hashed`, one after the other, e (dim), give each stream s_i. With norms of each
    stream by itself: a = <key_norm(`key` e)_i, query_norm(s)_i> / sqrt(dim), and
    g_i = sigmoid(sign(a) sqrt(max(|a|, 1e-6))) `value` e. Each element of conv_norm(g) passes a causal convolution over
    `taps` tokens, each `dilation` tokens before the next one, the last tap for the token itself, and then SiLU: c_i.
    Last, s_i += g_i + c_i. A sequence keeps the last inputs of the convolution."""

    key: Weight
    value: Weight
    key_norm: Vector
    query_norm: Vector
    conv_norm: Vector
    conv: Vector
    """Element by element its taps."""
    count: int
    taps: int
    dilation: int
    words = "hashed embeddings"

    @property
    def width(self) -> int:
        """Elements of all streams."""
        return self.key.rows

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (((self.taps - 1) * self.dilation, self.width),)

    @property
    def roles(self) -> Roles:
        return {"embedding": (self.key, self.value)}


def has_connections(file: CheckedFile) -> bool:
    return file.has("output_hc_down.weight")


def read_connected_layer(
    file: CheckedFile, i: int, dim: int, of: tuple[Operator, Operator], hashed: HashedRows | None
) -> Iterator[Sublayer]:
    """Layer i, which has these two sublayers. Raises ModelFileError."""
    prefix = f"blk.{i}."
    count = file.size("hyper_connection.count")
    if hashed and file.has(f"{prefix}ple_key.weight"):
        yield Sublayer(None, _hashed_embedding(file, prefix, dim, count, hashed), None)
    for name, operator in zip(("attn", "ffn"), of, strict=True):
        inject = file.weight(f"{prefix}hc_{name}_inject", count, count * dim)
        yield Sublayer(
            None, HyperConnection(_mixing(file, f"{prefix}hc_{name}", dim), inject, operator), None
        )


def read_last_mixing(file: CheckedFile, dim: int) -> Sublayer:
    """What follows the layers. Raises ModelFileError."""
    return Sublayer(None, _mixing(file, "output_hc", dim), None)


def read_hashed_rows(file: CheckedFile, dim: int) -> HashedRows | None:
    """What tokens give by hashes of the last ones, if the file has it. Raises ModelFileError."""
    if file.key("ple.layers") not in file.file.metadata:
        return None
    tokens, each = file.size("ple.ngram_size"), file.size("ple.heads_per_ngram")
    heads = (tokens - 1) * each
    if not 2 <= tokens <= _MOST_TOKENS or heads > _MOST_HEADS:
        raise damaged(file.file.path, f"its hashes are of {tokens} tokens and {heads} heads")

    def numbers(key: str, count: int) -> tuple[int, ...]:
        values = file.file.metadata.get(file.key(key))
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or len(values) < count:
            raise damaged(file.file.path, f"{file.key(key)} has no {count} numbers")
        return tuple(int(value) for value in values[:count])

    info = file.file.tensors.get("per_layer_token_embd.weight")
    rows = info.shape[0] if info else 1
    size = file.size("embedding_length_per_layer_input")
    offsets, sizes = numbers("ple.head_offsets", heads), numbers("ple.head_vocab_sizes", heads)
    if heads * size != dim or any(
        offset < 0 or n < 1 or offset + n > rows for offset, n in zip(offsets, sizes, strict=True)
    ):
        raise damaged(file.file.path, f"its hashes do not fit a table of {rows} rows of {size} elements")
    end = file.file.get(file.key("ple.eos_token_id"), int)
    picture = file.file.get(file.key("ple.image_token_id"), int, 0) or end
    if not all(0 <= token < 1 << 31 for token in (end, picture)):
        raise damaged(file.file.path, f"its hashes have the tokens {end} and {picture}")
    return HashedRows(
        table=file.weight("per_layer_token_embd", rows, size),
        multipliers=tuple(n % (1 << 64) for n in numbers("ple.layer_multipliers", tokens)),
        offsets=offsets,
        sizes=sizes,
        each=each,
        end=end,
        picture=picture,
    )


def _mixing(file: CheckedFile, name: str, dim: int) -> Mixing:
    count, rank = file.size("hyper_connection.count"), file.size("hyper_connection.low_rank")
    if not 2 <= count <= _MOST_HEADS:
        raise damaged(file.file.path, f"it has {count} residual streams")
    return Mixing(
        _of_streams(file, f"{name}_norm", count, dim),
        file.weight(f"{name}_down", rank, count * dim),
        file.weight(f"{name}_up", count * dim, rank),
        count,
    )


def _of_streams(file: CheckedFile, name: str, count: int, dim: int) -> Vector:
    """The weights of norms of streams, which may be one vector or have a row for each stream."""
    tensor = f"{name}.weight"
    info = file.file.tensors.get(tensor)
    is_flat = info is None or len(info.shape) == 1
    return file.required(tensor, *((count * dim,) if is_flat else (count, dim)))


def _hashed_embedding(
    file: CheckedFile, prefix: str, dim: int, count: int, hashed: HashedRows
) -> HashedEmbedding:
    taps, width = file.size("ple.conv_kernel"), count * dim
    if not 2 <= taps <= _MOST_HEADS:
        raise damaged(file.file.path, f"its convolutions read {taps} token")

    def norm(name: str) -> Vector:
        return _of_streams(file, f"{prefix}ple_norm_{name}", count, dim)

    return HashedEmbedding(
        key=file.weight(f"{prefix}ple_key", width, dim),
        value=file.weight(f"{prefix}ple_value", dim, dim),
        key_norm=norm("key"), query_norm=norm("query"), conv_norm=norm("conv"),
        conv=file.required(f"{prefix}ple_conv1d.weight", width, taps),
        count=count, taps=taps, dilation=len(hashed.multipliers),
    )  # fmt: skip
