"""Streams beside the residual one (AltUp, https://arxiv.org/abs/2301.13310), as data: what Gemma 3n's layers read and
write besides attention and feed-forward layers. The formulas are those of src/models/gemma3n.cpp of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.description.attention import Attention
from engine.description.checked_file import CheckedFile
from engine.description.feed_forward import Dense, LayerEmbedding
from engine.description.spec import Sublayer
from engine.description.sublayers import Operator, Roles, Vector, Weight


@dataclass(frozen=True)
class Modes(Operator):
    """What mixes `count` streams s, of which s_0 is the residual one: m = tanh(`router` norm(s_0)), of `count` numbers,
    and the products of `coefficients` with m. `router_norm` has the norm's weights over dim."""

    router: Weight
    router_norm: Vector
    coefficients: Vector
    words = "streams beside the residual one"

    @property
    def count(self) -> int:
        return self.router.rows

    @property
    def roles(self) -> Roles:
        return {"router": (self.router,)}


@dataclass(frozen=True)
class Prediction(Modes):
    """Begins a layer: s += M s, with the rows of M (count, count) one after the other in `coefficients` m. In the first
    layer the other streams begin as products of `begins` with s_0, (dim, dim) each, made as long as it is."""

    begins: tuple[Weight, ...] = ()

    @property
    def roles(self) -> Roles:
        return super().roles | {"embedding": self.begins}


@dataclass(frozen=True)
class Correction(Modes):
    """Ends a layer, whose prediction was p and whose result is x: s_i = p_i + (1 + c_i) (x - p_0), with c =
    `coefficients` m, and m of x. Then norm(`embedding` of s_0 * `scale`) is added to the other streams, with
    `embedding_norm`."""

    scale: Vector
    embedding: LayerEmbedding
    embedding_norm: Vector


@dataclass(frozen=True)
class Merge(Operator):
    """After all layers: the mean of s_0 and the products of `ends` with the other streams, made as long as s_0 is."""

    ends: tuple[Weight, ...]
    words = Modes.words

    @property
    def roles(self) -> Roles:
        return {"embedding": self.ends}


@dataclass(frozen=True)
class LowRank(Operator):
    """h + norm(`right` `left` h): a matrix of a low rank beside attention, of what that reads (Laurel)."""

    left: Weight
    right: Weight
    norm: Vector
    words = "low-rank layers"

    @property
    def roles(self) -> Roles:
        return {"FFN gate+up": (self.left,), "FFN down": (self.right,)}


def has_streams(file: CheckedFile) -> bool:
    return file.has("altup_proj.weight")


def _stream_count(file: CheckedFile) -> int:
    return file.file.tensors["altup_proj.weight"].shape[0] + 1


def read_streamed_layer(
    file: CheckedFile, i: int, dim: int, attend: Attention, feed_forward: Dense, embedding: LayerEmbedding
) -> Iterator[Sublayer]:
    """Layer i of a model with several streams. Raises ModelFileError."""
    prefix = f"blk.{i}."

    def norm(name: str) -> Vector:
        return file.required(f"{prefix}{name}.weight", dim)

    count = _stream_count(file)
    router = file.weight(f"{prefix}altup_router", count, dim)
    router_norm = replace(norm("altup_router_norm"), factor=1 / dim)

    def coefficients(name: str, rows: int) -> Vector:
        return file.required(f"{prefix}altup_{name}_coef.weight", rows, count)

    begins = _stacked(file, "altup_proj", dim, count) if i == 0 else ()
    yield Sublayer(None, Prediction(router, router_norm, coefficients("predict", count**2), begins), None)
    rank = (
        file.file.tensors[f"{prefix}laurel_l.weight"].shape[0] if file.has(f"{prefix}laurel_l.weight") else 1
    )
    laurel = LowRank(
        file.weight(f"{prefix}laurel_l", rank, dim),
        file.weight(f"{prefix}laurel_r", dim, rank),
        norm("laurel_post_norm"),
    )
    yield Sublayer(norm("attn_norm"), attend, norm("post_attention_norm"))
    yield Sublayer(norm("attn_norm"), laurel, None, beside=True, factor=0.5**0.5)
    yield Sublayer(norm("ffn_norm"), feed_forward, norm("post_ffw_norm"))
    correction = Correction(
        router, router_norm, coefficients("correct", count),
        scale=norm("altup_correct_scale"), embedding=embedding, embedding_norm=norm("post_norm"),
    )  # fmt: skip
    yield Sublayer(None, correction, None)


def read_merge(file: CheckedFile, dim: int) -> Sublayer:
    """What follows the layers of such a model. Raises ModelFileError."""
    count = _stream_count(file)
    return Sublayer(None, Merge(_stacked(file, "altup_unembd_proj", dim, count)), None)


def _stacked(file: CheckedFile, tensor: str, dim: int, count: int) -> tuple[Weight, ...]:
    """The matrices (dim, dim) of all streams but the first, which are one tensor. Raises ModelFileError."""
    others = count - 1
    whole = file.weight(tensor, dim, dim, experts=others)
    return tuple(replace(whole, experts=1, first=i * dim) for i in range(others))
