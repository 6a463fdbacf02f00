"""Encoders on a device against the float32 reference beside the checkout, which agrees with llama.cpp's embeddings; and
models with pictures against llama.cpp's next tokens."""

import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.description.sublayers import Attention
from engine.description.vision_reader import FITTING, KINDS, read_vision
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.formats.prompt_pictures import PlacedPicture, SeenPicture
from engine.loading.weights import FileWeights, Weights
from engine.pictures import Grid, resized
from engine.runtime.pictures import Encoding, PictureRoom, Pictures, picture_ids
from engine.targets.cpu.runner import CPURunner
from engine.targets.cpu.vision import CPUEncoder
from engine.targets.graph import vision
from engine.targets.graph.runner import GraphRunner
from engine.targets.graph.vision import GraphEncoder
from tests import generated_encoder, oracles
from tests.reference import log_softmax
from tests.targets.lone_sequence import LoneSequence
from tests.thorough import rarely, thorough

MODELS = ("tiny-qwen35", "tiny-gemma3", "tiny-gemma4", "tiny-gemma4-moe", "tiny-mistral3")


@pytest.fixture(scope="module")
def reference(shared):
    """The module `reference_vision`."""
    sys.path.insert(0, str(shared / "models"))
    try:
        yield importlib.import_module("reference_vision")
    finally:
        sys.path.remove(str(shared / "models"))


def embeddings(encoder, rgb):
    work = encoder.encode(resized(encoder.spec, rgb))
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def open_encoder(path, target=GraphEncoder):
    file = GGUF(path)
    spec = read_vision(file)
    return target(FileWeights(file, list(spec.weights()), lambda _: None), spec)


def noise(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


OF_KINDS = [(kind, CPUEncoder) for kind in KINDS] + [rarely(kind, GraphEncoder) for kind in KINDS]


@pytest.mark.parametrize("kind, target", OF_KINDS)
def test_embeddings_are_the_references(kind, target, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "_SCORES", 1 << 12)  # so that attention goes in several parts
    path = generated_encoder.write(tmp_path / "e.gguf", kind)
    encoder, wanted = open_encoder(path, target), reference.Vision(str(path), "transformers")
    rgb = noise(70, 20)
    if kind == "qwen3vl_merger":  # the reference has the limits of patches of 16 pixels
        wanted.size = lambda width, height: encoder.spec.size(width, height)
    if kind == "gemma4v":  # and its files say nothing of colours
        wanted.fields = {k: v for k, v in wanted.fields.items() if "image_" not in k}
        wanted.get = lambda key, default=None, any_=False: (
            {"image_mean": [0.0] * 3, "image_std": [1.0] * 3} | {"patch_size": 4}
        ).get(key, default)
    got, expected = embeddings(encoder, rgb), wanted(rgb)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def make(shared, script, *arguments):
    """Runs a maker of files beside the checkout."""
    spec = importlib.util.spec_from_file_location(script, shared / "models" / f"{script}.py")
    maker = importlib.util.module_from_spec(spec)
    sys.modules[script] = maker  # its dataclasses look there
    spec.loader.exec_module(maker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        maker.main()


@thorough
@pytest.mark.parametrize("target", [CPUEncoder, GraphEncoder])
@pytest.mark.parametrize("quant, limit", [("F32", 1e-3), ("Q8_0", 3e-2)])
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_those_of_llama_cpp(name, quant, limit, target, shared, reference, tmp_path):
    """Stretched as transformers does it. Gemma 4's form of GELU makes 9e-3, the exact GELU of mergers 3e-4."""
    make(shared, "make_vision", name, tmp_path / "e.gguf", "--quant", quant)
    encoder, answers = (
        open_encoder(tmp_path / "e.gguf", target),
        np.load(shared / f"oracle/vision/{name}-0.npz"),
    )
    limit = max(limit, 1e-2) if "gemma4" in name else limit
    for key in [key for key in answers.files if key.endswith("/stretch/first8")]:
        rgb = reference.load(shared / "oracle/vision" / key.split("/")[0])
        got, wanted = embeddings(encoder, rgb)[:, :8], answers[key]
        assert np.abs(got - wanted).max() < limit * np.abs(wanted).max(), key


def both_ways(spec):
    """llama.cpp lets the tokens of a picture see each other in all windows of Gemma 4."""

    def changed(sublayer):
        if not isinstance(sublayer.operator, Attention):
            return sublayer
        operator = replace(sublayer.operator, sees_pictures=sublayer.operator.window > 0)
        return replace(sublayer, operator=operator)

    return replace(spec, sublayers=tuple(map(changed, spec.sublayers)))


@thorough
@pytest.mark.parametrize("target", [CPURunner, GraphRunner])
@pytest.mark.parametrize("name", MODELS)
def test_next_tokens_are_those_of_llama_cpp(name, target, shared, reference, tmp_path):
    path = tmp_path / "m.gguf"
    oracles.make_model(shared, name, "F32", path, oracles.VOCABULARY[name])
    make(shared, "make_vision", name, tmp_path / "e.gguf")
    spec, answers = read_spec(GGUF(path)), np.load(shared / f"oracle/vision/{name}-0.npz")
    seeing = read_vision(GGUF(tmp_path / "e.gguf"))
    assert FITTING[spec.architecture] == seeing.kind
    spec = both_ways(spec) if name == "tiny-gemma4" else spec
    whole = seeing.size.most_tokens if any(a.sees_pictures for a in spec.attention) else 0
    text = LoneSequence(target(Weights(GGUF(path), spec, lambda _: None), 512, pictures=PictureRoom(whole)))
    encoders = {
        "pad": reference.Vision(tmp_path / "e.gguf"),
        "stretch": reference.Vision(tmp_path / "e.gguf"),
    }
    encoders["stretch"].like = "transformers"
    for key in [key.removesuffix("/norms") for key in answers.files if key.endswith("/norms")]:
        picture, entry = key.split("/")
        rgb = reference.load(shared / "oracle/vision" / picture)
        rows, columns = encoders[entry].grid(rgb)
        made = encoders[entry](rgb).astype(np.float32)
        seen = SeenPicture(rgb, rows, columns, picture_ids(key, len(made)), key)
        for end in ("", "_short"):
            before, after = answers["before"].tolist(), answers["after" + end].tolist()
            pictures = Pictures([PlacedPicture(len(before), seen)], whole)
            pictures.encodings[0] = Encoding(seen, iter(()), made)
            tokens = [*before, *seen.ids, *after]
            text.prefill(tokens[:-1], 0, pictures)
            text.decode(tokens[-1], len(tokens) - 1, pictures)
            got = log_softmax(np.array(text.logits())[None])[0][answers[f"{key}/ids{end}"]]
            assert np.abs(got - answers[f"{key}/logprobs{end}"])[: oracles.TOP].max() < 1e-4, key


def changed(data, rng):
    """A file with some changes, most of them where its metadata are."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        how, at = int(rng.integers(0, 4)), int(rng.integers(0, min(len(data), 4500)))
        if how == 0:
            data[at] = int(rng.integers(0, 256))
        elif how == 1:
            number = int(rng.choice([0, 1, 2, 3, 255, 1 << 16, 1 << 31, (1 << 32) - 1]))
            data[at : at + 4] = number.to_bytes(4, "little")
        elif how == 2:
            data[at] ^= 1 << int(rng.integers(0, 8))
        else:
            rest = data[at + int(rng.integers(1, 9)) :] if rng.integers(0, 8) else b""
            data = data[:at] + rest
    return bytes(data)


@thorough
@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_refused_or_read(kind, tmp_path):
    """1,000 in all: an error in words, or embeddings of the promised shape."""
    original = generated_encoder.write(tmp_path / "e.gguf", kind, half=True).read_bytes()
    rgb, refused = noise(40, 30), 0
    for seed in range(250):
        path = tmp_path / "changed.gguf"
        path.write_bytes(changed(original, np.random.default_rng(seed)))
        try:
            encoder = open_encoder(path, CPUEncoder)
        except ModelFileError:
            refused += 1
            continue
        grid, spec = Grid.of(encoder.spec, 40, 30), encoder.spec
        if grid.tokens(spec) * spec.merge**2 < 20_000:
            with np.errstate(all="ignore"):
                assert embeddings(encoder, rgb).shape == (grid.tokens(spec), spec.out)
    assert 50 < refused < 250
