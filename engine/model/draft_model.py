"""A draft model's file (`--draft`): whether it speaks the model's tokens, and the model on a device."""

from __future__ import annotations

from engine.description.architectures import read_spec
from engine.description.spec import ModelSpec
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, printable
from engine.formats.kv_format import KVFormat
from engine.formats.string_array import StringArray
from engine.formats.tokens.vocabulary import check_tokenizer
from engine.loading.weights import Weights
from engine.model.coverage import target_of
from engine.model.memory_need import MemoryNeed, check_fits, memory_need
from engine.model.open_runner import open_runner
from engine.protocol.events import EngineOptions
from engine.runtime.drafter import Drafter

_SIZES_DIFFER = 128
"""So many tokens more or less are padding: llama.cpp's common/speculative.cpp."""
_FIRST = 5  # before it are special tokens that may be called otherwise


class DraftModel:
    """A draft model for a model file."""

    def __init__(self, file: GGUF, options: EngineOptions, device: str, model: GGUF, vocab: int) -> None:
        """`vocab`: the rows of the model's head. Raises ModelFileError if the file is no draft model of this model."""
        self._file, self._options, self._vocab = file, options, vocab
        self._spec: ModelSpec = read_spec(self._file)
        self._target, self._kv = target_of(self._spec, device, options.kernels), KVFormat.parse(options.kv)
        check_alike(model, file)
        if self._spec.state_bytes:
            raise _cannot_guess(file, "it has recurrent states, out of which no guess can be taken again.")

    def need(self, context: int | None) -> MemoryNeed:
        """The memory that it needs beside the model (None: with the default context)."""
        length = None if context is None else self._length(context)
        return memory_need(self._spec, length, self._target, self._options.parallel, self._kv)

    def check_fits(self, context: int, free_bytes: int | None) -> None:
        """Raises BackendError if that is more than is free."""
        set_up = self._target, self._options.parallel, self._kv
        check_fits(self._spec, self._length(context), free_bytes, *set_up)

    def open(self, context: int) -> Drafter:
        """The model on tinygrad's device, for texts of so many tokens. Raises ModelFileError."""
        options, length = self._options, self._length(context)
        weights = Weights(self._file, self._spec, lambda _: None)
        how = options.kernels, options.keep_packed, options.parallel, self._kv
        return Drafter(open_runner(weights, length, *how), self._vocab, length)

    def _length(self, context: int) -> int:
        return min(context, self._spec.trained_context)


def check_alike(model: GGUF, draft: GGUF) -> None:
    """Raises ModelFileError if the tokens of a draft model are not those of a model."""
    check_tokenizer(draft)
    if why := unlike_because(model, draft):
        raise _cannot_guess(draft, why)


def _cannot_guess(draft: GGUF, why: str) -> ModelFileError:
    return ModelFileError(
        f"{printable(draft.path.name)} cannot guess for this model: {why}",
        "Choose a smaller model of the same family: --draft NAME.",
    )


def unlike_because(model: GGUF, draft: GGUF) -> str:
    """Why the tokens of a draft model are not those of a model, as the end of a sentence; "" if they are."""
    for key, what in (
        ("model", "tokenizer"),
        ("bos_token_id", "first token"),
        ("eos_token_id", "last token"),
    ):
        values = [
            file.get(f"tokenizer.ggml.{key}", str if key == "model" else int, None) for file in (model, draft)
        ]
        if None not in values and values[0] != values[1]:
            return f"its {what} is {printable(str(values[1]))}, not {printable(str(values[0]))}."
    ours, theirs = (file.get("tokenizer.ggml.tokens", StringArray).raws() for file in (model, draft))
    if abs(len(ours) - len(theirs)) > _SIZES_DIFFER:
        return f"it knows {len(theirs):,} tokens, not {len(ours):,}."
    n = min(len(ours), len(theirs))
    if ours[_FIRST:n] != theirs[_FIRST:n]:
        i = next(i for i in range(_FIRST, n) if ours[i] != theirs[i])
        texts = (printable(of[i].decode("utf-8", "replace")) for of in (theirs, ours))
        return "its token {:,} is {!r}, not {!r}.".format(i, *texts)
    return ""
