"""Encoders on a device against the float32 reference beside the checkout, which agrees with llama.cpp's embeddings; and
models with pictures against llama.cpp's next tokens."""

from unittest import mock

import numpy as np
import pytest
from PIL import ImageOps

from engine.description import encoder_input
from engine.description.encoder_input import layout, resized
from engine.description.encoder_kinds import KINDS
from engine.description.stem_reader import STEMMED
from engine.description.vision_reader import read_vision
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.loading.weights import FileWeights
from engine.targets.cpu import picture_chunks
from engine.targets.cpu.kernels.memory import view
from engine.targets.cpu.kernels.thread_pool import ThreadPool
from engine.targets.cpu.picture_coverage import lacks, scratch_bytes
from engine.targets.cpu.runner import CPURunner
from engine.targets.cpu.vision import CPUEncoder
from engine.targets.graph import picture_parts
from engine.targets.graph.runner import GraphRunner
from engine.targets.graph.vision import GraphEncoder
from tests import generated_encoder, vision_oracles
from tests.reference_encoder import ReferenceEncoder
from tests.thorough import rarely, thorough
from tests.vision_oracles import MODELS, embedding_errors, embeddings, make, next_token_errors


@pytest.fixture(scope="module")
def reference(shared):
    with vision_oracles.reference(shared) as module:
        yield module


def open_encoder(path, target=GraphEncoder):
    file = GGUF(path)
    spec = read_vision(file)
    return target(FileWeights(file, list(spec.weights()), lambda _: None), spec)


def noise(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


OF_SHARED = "gemma3", "gemma4v", "pixtral"
OF_KINDS = [
    *((kind, CPUEncoder) if kind != "pixtral" else rarely(kind, CPUEncoder) for kind in OF_SHARED),
    rarely("qwen3vl_merger", CPUEncoder),  # with projectors of layers below
    *(rarely(kind, GraphEncoder) for kind in ("qwen3vl_merger", *OF_SHARED)),
]
OTHERS = [
    rarely("qwen2.5vl_merger", {}),
    rarely("youtuvl", {}),
    rarely("muse-glimmer", {}),
    ("exaone4_5", {}),
    rarely("idefics3", {"side": 36}),
    ("internvl", {}),
    rarely("qwen2vl_merger", {}),
    rarely("pixtral", {"merged": False}),
    *(rarely(kind, {}) for kind in ("lightonocr", "dots_ocr", "paddleocr", "kimivl", "lfm2")),
    rarely("glm4v", {}),
    rarely("adapter", {}),
    rarely("step3vl", {}),
    rarely("minicpmv4_6", {"side": 64}),
    ("hunyuanvl", {}),
    rarely("mlp", {"side": 150}),
    *(rarely(kind, {}) for kind in ("phi4", "janus_pro")),
    rarely("mlp", {"choices": (16, 32, 32, 32)}),
    ("resampler", {"out": 128}),
    ("gemma3nv", {"side": 256}),
    ("gemma4uv", {}),
    *(rarely(kind, {}) for kind in ("llama4", "kimik25", "nemotron_v2_vl")),
    *(rarely("mlp", how) for how in ({"features": (1, 3)}, {"normed": True})),
]


@pytest.mark.parametrize("kind, target", OF_KINDS)
def test_embeddings_are_the_references(kind, target, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(picture_parts, "SCORES", 1 << 12)  # so that attention goes in several parts
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


@pytest.mark.parametrize("kind, how", OTHERS)
@pytest.mark.parametrize("target", [CPUEncoder, rarely(GraphEncoder)])
def test_embeddings_are_those_of_the_description(kind, how, target, tmp_path, monkeypatch):
    """Of windows some are whole, and others at the edges. A tile has pixels that are of no patch. Pictures are in
    several chunks."""
    monkeypatch.setattr(picture_chunks, "MOST_TILES", 2)
    path = generated_encoder.write(tmp_path / "e.gguf", kind, patch=8, **how)
    wanted, encoder = ReferenceEncoder(path), open_encoder(path, target)
    rgbs = resized(encoder.spec, noise(150, 100))
    got, expected = embeddings(encoder, noise(150, 100)), wanted(*rgbs)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
    *_, last = encoder._encode(rgbs[0])
    assert last.done == last.total - 1  # the projector is left


@thorough
@pytest.mark.parametrize(
    "kind, how, size",
    [
        ("internvl", {"normed": True}, (16, 16)),
        ("deepseekocr", {"side": 128}, (190, 100)),
        ("deepseekocr2", {"side": 128}, (190, 100)),
        ("granite4_vision", {}, (60, 40)),
    ],
)
def test_what_no_kernels_compute_is_tensor_graphs(kind, how, size, tmp_path):
    """Norms over all heads, an encoder before the encoder, also of tiles, and queries of windows."""
    path = generated_encoder.write(tmp_path / "e.gguf", kind, **how)
    wanted, encoder = ReferenceEncoder(path), open_encoder(path)
    rgb = noise(*size)
    got, expected = embeddings(encoder, rgb), wanted(*resized(encoder.spec, rgb))
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@thorough
def test_tensor_graphs_are_compiled_before_there_is_a_picture(tmp_path):
    """Where all pictures have one size. A blank picture is left when there is a picture."""
    path = generated_encoder.write(tmp_path / "e.gguf", "gemma3nv")
    encoder, wanted = open_encoder(path), ReferenceEncoder(path)
    assert not encoder.preparations()  # on a CPU
    encoder._is_gpu = True
    for part in encoder.preparations():
        part()
    made = {size: set(steps) for size, steps in encoder._steps.items()}
    rgbs = resized(encoder.spec, noise(60, 40))
    work = encoder.encode(rgbs)
    _, another, *_ = encoder.preparations()
    while True:
        try:
            next(work)
            another()
        except StopIteration as end:
            assert np.abs(end.value - wanted(*rgbs)).max() < 1e-5 * np.abs(end.value).max()
            break
    assert {size: set(steps) for size, steps in encoder._steps.items()} == made


@pytest.mark.parametrize("other", [None, rarely(GraphEncoder)])
def test_a_layer_may_have_a_projector_of_its_own(other, tmp_path, reference):
    """Its results follow those of the last one, which are the reference's. All targets compute the same."""
    path = generated_encoder.write(tmp_path / "e.gguf", "qwen3vl_merger", deep=True)
    encoder = open_encoder(path, CPUEncoder)
    got, out = embeddings(encoder, noise(70, 20)), encoder.spec.out
    assert got.shape[1] == encoder.spec.width == 2 * out
    wanted = reference.Vision(str(path), "transformers")
    wanted.size = lambda width, height: encoder.spec.size(width, height)
    close = lambda got, expected: np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
    assert close(got[:, :out], wanted(noise(70, 20)))
    assert not other or close(got, embeddings(open_encoder(path, other), noise(70, 20)))


@thorough
@pytest.mark.parametrize("lanes", [8, 16])
def test_windows_on_a_cpu_in_float16(lanes, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.targets.cpu.picture_kernels.register_lanes", lambda: lanes)
    path = generated_encoder.write(tmp_path / "e.gguf", "qwen2.5vl_merger", half=True, patch=8)
    wanted, encoder = ReferenceEncoder(path), open_encoder(path, CPUEncoder)
    for rgb in (noise(*size) for size in ((250, 180), (40, 90), (250, 180))):
        got, expected = embeddings(encoder, rgb), wanted(*resized(encoder.spec, rgb))
        assert np.abs(got - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("lanes", [8, rarely(16)])
def test_a_cpu_multiplies_halves_as_integers_with_little_error(lanes, tmp_path, reference, monkeypatch):
    """Of a picture of several chunks, whose last one is not full."""
    monkeypatch.setattr("engine.targets.cpu.picture_kernels.register_lanes", lambda: lanes)
    path = generated_encoder.write(tmp_path / "e.gguf", "pixtral", half=True, side=160, dim=144, width=80)
    encoder, wanted = open_encoder(path, CPUEncoder), reference.Vision(str(path), "transformers")
    rgb = noise(150, 110)
    got, expected = embeddings(encoder, rgb), wanted(rgb)
    assert len(got) > 200
    assert np.abs(got - expected).max() < 2e-3 * np.abs(expected).max()
    again = embeddings(encoder, noise(24, 60, 1))
    assert np.isfinite(again).all()
    assert np.array_equal(embeddings(encoder, rgb), got), "nothing is left of a picture before"


@pytest.mark.parametrize("size, rows, columns", [((60, 40), 6, 8), ((10, 60), 8, 2), ((40, 40), 8, 8)])
def test_what_pads_a_picture_is_not_read(size, rows, columns, tmp_path):
    """Granite 4 Vision's whole picture has 16 tokens; then come those of four tiles or two, and ends of their rows."""
    with GGUF(generated_encoder.write(tmp_path / "e.gguf", "granite4_vision")) as file:
        spec = read_vision(file)
    _, (whole, page) = layout(spec, *size)
    assert (whole.tokens, page.tokens) == (16, rows * (columns + 1))
    kept = encoder_input.kept_embeddings(spec, *size)
    width = resized(spec, noise(*size))[1].shape[1] // (spec.patch * spec.merge)
    read = kept[16:].reshape(rows, columns + 1) - 16
    assert (kept[:16] == np.arange(16)).all() and (read[:, -1] % (width + 1) == width).all()
    assert (read[:, 0] % (width + 1) == (width - columns) // 2).all()


def test_a_picture_of_one_row_is_made_square_within_bounds(tmp_path, monkeypatch):
    """Else one of 65,535 pixels takes 13 GB."""
    monkeypatch.setattr(encoder_input, "_MOST_PADDED", 100)
    pad = mock.Mock(wraps=ImageOps.pad)
    monkeypatch.setattr(ImageOps, "pad", pad)
    with GGUF(generated_encoder.write(tmp_path / "m.gguf", "mlp")) as file:
        spec = read_vision(file)
    for shape in ((1, 3000, 3), (3000, 1, 3)):
        assert resized(spec, np.zeros(shape, np.uint8))
    assert all(max(call.args[1]) <= 100 for call in pad.call_args_list) and pad.call_count == 2


@thorough
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {*STEMMED, "granite4_vision"}))
def test_the_memory_that_a_cpu_needs_is_known(kind, tmp_path):
    encoder = open_encoder(generated_encoder.write(tmp_path / "e.gguf", kind), CPUEncoder)
    taken = sum(view(buffer).nbytes for buffer in encoder._kernels.buffers)
    assert taken <= scratch_bytes(encoder.spec) < 2.5 * taken


@thorough
@pytest.mark.parametrize("target", [CPUEncoder, GraphEncoder])
@pytest.mark.parametrize("quant, limit", [("F32", 1e-3), ("F16", 2e-2), ("Q8_0", 3e-2)])
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_those_of_llama_cpp(name, quant, limit, target, shared, tmp_path):
    """Gemma 4's form of GELU makes 9e-3, the exact GELU of mergers 3e-4."""
    make(shared, "make_vision", name, tmp_path / "e.gguf", "--quant", quant)
    errors = embedding_errors(shared, name, open_encoder(tmp_path / "e.gguf", target))
    assert max(errors.values()) < (max(limit, 1e-2) if "gemma4" in name else limit), errors
    assert len(errors) >= 5


@thorough
@pytest.mark.parametrize("target", [CPURunner, GraphRunner])
@pytest.mark.parametrize("name", MODELS)
def test_next_tokens_are_those_of_llama_cpp(name, target, shared, tmp_path):
    open = lambda weights, room: target(weights, 512, pictures=room)
    errors = next_token_errors(shared, name, tmp_path, open)
    assert errors and max(errors.values()) < 1e-4, errors


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
def test_changed_files_are_refused_or_read(kind, tmp_path, monkeypatch):
    """250 of each kind: an error in words, or embeddings of the promised shape. A pool has room for so many encoders,
    not for those of all kinds."""
    pool = ThreadPool(1)
    monkeypatch.setattr("engine.targets.cpu.picture_kernels.default_pool", lambda: pool)
    original = generated_encoder.write(tmp_path / "e.gguf", kind, half=True).read_bytes()
    rgb, refused = noise(40, 30), 0
    for seed in range(250):
        path = tmp_path / "changed.gguf"
        path.write_bytes(changed(original, np.random.default_rng(seed)))
        try:
            if lacks(read_vision(GGUF(path))):
                continue
            encoder = open_encoder(path, CPUEncoder)
        except ModelFileError:
            refused += 1
            continue
        spec, (_, parts) = encoder.spec, layout(encoder.spec, 40, 30)
        tokens = sum(part.tokens for part in parts)
        if tokens * spec.merge**2 < 20_000:
            with np.errstate(all="ignore"):
                assert embeddings(encoder, rgb).shape == (tokens, spec.out)
    assert 50 < refused < 250
