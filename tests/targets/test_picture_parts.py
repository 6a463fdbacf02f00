"""Models whose first layers add parts of a picture's embeddings to its tokens (deepstack)."""

import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.runtime.pictures import PictureRoom
from engine.targets.cpu.runner import CPURunner
from engine.targets.graph.runner import GraphRunner
from tests import generated_model
from tests.opened import opened
from tests.reference import Reference, divergence
from tests.seen_tokens import model_with_parts, seen_tokens
from tests.targets.lone_sequence import LoneSequence
from tests.thorough import rarely


@pytest.mark.parametrize("target", [CPURunner, rarely(GraphRunner)])
def test_parts_are_added_to_the_tokens_of_pictures(target, tmp_path):
    """Also in the prompt after one with pictures, which has none."""
    reference = Reference(path := model_with_parts(tmp_path / "m.gguf"))
    weights = opened(path)
    text = LoneSequence(target(weights, 64, pictures=PictureRoom(0)))
    got, wanted = [], []
    for tokens, pictures, embeddings in (seen_tokens(reference.spec, 3), seen_tokens(reference.spec, 0)):
        reference.pictures = embeddings
        text.prefill(tokens[:-1], 0, pictures)
        text.decode(tokens[-1], len(tokens) - 1, pictures)
        got.append(np.array(text.logits()))
        wanted.append(reference.logits(tokens)[-1])
    assert all(divergence(a, b) < 1e-6 for a, b in zip(wanted, got, strict=True))
    reference.pictures[:, reference.spec.dim :] = 0
    assert divergence(wanted[0], reference.logits(seen_tokens(reference.spec, 3)[0])[-1]) > 1e-4


@pytest.mark.parametrize("count", [4, 1 << 31])
def test_a_model_has_no_more_parts_than_layers(count, tmp_path):
    path = model_with_parts(tmp_path / "m.gguf", count)
    with pytest.raises(ModelFileError, match="n_deepstack_layers"):
        read_spec(GGUF(path))


def of_granite(path, mapping):
    keys = {"deepstack_mapping": mapping, "embedding_scale": 3.0, "residual_scale": 0.5}
    path = generated_model.write(path, architecture="granite", quant="F32", layers=3, keys=keys)
    return read_spec(GGUF(path))


def test_a_model_may_say_before_which_layers_parts_are_added(tmp_path):
    """Granite 4 Vision's, whose texts are multiplied, and pictures are not. Its stream is divided by its residuals'."""
    spec = of_granite(tmp_path / "m.gguf", [-1, 2, 1])
    assert [sublayer.picture_part for sublayer in spec.sublayers] == [0, 2, 0, 1, 0, 0]
    assert (spec.picture_scale, spec.embedding_scale, spec.picture_width) == (2.0, 6.0, 3 * spec.dim)
    for mapping in [-1, 2, -1], [-1, 1, -1, 2], [-1, 1 << 30, 1]:
        with pytest.raises(ModelFileError, match="deepstack_mapping"):
            of_granite(tmp_path / "m.gguf", mapping)
