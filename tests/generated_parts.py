"""What files of an architecture can have beyond llama's, for `generated_families`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

EPSILON = 1e-5
Keys = Mapping[str, int | float | str | Sequence[int]]


@dataclass(frozen=True)
class Parts:
    """What an architecture's files have beyond llama's. `architecture`: its name, if files of it differ. `norms`: those
    of queries and keys, over a "head", over "all", or of "heads" with weights of their own. `biases`: of "qkv", or of
    all matrices of a layer. `renamed`: ffn_norm is called post_attention_norm. `delta`: gated delta nets in the layers
    without attention, which has a gate; `fused_delta`: their beta and alpha are one matrix. `conv`, `mamba`, `scan` or
    `keyed`: every other layer is a short convolution, a Mamba 2 layer, a Mamba layer or a delta net with decays of
    keys. `head_scan`: heads of a Mamba layer have a step, a decay and a skip each. `shared`: a shared expert,
    `ungated`: without a gate. `every_expert`: of so many layers, the last has experts. `choice_bias`: of the choice of
    experts. `layer_norms`: with "biases" or without ("plain"). `feed_forward`: "ungated", or with "gated biases", and
    "beside" attention, without a norm of its own. `lone`: a layer is a Mamba 2 layer, a feed-forward layer or
    attention, by these letters in turns. `mamba_beside`: attention has a Mamba 2 layer beside it. `latent`: latent
    attention, with the matrices of keys and values "apart" or "together". `layers`: those after the second have no keys
    and values of their own, and a token gives each layer 32 numbers. `streams`: besides, there are four streams
    (AltUp), and a matrix of a low rank beside attention. `beside`: experts are beside a feed-forward layer, and full
    attention has keys as values. `scaled`: layers have a scale, and attention has none. `positions`: these are added to
    the embeddings. `first_norm`: one of the embeddings, in place of the first layer's, `embedding_norm`: one beside
    that. `partial`: layers have attention and a feed-forward layer (L), or one of these (A, F), in turns. `halved`:
    feed-forward layers are half as wide as the metadata say. `sub_norms`: before the last product of a sublayer.
    `gated`: attention has a gate, of "elements" or of "heads". `connections`: four streams that sublayers read the mean
    of, hashes of tokens, and indexers. `mixing`: of times, as in RWKV 7, or `older`, with LayerNorms of channels too.
    `begin`: layers add what the stream began with, norms have no weights, and queries have a number for each head.
    `normed_after`: norms come after the sums, as those of BERT, also one after the embeddings, to which the type of a
    token is added.
    `keys`: metadata, without the architecture; they are such that every part counts within 100 tokens."""

    architecture: str = ""
    biases: str = ""
    norms: str = ""
    norms_before: bool = True
    norms_after: bool = False
    fused: bool = False
    experts: int = 0
    sinks: bool = False
    renamed: bool = False
    delta: bool = False
    keyed: bool = False
    fused_delta: bool = False
    conv: bool = False
    mamba: bool = False
    scan: bool = False
    head_scan: bool = False
    layer_norms: str = ""
    feed_forward: str = ""
    lone: str = ""
    mamba_beside: bool = False
    shared: bool = False
    ungated: bool = False
    choice_bias: bool = False
    every_expert: int = 1
    latent: str = ""
    thinks: bool = False
    layers: bool = False
    streams: bool = False
    beside: bool = False
    scaled: bool = False
    positions: bool = False
    normed_after: bool = False
    first_norm: str = ""
    embedding_norm: bool = False
    partial: str = ""
    halved: bool = False
    gated: str = ""
    sub_norms: bool = False
    connections: bool = False
    mixing: bool = False
    older: bool = False
    begin: bool = False
    keys: Keys = field(default_factory=dict)

    def but(self, keys: Keys | None = None, **parts: Any) -> Parts:
        """These parts, with more `keys` and other `parts`."""
        return replace(self, keys={**self.keys, **(keys or {})}, **parts)
