"""Reads a file's metadata and tensor names into the description of its model. Beside the table of families, no
other file knows an architecture.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized key-value pairs". What each architecture
does: its file in src/models of llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from engine.description.altup import has_streams, read_merge, read_streamed_layer
from engine.description.attention_reader import AttentionReader
from engine.description.begin import read_begin
from engine.description.checked_file import MOST
from engine.description.deepstack import has_picture_parts, with_picture_parts
from engine.description.draft_head import read_draft_head
from engine.description.families import ARCHITECTURES, Family
from engine.description.feed_forward import LayerEmbedding
from engine.description.feed_forward_reader import FeedForwardReader
from engine.description.file_kind import ASSISTANT, check_is_model, check_runs
from engine.description.hyper_connections import (
    has_connections,
    read_connected_layer,
    read_hashed_rows,
    read_last_mixing,
)
from engine.description.loops import looped
from engine.description.older_time_mixing import has_older_mixing, read_older_mix
from engine.description.recurrent_reader import RecurrentReader
from engine.description.spec import HashedRows, LayerEmbeddings, ModelSpec, Sublayer, Temperature
from engine.description.sublayers import Operator, Vector, Weight
from engine.description.text_encoder import (
    EMBEDDING_NORM,
    last_norm,
    read_classes,
    read_normed_after,
    read_projections,
)
from engine.description.time_mixing import (
    has_channel_mixing,
    has_time_mixing,
    read_mixing_layer,
    read_time_mix,
)
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, damaged, printable

_ENCODERS = {"v.": "vision", "a.": "audio", "s.": "vision", "model.vision_tower.": "vision"}
"""How the names of tensors of encoders begin: tools/mtmd/clip-impl.h of llama.cpp; the last two in files of Ollama,
SAM and Gemma 4's."""

_PROJECTOR = "mm."
"""And those of the layer between them and the model."""

_UNREAD = ".attn_rot_embd.weight", ".input_scale"
"""What nobody reads: frequencies of rotary embeddings in old files of llama, and what files of NVFP4 have for
activations of such small floats."""

_OF_PICTURES = re.compile(r"blk\.\d+\.vis_(attn_qkv|attn_output|gate|down|up)\.weight")
"""Matrices in place of others for the tokens of pictures (CogVLM), which get none here."""

_INDEXER = re.compile(r"blk\.\d+\.indexer\.")
"""How the names of tensors begin that choose tokens: not read where contexts end before that counts."""

_DRAFT = "mtp."
"""How the names of tensors of a draft layer begin in files of Ollama."""


def check_architecture(architecture: str, model: str) -> None:
    """Raises ModelFileError if the engine does not run this architecture; the message calls the model `model`."""
    check_runs(architecture, model)
    if architecture not in (*ARCHITECTURES, ASSISTANT):
        raise ModelFileError(
            f"{model} is of the architecture {printable(architecture)}, which orin-chat does not run.",
            "Choose another one: `orin-chat models` lists some that run, and docs/models.md all families.",
        )


def read_spec(file: GGUF) -> ModelSpec:
    """Raises ModelFileError for an architecture that the engine does not run, for a variant of one, and for damaged
    metadata."""
    check_is_model(file)
    architecture = file.get("general.architecture", str)
    name = printable(file.path.name)
    check_architecture(architecture, name)
    try:
        return ModelReader(file, architecture, ARCHITECTURES[architecture]).spec()
    except (ArithmeticError, ValueError):  # scales close to 0, whose inverse is no number
        raise damaged(file.path, "its metadata has numbers that nothing can be computed with") from None


class ModelReader(AttentionReader, RecurrentReader, FeedForwardReader):
    """Reads one file. All methods raise ModelFileError."""

    def __init__(self, file: GGUF, architecture: str, family: Family) -> None:
        super().__init__(file, architecture, family)
        self.hashed: HashedRows | None = None
        if "token_embd.weight" not in file.tensors:
            raise ModelFileError(
                f"{self.name} has no weights (there is no token_embd.weight).",
                "It may be a vocabulary or an adapter; choose a model file.",
            )

    # --- the model -------------------------------------------------------------------------------------

    def spec(self) -> ModelSpec:
        """The description of the model. Raises ValueError, too, for scales that nothing can be computed with."""
        family, vocab = self.family, self.file.tensors["token_embd.weight"].shape[0]
        embedding = self.weight("token_embd", vocab, self.dim)
        # The stream is kept divided by granite's multiplier of what layers add to it: only norms read it, and a norm of
        # x / c with eps / c**2 is that of x with eps.
        residual = self.factor("residual_scale", family.depth_scale / math.sqrt(self.layers) or 1.0)
        scale, picture_scale = self._scales(residual)
        is_centred, eps = self._norms()
        ends_normed, name = has_connections(self), self._last_norm()
        norm = Vector("", self.dim) if ends_normed else self.stream_norm(f"{name}.weight")
        logit_scale = self.factor("logit_scale", family.base_width / self.dim or 1.0)
        logit_factor = logit_scale if family.multiplied_logits else 1 / logit_scale
        self.hashed = read_hashed_rows(self, self.dim)
        # That of the embeddings, unless it is the last one, which LFM2 calls so.
        has_norm = self.has("blk.0.attn_norm.weight") and name != EMBEDDING_NORM
        embedding_norm = self.vector(f"{EMBEDDING_NORM}.weight", self.dim) if has_norm else None
        spec = ModelSpec(
            architecture=self.architecture,
            name=self.file.get("general.name", str, self.file.path.stem),
            dim=self.dim,
            vocab=vocab,
            trained_context=min(self.context, self.reads_all_to or self.context),
            reads_all_to=self.reads_all_to,
            embedding=embedding,
            embedding_scale=scale,
            picture_scale=picture_scale,
            sublayers=(
                *with_picture_parts(self, looped(self, map(self.layer, range(self.layers)), norm)),
                *((read_merge(self, self.dim),) if has_streams(self) else ()),
                *((read_last_mixing(self, self.dim),) if ends_normed else ()),
            ),
            output_norm=Vector(norm.tensor, norm.size, factor=logit_factor),
            output_norm_bias=self.vector(f"{name}.bias", self.dim),
            head_bias=self.vector("output.bias", vocab),
            centred=is_centred,
            head=self.weight("output", vocab, self.dim) if self.has("output.weight") else embedding,
            ropes=tuple(self.ropes),
            eps=eps,
            stream_eps=eps / residual**2,
            post_eps=family.post_eps,
            softcap=self.number("final_logit_softcapping", family.logit_cap),
            temperature=self.temperature(),
            layer_embeddings=self.layer_embeddings(vocab) if self.layer_embedding else None,
            hashed=self.hashed,
            ends_normed=ends_normed,
            draft_layers=self.draft_layers or int(self._has_any(_DRAFT)),
            encoders=tuple(dict.fromkeys(kind for begin, kind in _ENCODERS.items() if self._has_any(begin))),
            positions=self.table("position_embd", self.context),
            embedding_norm=Vector("", self.dim) if family.normed_embedding else embedding_norm,
            embedding_norm_bias=self.vector(f"{EMBEDDING_NORM}.bias", self.dim) if has_norm else None,
            token_type=self.table("token_types", 1),
            projections=read_projections(self, self.dim),
            classes=read_classes(self, self.dim),
        )
        if not (spec.attention or self.is_all_recurrent):
            raise damaged(self.file.path, "no layer has attention")
        if self.draft_layers == 1 and not (family.layer_norms or family.lone_sublayers or ends_normed):
            draft_head = read_draft_head(self, self.layers, self.layer, self.ropes, spec)
            spec = replace(spec, draft_head=draft_head)
        self._check_all_is_read()
        return spec

    def _scales(self, residual: float) -> tuple[float, float]:
        """By what the embeddings of tokens and of pictures are multiplied, for a stream that is kept divided by
        `residual`. Pictures are multiplied as texts are, but by Gemma, and where they have parts. Raises ValueError."""
        family = self.family
        unsaid = math.sqrt(self.dim) if family.scaled_embedding else family.embedding_scale
        scale = self.factor("embedding_scale", unsaid) / residual
        if not 1 / MOST <= abs(scale) <= MOST:
            raise ValueError(scale)
        if family.scaled_embedding:
            return scale, 1.0
        return scale, 1 / residual if has_picture_parts(self.file, self.architecture) else scale

    def _norms(self) -> tuple[bool, float]:
        """Whether norms take the mean off, and what they add to the mean square."""
        family, rms_eps = self.family, "attention.layer_norm_rms_epsilon"
        has_rms_norms = self.key(rms_eps) in self.file.metadata
        is_centred = family.layer_norms and not (family.averages_shared and has_rms_norms)
        eps = self.number(rms_eps, family.eps)
        return is_centred, self.number("attention.layer_norm_epsilon", eps) if is_centred else eps

    def _last_norm(self) -> str:
        """The name of the last norm, without the suffix."""
        name = "enc.output_norm" if self.has("enc.output_norm.weight") else "output_norm"  # NeoBERT's name
        name = last_norm(self.layers) if self.family.normed_after else name
        is_lfm2 = self.has(f"{EMBEDDING_NORM}.weight") and not self.has(f"{name}.weight")
        return EMBEDDING_NORM if is_lfm2 else name

    def _has_any(self, begin: str) -> bool:
        """Whether the name of a tensor begins so."""
        return any(name.startswith(begin) for name in self.file.tensors)

    def _check_all_is_read(self) -> None:
        self.used.update(filter(self.is_left_out, self.file.tensors))
        if unread := sorted(self.file.tensors.keys() - self.used):
            raise ModelFileError(
                f"{self.name} holds {printable(unread[0])}, which orin-chat does not know in a model of the "
                f"architecture {self.architecture}.",
                "It is of a variant that orin-chat does not run. Choose another model.",
            )

    def temperature(self) -> Temperature | None:
        tempered = self.family.tempered_full if self.has_windows else None
        unsaid, length, later = tempered or (0.0, self.original_context, 0)
        slope = self.number("attention.temperature_scale", unsaid)
        return Temperature(slope, self.size("attention.temperature_length", length), later) if slope else None

    def table(self, name: str, rows: int) -> Weight | None:
        """The first rows of a table of vectors that are added to embeddings, if there is one."""
        info = self.file.tensors.get(f"{name}.weight")
        return (
            self.weight(name, rows, self.dim, of=info.shape[0] if len(info.shape) == 2 else 1)
            if info
            else None
        )

    def is_left_out(self, tensor: str) -> bool:
        """Whether a tensor is of draft layers, which follow the others, of an encoder, or read by nobody."""
        layer = re.match(r"blk\.(\d{1,9})\.", tensor)
        is_draft = layer and self.layers <= int(layer[1]) < self.layers + self.draft_layers
        is_unread = bool(is_draft) or bool(self.reads_all_to and _INDEXER.match(tensor))
        is_unread = is_unread or bool(self.architecture == "cogvlm" and _OF_PICTURES.fullmatch(tensor))
        return is_unread or tensor.startswith((*_ENCODERS, _PROJECTOR, _DRAFT)) or tensor.endswith(_UNREAD)

    def layer_embeddings(self, vocab: int) -> LayerEmbeddings:
        size, layers = self.layer_embedding, self.layers
        return LayerEmbeddings(
            table=self.weight("per_layer_token_embd", vocab, layers * size),
            projection=self.weight("per_layer_model_proj", layers * size, self.dim),
            norm=self.required("per_layer_proj_norm.weight", size),
            size=size,
            layers=layers,
        )

    def layer(self, i: int) -> Iterator[Sublayer]:
        """Attention or a delta net, the feed-forward layer, and the embeddings of layer i. A file that has
        post_ffw_norm norms the results of the first two; in others post_attention_norm is another name of ffn_norm."""
        prefix = f"blk.{i}."
        if self.family.lone_sublayers:
            yield self.lone(i, prefix)
            return
        if has_streams(self):
            feed_forward = self.dense(prefix, self.size_of_layer("feed_forward_length", i))
            attend, dense = self.attend(i, prefix), replace(feed_forward, sparsity=self.sparsity(i))
            yield from read_streamed_layer(
                self, i, self.dim, attend, dense, self.layer_embedding_of(i, prefix)
            )
            return
        if has_channel_mixing(self, prefix):
            yield from read_mixing_layer(self, i, self.dim)
            return
        if has_connections(self):
            operators = self.mixing_of(i, prefix), self.feed_forward(i, prefix)
            yield from read_connected_layer(self, i, self.dim, operators, self.hashed)
            return
        if self.family.partial_layers:
            yield from self.partial_layer(i, prefix)
            return
        if self.family.normed_after:
            yield from read_normed_after(
                self, i, self.dim, lambda prefix: (self.attend(i, prefix), self.feed_forward(i, prefix))
            )
            return

        def norm(name: str) -> Vector | None:
            return self.vector(self.norm_named(prefix + name), self.dim)

        has_post_norms = self.has(self.norm_named(f"{prefix}post_ffw_norm"))
        is_beside = self.has(f"{prefix}pre_ffw_norm_2.weight")
        before = [norm("attn_norm"), None if is_beside else norm("ffn_norm")]
        after = [norm("post_attention_norm"), norm("post_ffw_norm")] if has_post_norms else [None, None]
        if not has_post_norms:
            is_renamed = not before[1] and self.has(f"{prefix}post_attention_norm.weight")
            names = "attn_norm", "post_attention_norm" if is_renamed else "ffn_norm"
            if self.family.layer_norms or self.family.one_norm or self.family.unweighted:
                yield from self.shared_norms(i, prefix)
                if self.family.adds_begin:
                    yield read_begin(self, prefix, self.dim)
                return
            before = [self.required(self.norm_named(prefix + name), self.dim) for name in names]
        operator = self.mixing_of(i, prefix)
        yield Sublayer(before[0], operator, after[0])
        if self.family.recurrent_beside:
            yield Sublayer(before[0], self.recurrent(prefix), after[0], beside=True)
        operator = self.beside(i, prefix) if is_beside else self.feed_forward(i, prefix)
        scale = self.vector(f"{prefix}layer_output_scale.weight", 1)
        last_norm = norm("post_norm") if self.layer_embedding else after[1]
        if scale and not last_norm:
            raise ModelFileError(
                f"{self.name} has scaled layers without a norm after them, which orin-chat does not run.",
                "Choose another model.",
            )
        if not self.layer_embedding:
            yield Sublayer(before[1], operator, last_norm, scale)
            return
        yield Sublayer(before[1], operator, after[1])
        yield Sublayer(None, self.layer_embedding_of(i, prefix), last_norm, scale)

    def layer_embedding_of(self, i: int, prefix: str) -> LayerEmbedding:
        """What layer i takes of the embeddings of layers."""
        gate = self.weight(f"{prefix}inp_gate", self.layer_embedding, self.dim)
        return LayerEmbedding(gate, self.weight(f"{prefix}proj", self.dim, self.layer_embedding), i)

    def lone(self, i: int, prefix: str) -> Sublayer:
        """The sublayer that layer i is. The width of a feed-forward layer is 0 where there is none."""
        norm = self.required(f"{prefix}attn_norm.weight", self.dim)
        if self.has(f"{prefix}ffn_down.weight") or self.has(f"{prefix}ffn_down_exps.weight"):
            return Sublayer(norm, self.feed_forward(i, prefix), None)
        return Sublayer(norm, self.mixing_of(i, prefix), None)

    def mixing_of(self, i: int, prefix: str) -> Operator:
        """What layer i mixes tokens with."""
        if has_older_mixing(self, prefix):
            return read_older_mix(self, i, self.dim)
        if has_time_mixing(self, prefix):
            return read_time_mix(self, i, self.dim)
        return self.recurrent(prefix) if self.is_recurrent(i) else self.attend(i, prefix)

    def shared_norms(self, i: int, prefix: str) -> Iterator[Sublayer]:
        """As `layer`, of a model with LayerNorms, or with one norm a layer. Without a norm of its own, the
        feed-forward layer is beside attention and shares that one's; if attention has a second one, that is
        attention's (Falcon 40B). The first layer may have a norm of the embeddings in place of its own (ModernBERT)."""
        names = ["attn_norm", "ffn_norm"]
        if self.has(f"{prefix}attn_output_norm.weight"):  # what files of DBRX call it
            names[1] = "attn_output_norm"
        is_beside = not (self.has(f"{prefix}{names[1]}.weight") or self.family.unweighted)
        if is_beside:
            names = ["attn_norm_2" if self.has(f"{prefix}attn_norm_2.weight") else "attn_norm", "attn_norm"]
        is_beside = is_beside or self.file.get(self.key("use_parallel_residual"), bool, False)
        names = [f"{prefix}{name}" for name in names]
        replaces = i == 0 and not self.has(f"{names[0]}.weight") and self.has(f"{EMBEDDING_NORM}.weight")
        if replaces:
            names[0] = EMBEDDING_NORM
        norms = [self.stream_norm(f"{name}.weight") for name in names]
        biases = [self.vector(f"{name}.bias", self.dim) for name in names]
        yield Sublayer(norms[0], self.attend(i, prefix), None, norm_bias=biases[0], replaces=replaces)
        yield Sublayer(norms[1], self.feed_forward(i, prefix), None, norm_bias=biases[1], beside=is_beside)

    def stream_norm(self, tensor: str) -> Vector:
        return Vector("", self.dim) if self.family.unweighted else self.required(tensor, self.dim)

    def partial_layer(self, i: int, prefix: str) -> Iterator[Sublayer]:
        """Attention and a feed-forward layer, or one of them, or none (Nemotron Super)."""
        for norm, read in ("attn_norm", self.attend), ("ffn_norm", self.feed_forward):
            if self.has(tensor := f"{prefix}{norm}.weight"):
                yield Sublayer(self.required(tensor, self.dim), read(i, prefix), None)
