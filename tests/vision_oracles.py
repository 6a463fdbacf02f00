"""llama.cpp's embeddings of pictures and its next tokens after them, beside the checkout (`oracle/vision`)."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from engine.description.architectures import read_spec
from engine.description.attention import Attention
from engine.description.encoder_input import resized
from engine.description.encoder_kinds import FITTING
from engine.description.spec import ModelSpec
from engine.description.vision_reader import read_vision
from engine.formats.gguf import GGUF
from engine.formats.templates.prompt_pictures import PlacedPicture, SizedPicture
from engine.loading.weights import Weights
from engine.runtime.pictures import Encoding, PictureRoom, Pictures, picture_ids
from tests import oracles
from tests.makers import load_maker
from tests.reference_functions import log_softmax
from tests.targets.lone_sequence import LoneSequence

MODELS = ("tiny-qwen35", "tiny-gemma3", "tiny-gemma4", "tiny-gemma4-moe", "tiny-mistral3")


@contextlib.contextmanager
def reference(shared: Path) -> Iterator[ModuleType]:
    """The module `reference_vision`."""
    with mock.patch.object(sys, "path", [str(shared / "models"), *sys.path]):
        yield importlib.import_module("reference_vision")


def make(shared: Path, script: str, *arguments: object) -> None:
    """Runs a maker of files beside the checkout."""
    maker = load_maker(shared, script)
    with mock.patch.object(sys, "argv", [script, *map(str, arguments)]):
        maker.main()


def embeddings(encoder: Any, rgb: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Those of a picture, in the size that the encoder takes."""
    work = encoder.encode(resized(encoder.spec, rgb))
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: NDArray[np.float32] = end.value
            return result


def embedding_errors(shared: Path, name: str, encoder: Any) -> dict[str, float]:
    """By picture the largest difference of an embedding from llama.cpp's, over the largest number there. Pictures are
    stretched as transformers does it, which is how ours are."""
    answers, errors = np.load(shared / f"oracle/vision/{name}-0.npz"), {}
    with reference(shared) as module:
        for key in [key for key in answers.files if key.endswith("/stretch/first8")]:
            rgb = module.load(shared / "oracle/vision" / key.split("/")[0])
            got, wanted = embeddings(encoder, rgb)[:, :8], answers[key]
            errors[key.split("/")[0]] = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    return errors


def next_token_errors(
    shared: Path, name: str, folder: Path, open: Callable[[Weights, PictureRoom], Any], quant: str = "F32"
) -> dict[str, float]:
    """By picture the largest difference of a next token's log-probability from llama.cpp's, with its own embeddings.
    `open` makes a runner of at least 512 tokens."""
    path = folder / "m.gguf"
    oracles.make_model(shared, name, quant, path, oracles.VOCABULARY[name])
    make(shared, "make_vision", name, folder / "e.gguf")
    spec, answers = read_spec(GGUF(path)), np.load(shared / f"oracle/vision/{name}-0.npz")
    seeing = read_vision(GGUF(folder / "e.gguf"))
    assert seeing.kind in FITTING[spec.architecture]
    spec = both_ways(spec) if name == "tiny-gemma4" else spec
    whole = seeing.size.most_tokens if any(a.sees_pictures for a in spec.attention) else 0
    text = LoneSequence(open(Weights(GGUF(path), spec, lambda _: None), PictureRoom(whole)))
    errors: dict[str, float] = {}
    with reference(shared) as module:
        encoders = {"pad": module.Vision(folder / "e.gguf"), "stretch": module.Vision(folder / "e.gguf")}
        encoders["stretch"].like = "transformers"
        for key in [key.removesuffix("/norms") for key in answers.files if key.endswith("/norms")]:
            picture, entry = key.split("/")
            rgb = module.load(shared / "oracle/vision" / picture)
            rows, columns = encoders[entry].grid(rgb)
            made = encoders[entry](rgb).astype(np.float32)
            seen = SizedPicture((rgb,), rows, columns, picture_ids(key, len(made)), key)
            for end in ("", "_short"):
                before, after = answers["before"].tolist(), answers["after" + end].tolist()
                pictures = Pictures([PlacedPicture(len(before), seen)], whole)
                pictures.encodings[0] = Encoding(seen, iter(()), made)  # type: ignore[arg-type]
                tokens = [*before, *seen.ids, *after]
                text.prefill(tokens[:-1], 0, pictures)
                text.decode(tokens[-1], len(tokens) - 1, pictures)
                got = log_softmax(np.array(text.logits())[None])[0][answers[f"{key}/ids{end}"]]
                errors[key + end] = float(np.abs(got - answers[f"{key}/logprobs{end}"])[: oracles.TOP].max())
    return errors


def both_ways(spec: ModelSpec) -> ModelSpec:
    """llama.cpp lets the tokens of a picture see each other in all windows of Gemma 4."""

    def changed(sublayer: Any) -> Any:
        if not isinstance(sublayer.operator, Attention):
            return sublayer
        operator = replace(sublayer.operator, sees_pictures=sublayer.operator.window > 0)
        return replace(sublayer, operator=operator)

    return replace(spec, sublayers=tuple(map(changed, spec.sublayers)))
