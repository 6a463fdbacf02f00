"""A drafter in a file of its own that reads a model's KV cache: Gemma 4's assistants.

Its layers have queries alone. Those with a window read the cache of the model's last layer that has one, the others
that of the last one without. All guesses after a token stand at its position, and see the tokens before it: its own
keys are not in the cache yet. Here a step stands at the last position that is, so a query is turned as one that comes a
token later, and a window is a token shorter.

Source of names and formulas: src/models/gemma4-assistant.cpp of llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from engine.description.architectures import ModelReader
from engine.description.attention import Attention
from engine.description.families import ARCHITECTURES
from engine.description.file_kind import ASSISTANT
from engine.description.spec import ModelSpec, Narrowing, Sublayer
from engine.errors import ModelFileError
from engine.formats.ggml_types import TYPES
from engine.formats.gguf import GGUF, damaged

_CENTROIDS = "masked_embd_"
"""How the names of tensors begin that choose a part of the vocabulary first. All of it is computed in place of that."""


def is_assistant(file: GGUF) -> bool:
    return file.get("general.architecture", str) == ASSISTANT


def read_assistant(file: GGUF, model: ModelSpec) -> ModelSpec:
    """An assistant of a model, whose attention has its `cache_of` among the model's. Raises ModelFileError if the file
    is damaged, or if it is no assistant of this model."""
    try:
        return _AssistantReader(file, model).assistant()
    except (ArithmeticError, ValueError):
        raise damaged(file.path, "its metadata has numbers that nothing can be computed with") from None


class _AssistantReader(ModelReader):
    """Reads one file for a model."""

    def __init__(self, file: GGUF, model: ModelSpec) -> None:
        super().__init__(file, ASSISTANT, ARCHITECTURES["gemma4"])
        self._model = model

    def assistant(self) -> ModelSpec:
        model, width = self._model, self._model.dim
        if (of := self.size("embedding_length_out")) != width:
            raise self._unlike(f"it reads {of:,} numbers of a token, and the model has {width:,}")
        narrowing = self._narrowing(width)
        spec = self.spec()
        return replace(
            spec,
            embedding=model.embedding,
            embedding_scale=model.embedding_scale,
            sublayers=tuple(map(self._of_model, spec.sublayers)),
            ropes=tuple(replace(rope, later=1) for rope in spec.ropes),
            softcap=0.0,
            narrowing=narrowing,
        )

    def _narrowing(self, width: int) -> Narrowing:
        joined = self.weight("nextn.pre_projection", self.dim, 2 * width)
        if width % TYPES[joined.type].block:  # a block has parts of both
            raise ModelFileError(
                f"{self.name} has a first projection of a shape that orin-chat does not run.",
                "Choose a file with another quantization.",
            )
        of_embedding, of_hidden = (
            replace(joined, cols=width, first_col=first, of_cols=2 * width) for first in (0, width)
        )
        return Narrowing(of_embedding, of_hidden, self.weight("nextn.post_projection", width, self.dim))

    def _of_model(self, sublayer: Sublayer) -> Sublayer:
        """A layer whose attention stands a token before its queries."""
        attend = sublayer.operator
        if not isinstance(attend, Attention):
            return sublayer
        assert attend.cache_of is not None
        read = self._model.attention[attend.cache_of]
        for what, own, models in (
            ("heads of keys", attend.kv_heads, read.kv_heads),
            ("elements in a head", attend.head_dim, read.head_dim),
            ("tokens in a window", attend.window, read.window),
        ):
            if own != models:
                raise self._unlike(f"it reads a KV cache with {own} {what}, and the model's has {models}")
        if attend.window == 1:
            raise damaged(self.file.path, "its window is a single token")
        return replace(sublayer, operator=replace(attend, window=max(0, attend.window - 1)))

    def _unlike(self, why: str) -> ModelFileError:
        return ModelFileError(
            f"{self.name} cannot guess for this model: {why}.",
            "Choose the drafter that was made for it: --draft NAME.",
        )

    # --- what is otherwise than in a model -------------------------------------------------------------------

    def last_layers(self, key: str) -> int:
        """All layers draft, and read the model's KV cache."""
        return 0

    def is_left_out(self, tensor: str) -> bool:
        return tensor.startswith(_CENTROIDS) or super().is_left_out(tensor)

    def sees_pictures(self, window: int) -> bool:
        return False

    def cache_of(self, i: int, window: int) -> int | None:
        """The last attention of the model that has a window too, or none, and a cache of its own."""
        found = [n for n, a in enumerate(self._model.attention) if a.cache_of is None]
        found = [n for n in found if bool(self._model.attention[n].window) == bool(window)]
        if not found:
            kind = "with" if window else "without"
            raise self._unlike(f"it reads the KV cache of a layer {kind} a window, and the model has none")
        return found[-1]
