"""The description of a model: data from which everything else about it follows.

    x = embedding;  for each sublayer:  x += post_norm(operator(norm(x)));  logits = head(output_norm(x))

`engine.description.sublayers` has what a sublayer's `operator` may be.
`engine.description.architectures` reads it from a file, and `engine.targets` makes the kernels of each device from it.
What is loaded, with which shapes, what a token reads and how large the cache is are derived here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.description.attention import Attention
from engine.description.feed_forward import Experts
from engine.description.recurrent import Recurrent
from engine.description.sublayers import Operator, Vector, Weight
from engine.formats.ggml_types import TYPES
from engine.formats.kv_format import KVFormat


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of heads with `pairs` pairs. `frequencies`: radians per position of the first pairs;
    the others do not turn. `long_frequencies`, if any, take their place in contexts of more than `short_context`
    tokens. The rotated elements are multiplied by `magnitude`.

    With `sections`, a token has some positions (`engine.runtime.pictures`), which are one in texts: pair j turns by
    the second if j mod 3 is 1 and j < 3 * sections[1], by the third if j mod 3 is 2 and j < 3 * sections[2], else by
    the first. If they are `blocks`, the first pairs turn by the first position, so many as its section says, the next
    ones by the second, by the third, and by a fourth if there are four sections, and what is left by the first.

    With `later`, a token is turned as one that comes so many positions later."""

    pairs: int
    frequencies: tuple[float, ...] = ()
    long_frequencies: tuple[float, ...] = ()
    short_context: int = 0
    magnitude: float = 1.0
    sections: tuple[int, ...] = ()
    blocks: bool = False
    later: int = 0

    @property
    def turned_by(self) -> NDArray[np.intp]:
        """Which of the positions turns each pair: (pairs,)."""
        j = np.arange(self.pairs)
        if self.blocks:
            return np.searchsorted(np.cumsum(self.sections), j, side="right") % len(self.sections)
        second, third = ((j % 3 == i) & (j < 3 * self.sections[i]) for i in (1, 2))
        return np.where(second, 1, np.where(third, 2, 0))

    def tables(self, length: int, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of the rotations at positions 0 to `length` - 1, in a session that was opened with a
        context of `context` tokens: float32 (length, pairs) each."""
        is_long = self.long_frequencies and context > self.short_context
        frequencies = np.zeros(self.pairs)
        frequencies[: len(self.frequencies)] = self.long_frequencies if is_long else self.frequencies
        angles = np.arange(self.later, self.later + length)[:, None] * frequencies
        size = np.where(np.arange(self.pairs) < len(self.frequencies), self.magnitude, 1.0)
        return (np.cos(angles) * size).astype(np.float32), (np.sin(angles) * size).astype(np.float32)


@dataclass(frozen=True)
class Temperature:
    """Queries grow with their position: by 1 + `slope` * ln(floor((position + `later`) / length) + 1)."""

    slope: float
    length: int
    later: int = 0

    def factors(self, length: int) -> NDArray[np.float32]:
        """The factors at positions 0 to `length` - 1, float32 (length,)."""
        periods = np.arange(self.later, self.later + length) // self.length
        return (1 + self.slope * np.log(periods + 1)).astype(np.float32)


@dataclass(frozen=True)
class Sublayer:
    """What the residual stream passes through: x += post_norm(operator(norm(x))). A norm that is None is left out.
    `scale`: with a post norm, a number by which x is multiplied at last, and so is a `factor` after sublayers side by
    side. `norm_bias` is added to what the norm gives. A sublayer `beside` the one before it reads x as that did, and
    both results, each after its own post norm, are added to x at once. If its norm `replaces` x, the result is added to
    what the norm gives: x = norm(x) + operator(norm(x)) (BERT). With a `picture_part`, this part of the embeddings of
    pictures is added to their tokens, too; part 0 is what the stream begins with (`VisionSpec.projectors`). With
    `renewed`, x is first replaced by its norm of these weights (`engine.description.loops`)."""

    norm: Vector | None
    operator: Operator
    post_norm: Vector | None
    scale: Vector | None = None
    norm_bias: Vector | None = None
    beside: bool = False
    replaces: bool = False
    factor: float = 1.0
    picture_part: int = 0
    renewed: Vector | None = None

    @property
    def vectors(self) -> tuple[Vector, ...]:
        vectors = self.renewed, self.norm, self.norm_bias, self.post_norm, self.scale
        own = tuple(vector for vector in vectors if vector)
        return *own, *self.operator.vectors


@dataclass(frozen=True)
class LayerEmbeddings:
    """What a token gives each of `layers` layers, `size` elements each (`LayerEmbedding`). Of a token and its scaled
    embedding x: e = (norm(`projection` x * dim ** -0.5) + `table`[token] * sqrt(size)) / sqrt(2). The norm is over the
    elements of a layer."""

    table: Weight
    """(vocab, layers * size)"""
    projection: Weight
    """(layers * size, dim)"""
    norm: Vector
    size: int
    layers: int


@dataclass(frozen=True)
class HashedRows:
    """Which rows of a `table` (rows, size) a token gets, by hashes of it and the tokens before it. Of the last n
    tokens, the token itself first, the hash is the exclusive or of all token * multiplier, as unsigned numbers of 64
    bits; n goes from 2 to as many `multipliers` as there are. Each n has `each` heads, and the row of a head is the
    hash mod its size, after its offset. From the first `end` token back, and before a text, all earlier tokens count as
    `end`; those of pictures (negative ids) as `picture`."""

    table: Weight
    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    each: int
    end: int
    picture: int

    @property
    def kept(self) -> int:
        """How many tokens before its own a token's rows depend on."""
        return len(self.multipliers) - 1

    def rows(self, before: Sequence[int], tokens: Sequence[int]) -> NDArray[np.int64]:
        """The rows of tokens that follow those `before`, of which the last ones count: int64 (tokens, heads)."""
        start = [*[self.end] * self.kept, *before][-self.kept :]
        text = np.array([*start, *tokens], np.int64)
        text[text < 0] = self.picture
        n = len(tokens)
        current = text[self.kept :]
        mixed = current.astype(np.uint64) * np.uint64(self.multipliers[0])
        has_ended, rows = np.zeros(n, bool), []
        for back in range(1, self.kept + 1):
            earlier = text[self.kept - back :][:n]
            has_ended |= earlier == self.end
            counted = np.where(has_ended, self.end, earlier).astype(np.uint64)
            mixed = mixed ^ (counted * np.uint64(self.multipliers[back]))
            heads = range((back - 1) * self.each, back * self.each)
            rows += [mixed % np.uint64(self.sizes[i]) + np.uint64(self.offsets[i]) for i in heads]
        return np.stack(rows, axis=1).astype(np.int64)


@dataclass(frozen=True)
class Projection:
    """What is made of a pooled vector x: `weight` x + `bias`, and of that the tanh if it is `tanh`."""

    weight: Weight
    bias: Vector | None = None
    tanh: bool = False


@dataclass(frozen=True)
class Join:
    """What the residual stream of a draft head begins with, of the embedding e of a token and what the model's head
    reads of the token before it, h: `of_embedding` norm(e) + `of_hidden` norm(h), (dim, dim) each. `trunk_norm` is the
    norm that makes h of the model's residual stream. What the draft head's own output norm gives is the h of its next
    draft."""

    of_embedding: Weight
    of_hidden: Weight
    embedding_norm: Vector
    hidden_norm: Vector
    trunk_norm: Vector


@dataclass(frozen=True)
class Narrowing:
    """As `Join`, of an assistant (`engine.description.assistant`), which is narrower than the model, without norms:
    `of_embedding` e + `of_hidden` h, (dim, width) each. `back` y is the h of its next draft, (width, dim), of what its
    own output norm gives, y."""

    of_embedding: Weight
    of_hidden: Weight
    back: Weight

    @property
    def matrices(self) -> tuple[Weight, ...]:
        return self.of_embedding, self.of_hidden, self.back


@dataclass(frozen=True)
class ModelSpec:
    """A model. Sizes are in elements: `dim` of the residual stream, `vocab` of the vocabulary. `eps` is that of the RMS
    norms, and `stream_eps` that of norms of the residual stream. Logits are softcap * tanh(logits / softcap) if there
    is one.

    LayerNorm(x) is the RMS norm of x minus its mean. Where norms are so, the stream is `centred`: the mean of its
    elements is taken off the embedding and off what sublayers add, or only when it is normed."""

    architecture: str
    name: str
    dim: int
    vocab: int
    trained_context: int
    embedding: Weight
    embedding_scale: float
    sublayers: tuple[Sublayer, ...]
    output_norm: Vector
    head: Weight
    ropes: tuple[Rope, ...]
    eps: float
    stream_eps: float
    softcap: float = 0.0
    post_eps: float = 0.0
    """The epsilon of post norms, `eps` if it is 0."""
    temperature: Temperature | None = None
    layer_embeddings: LayerEmbeddings | None = None
    hashed: HashedRows | None = None
    centred: bool = False
    ends_normed: bool = False
    """Whether the head reads what the last sublayer gives, without the `output_norm`."""
    output_norm_bias: Vector | None = None
    head_bias: Vector | None = None
    reads_all_to: int = 0
    """In contexts of more tokens its attention would read chosen tokens alone, which is not described:
    `trained_context` is at most this. 0: there is no such number."""
    draft_layers: int = 0
    """Layers of the file that guess further tokens (multi-token prediction). They are not run without a
    `draft_head`."""
    draft_head: ModelSpec | None = None
    """What these compute: a model of one layer, with a `join`, whose embedding or head may be the model's own."""
    join: Join | None = None
    """Of a draft head."""
    narrowing: Narrowing | None = None
    """Of an assistant, whose `embedding` is the model's."""
    encoders: tuple[str, ...] = ()
    """What the file has besides, "vision" or "audio", which is not run."""
    positions: Weight | None = None
    """What is added to a token's embedding by its position: (trained context, dim)."""
    embedding_norm: Vector | None = None
    """The norm of embeddings that the stream begins with,"""
    embedding_norm_bias: Vector | None = None
    """and its bias."""
    token_type: Weight | None = None
    """What is added to the embeddings of all tokens: (1, dim)."""
    projections: tuple[Projection, ...] = ()
    """What becomes of a text's embedding, one after the other; the host computes them."""
    classes: tuple[Projection, ...] = ()
    """The same of a model that ranks documents: the last one gives the classes."""
    picture_scale: float = 1.0
    """By which the embeddings of pictures are multiplied."""

    @property
    def not_run(self) -> str:
        """Which parts of the file are left out, in words; "" if none are."""
        drafts = "a draft layer" if self.draft_layers == 1 else f"{self.draft_layers} draft layers"
        left_out = self.draft_layers and not self.draft_head
        parts = [f"{drafts} (multi-token prediction)"] if left_out else []
        return " and ".join([*parts, *(f"the {encoder} encoder" for encoder in self.encoders)])

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the output head too."""
        return self.head == self.embedding

    @cached_property  # each layer's cache asks
    def is_float32(self) -> bool:
        """Whether all matrices are float32."""
        return all(TYPES[weight.type].name == "F32" for weight in self._weights())

    @cached_property
    def operators(self) -> list[Operator]:
        """What all sublayers compute, and also the layers that some consist of."""
        found, waiting = [], [sublayer.operator for sublayer in reversed(self.sublayers)]
        while waiting:
            found.append(operator := waiting.pop())
            waiting += reversed(operator.parts)
        return found

    @property
    def attention(self) -> list[Attention]:
        return [operator for operator in self.operators if isinstance(operator, Attention)]

    @property
    def picture_parts(self) -> int:
        """The parts of a picture's embeddings, of `dim` elements each."""
        return 1 + max(sublayer.picture_part for sublayer in self.sublayers)

    @property
    def picture_width(self) -> int:
        """The elements of the embeddings of pictures, all their parts."""
        return self.picture_parts * self.dim

    @property
    def added_tables(self) -> tuple[Weight, ...]:
        """What is added to the embeddings of tokens."""
        return tuple(table for table in (self.positions, self.token_type) if table)

    @property
    def host_tables(self) -> tuple[Weight, ...]:
        """The tables of which a step reads a few rows for each token, so they may stay in the file."""
        tables = (self.layer_embeddings and self.layer_embeddings.table, self.hashed and self.hashed.table)
        return tuple(table for table in tables if table)

    @property
    def both_ways(self) -> bool:
        """Whether tokens attend to all of a text, so that the model makes embeddings of texts and answers nothing."""
        return any(attend.both_ways for attend in self.attention)

    @property
    def caching(self) -> list[Attention]:
        """The attention that has a KV cache of its own."""
        return [a for a in self.attention if a.cache_of is None]

    @property
    def recurrent(self) -> list[Recurrent]:
        return [operator for operator in self.operators if isinstance(operator, Recurrent)]

    @property
    def last_keeping(self) -> int:
        """The number of the last sublayer that keeps something of each token: keys and values, or a state. The tokens
        of a prompt need nothing after it."""
        return max(i for i, sublayer in enumerate(self.sublayers) if sublayer.operator.is_keeping)

    @property
    def experts(self) -> list[Experts]:
        return [operator for operator in self.operators if isinstance(operator, Experts)]

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices in the file, a tied head once."""
        return sum(weight.n_bytes for weight in self.weights())

    def weights(self) -> Iterator[Weight]:
        """All matrices, those that are shared once, as a tied head is."""
        yield from dict.fromkeys(self._weights())

    def _weights(self) -> Iterator[Weight]:
        yield self.embedding
        yield self.head
        yield from self.added_tables
        yield from self.host_tables
        if self.layer_embeddings:
            yield self.layer_embeddings.projection
        if self.join:
            yield self.join.of_embedding
            yield self.join.of_hidden
        if self.narrowing:
            yield from self.narrowing.matrices
        for sublayer in self.sublayers:
            yield from sublayer.operator.weights

    def vectors(self) -> Iterator[Vector]:
        """All vectors, those that sublayers share once."""
        yield from dict.fromkeys(self._vectors())

    @property
    def blocks(self) -> Iterator[tuple[Sublayer, bool]]:
        """The sublayers, each with whether one beside it follows, so that its result is added later."""
        following = (*self.sublayers[1:], None)
        for sublayer, other in zip(self.sublayers, following, strict=True):
            yield sublayer, bool(other and other.beside)

    def _vectors(self) -> Iterator[Vector]:
        if self.layer_embeddings:
            yield self.layer_embeddings.norm
        if self.join:
            yield self.join.embedding_norm
            yield self.join.hidden_norm
            yield self.join.trunk_norm
        for sublayer in self.sublayers:
            yield from sublayer.vectors
        yield self.output_norm
        others = self.output_norm_bias, self.head_bias, self.embedding_norm, self.embedding_norm_bias
        yield from (vector for vector in others if vector)

    @property
    def vector_bytes(self) -> int:
        """Bytes of all vectors, as float32."""
        return sum(4 * vector.size for vector in self.vectors())

    # --- figures ---------------------------------------------------------------------------------------

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads: all, those of layers that run several times as often, but of
        experts only the chosen ones, and one row of the embeddings, unless they are the head as well."""
        of_layers = [weight for sublayer in self.sublayers for weight in sublayer.operator.weights]
        again = sum(w.n_bytes for w in of_layers) - sum(w.n_bytes for w in dict.fromkeys(of_layers))
        n_bytes = self.matrix_bytes + self.vector_bytes + again
        for operator in self.experts:
            for weight in operator.matrices:
                n_bytes -= weight.n_bytes * (operator.count - operator.used) // operator.count
        tables = [] if self.is_tied else [self.embedding]
        tables += self.added_tables
        if self.layer_embeddings:
            tables.append(self.layer_embeddings.table)
        if self.hashed:
            n_bytes -= self.hashed.table.n_bytes - len(self.hashed.sizes) * self.hashed.table.row_bytes
        return n_bytes - sum(table.n_bytes - table.row_bytes for table in tables)

    @property
    def idle_parameters(self) -> int:
        """How many of the weights are of experts that a token does not choose."""
        return sum(
            (operator.count - operator.used) * weight.rows * weight.cols
            for operator in self.experts
            for weight in operator.matrices
        )

    @property
    def window(self) -> int:
        """The sliding window of the layers that have one, in tokens; 0 if none has."""
        return max((attend.window for attend in self.attention), default=0)

    def kv_bytes_per_token(self, windowed: bool, kv: KVFormat = KVFormat.F16) -> int:
        """Bytes that a token takes in the KV cache of the layers with or without a window."""
        return sum(self.kv_bytes(a, kv) for a in self.caching if bool(a.window) == windowed)

    def kv_bytes(self, attend: Attention, kv: KVFormat, widens: bool = True) -> int:
        """Bytes of a token's keys and values in the cache of a layer, and of the key of its indexer. If it `widens`,
        those of models of float32 are float32 in place of float16; those of GPUs' kernels are not."""
        wider = 2 if widens and self.is_float32 and not kv.is_quantized else 1
        chosen_by = attend.indexer.size * (4 if self.is_float32 else 2) if attend.indexer else 0
        return 2 * kv.bytes(attend.kv_size) * wider + chosen_by

    def lacks_format_because(self, kv: KVFormat) -> str:
        """The sentence that tells a user why a KV cache cannot have the format `kv`. Empty if it can."""
        dims = {a.head_dim for a in self.attention if not kv.fits(a.head_dim)}
        blocks = f"A {kv.value} KV cache has blocks of {kv.block} elements"
        return f"{blocks}, and this model's heads have {dims.pop()}." if dims else ""

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of a sequence, however long it is: 0 if the model has none."""
        return sum(operator.state_bytes for operator in self.operators)
