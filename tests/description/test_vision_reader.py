"""Files of encoders: what is read of them, and what is refused."""

import gguf
import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.description.encoder_kinds import KINDS
from engine.description.picture_size import SizeRule, TileRule
from engine.description.vision import PatchAttention, PatchFeedForward
from engine.description.vision_reader import read_vision
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.targets.cpu.picture_coverage import lacks
from tests import generated_encoder, generated_model


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read(kind, tmp_path):
    spec = read_vision(GGUF(generated_encoder.write(tmp_path / "e.gguf", kind, out=128)))
    assert (spec.kind, spec.out, spec.merge) == (kind, 128, KINDS[kind])
    assert spec.width == 128 * (3 if kind == "granite4_vision" else 1)
    attention = [s.operator for s in spec.sublayers if isinstance(s.operator, PatchAttention)]
    windowed = {"gemma4uv": [], "gemma3nv": [], "minicpmv4_6": [False, True, False]}
    windowed["granite4_vision"] = [False, False]
    windowed |= {
        name: [True, False]
        for name in ("qwen2.5vl_merger", "qwen2.5o", "exaone4_5", "muse-glimmer", "youtuvl")
    }
    assert [a.windowed for a in attention] == windowed.get(kind, [False])
    assert bool(spec.reduction) == (kind == "minicpmv4_6")
    assert bool(spec.pixel_norm) == (kind == "gemma4uv")
    of_places = (
        "gemma3",
        "idefics3",
        "internvl",
        "lfm2",
        "mlp",
        "resampler",
        "phi4",
        "janus_pro",
        "nemotron_v2_vl",
        "hunyuanvl",
        "deepseekocr",
        "deepseekocr2",
        "minicpmv4_6",
        "granite4_vision",
        "adapter",
    )
    with_class = "internvl", "mlp", "llama4", "deepseekocr"
    assert bool(spec.stem) == (kind in ("deepseekocr", "deepseekocr2", "gemma3nv"))
    assert bool(spec.rotations) == (kind not in of_places and bool(attention))
    assert bool(spec.tiles) == (
        kind
        in (
            "idefics3",
            "internvl",
            "lfm2",
            "resampler",
            "llama4",
            "deepseekocr",
            "deepseekocr2",
            "minicpmv4_6",
            "granite4_vision",
            "step3vl",
        )
    )
    assert spec.summary_rows == {"nemotron_v2_vl": 3}.get(kind, int(kind in with_class))
    assert [a for a in attention if a.o.inputs] == (attention if kind == "gemma4v" else [])


def test_an_encoder_of_sounds_is_named(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "mmproj-sounds.gguf"), "clip")
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.audio.projector_type", "voxtral")
    for write in writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file:
        write()
    writer.close()
    with pytest.raises(ModelFileError, match=r"mmproj-sounds\.gguf is an encoder of sounds"):
        read_vision(GGUF(tmp_path / "mmproj-sounds.gguf"))


def test_a_projector_may_read_several_layers(tmp_path):
    """SigLIP's activation is not said by such files."""
    spec = read_vision(GGUF(generated_encoder.write(tmp_path / "e.gguf", "mlp", features=(1, 3))))
    (projector,) = spec.projectors
    assert (projector.earlier, projector.sublayers) == ((2,), 6)
    assert {s.operator.activation for s in spec.sublayers if isinstance(s.operator, PatchFeedForward)} == {
        "gelu"
    }
    path = generated_encoder.write(tmp_path / "e.gguf", "mlp", features=(3, 1))
    with pytest.raises(ModelFileError, match="feature_layer"):
        read_vision(GGUF(path))


def test_norms_over_all_heads_are_in_no_kernel(tmp_path):
    """Those of InternVL's encoder of 6 billion parameters, whose norms are RMS norms."""
    spec = read_vision(GGUF(generated_encoder.write(tmp_path / "e.gguf", "internvl", normed=True)))
    operator = spec.sublayers[0].operator
    assert isinstance(operator, PatchAttention) and operator.norms_all_heads
    assert operator.q_norm and not (operator.q_norm.centred or spec.sublayers[0].norm.centred)
    assert lacks(spec) == "a norm over all heads"


@pytest.mark.parametrize("version, kind", [(0, "resampler 2.5"), (2, "resampler 2.5"), (6, "resampler")])
def test_texts_around_pictures_follow_from_the_version_of_minicpm(version, kind, tmp_path):
    path = generated_encoder.write(tmp_path / "e.gguf", "resampler", version=version)
    assert read_vision(GGUF(path)).kind == kind


def test_what_is_no_encoder_is_refused(tmp_path):
    model = generated_model.write(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match="not an encoder of pictures"):
        read_vision(GGUF(model))
    with pytest.raises(ModelFileError, match="is an encoder of pictures"):
        read_spec(GGUF(generated_encoder.write(tmp_path / "e.gguf", "gemma3")))


@pytest.mark.parametrize(
    "key, value",
    [
        ("clip.vision.attention.head_count", 5),
        ("clip.vision.block_count", 2000),
        ("clip.vision.block_count", 2),
        ("clip.vision.patch_size", 1 << 20),
        ("clip.vision.image_size", 31),
        ("clip.vision.attention.layer_norm_epsilon", np.float32("nan")),
        ("clip.vision.image_std", 0.0),
    ],
)
def test_impossible_sizes_are_refused(key, value, tmp_path):
    path = generated_encoder.write(tmp_path / "e.gguf", "gemma3")
    reader = gguf.GGUFReader(path, "r+")
    field = reader.fields[key]
    field.parts[field.data[0]][0] = value
    reader.data.flush()
    with pytest.raises(ModelFileError):
        read_vision(GGUF(path))


@pytest.mark.parametrize(
    "kind, key, value, sentence",
    [
        ("minicpmv4_6", "projector.scale_factor", 3, "3 patches a side become a token"),
        ("minicpmv4_6", "wa_layer_indexes", 2, "wa_layer_indexes is no layer of 2"),
        ("gemma3nv", "image_size", 1 << 17, r"conv_stem.conv.weight would compute 115,\d+,\d+,\d+ numbers"),
        ("gemma3nv", "image_size", 1 << 12, "v.blk.2.2.attn would compute"),
        ("granite4_vision", "projector.window_side", 6, "8 patches a side are no windows of 6"),
    ],
)
def test_what_cannot_be_computed_is_named(kind, key, value, sentence, tmp_path):
    path = generated_encoder.write(tmp_path / "e.gguf", kind)
    reader = gguf.GGUFReader(path, "r+")
    field = reader.fields[f"clip.vision.{key}"]
    field.parts[field.data[0]][0] = value
    reader.data.flush()
    with pytest.raises(ModelFileError, match=sentence):
        read_vision(GGUF(path))


@pytest.mark.parametrize(
    "rule, size, wanted",
    [
        (SizeRule("square", 56, 896), (100, 900), (896, 896)),
        (SizeRule("area", 32, 4096 * 1024, 64 * 1024), (640, 480), (640, 480)),
        (SizeRule("area", 32, 4096 * 1024, 64 * 1024), (10, 10), (256, 256)),
        (SizeRule("area", 32, 4096 * 1024, 64 * 1024), (8000, 6000), (2336, 1760)),
        (SizeRule("tokens", 48, 280, longest=8160), (333, 150), (1152, 528)),
        (SizeRule("tokens", 48, 280, longest=8160), (1, 9000), (48, 8160)),
        (SizeRule("sides", 28, 1540), (3080, 1000), (1540, 504)),
        (SizeRule("mean", 14, 448), (100, 200), (322, 630)),
        (SizeRule("shape", 28, 4096), (100, 100), (112, 112)),
        (SizeRule("shape", 28, 4096), (640, 300), (644, 308)),
        (SizeRule("shape", 28, 4096), (9000, 9000), (1792, 1792)),
        (SizeRule("shape", 28, 4096), (9, 200000), (28, 114688)),
        (SizeRule("up", 32, 64), (100, 33), (128, 64)),
        (SizeRule("up", 32, 64), (300, 300), (256, 256)),
        (SizeRule("up", 32, 64), (9, 200000), (32, 2048)),
    ],
)
def test_sizes(rule, size, wanted):
    assert rule(*size) == wanted


LARGE = TileRule(512, "shape", least=2, most=10, area=2 * 256 * 32 * 32, align=32)
PAGES = TileRule(640, "shape", least=2, most=9, whole=640)
SLICES = TileRule(448, "mean", most=9, align=14)
CANVAS = TileRule(336, "canvas", most=16)
WINDOWS = TileRule(504, "windows", 3024, most=36, area=728)
CHOICES = TileRule(336, "choices", most=4, choices=((336, 672), (672, 336), (672, 672)))


@pytest.mark.parametrize(
    "rule, size, wanted",
    [
        (TileRule(512, "longest", 2048), (4000, 3000), (2048, 1536, 3, 4)),
        (TileRule(512, "longest", 2048), (100, 133), (2048, 2048, 4, 4)),
        (TileRule(512, "longest", 2048), (9000, 1), (2048, 512, 1, 4)),
        (TileRule(448, "shape", most=12), (4000, 3000), (1792, 1344, 3, 4)),
        (TileRule(448, "shape", most=12), (400, 400), None),
        (TileRule(448, "shape", most=12), (1000, 1000), (1344, 1344, 3, 3)),
        (TileRule(448, "shape", most=12), (1, 9000), (448, 5376, 12, 1)),
        (LARGE, (720, 720), None),
        (LARGE, (1000, 800), (1536, 1024, 2, 3)),
        (LARGE, (3000, 1000), (1536, 512, 1, 3)),
        (PAGES, (640, 500), None),
        (PAGES, (1000, 700), (1920, 1280, 2, 3)),
        (SLICES, (448, 448), None),
        (SLICES, (600, 300), None),
        (SLICES, (1000, 800), (1008, 812, 2, 2)),
        (SLICES, (2000, 700), (2128, 756, 2, 4)),
        (CANVAS, (100, 60), (336, 336, 1, 1)),
        (CANVAS, (640, 480), (672, 672, 2, 2)),
        (CANVAS, (1000, 300), (1008, 336, 1, 3)),
        (CANVAS, (9000, 3000), (2016, 672, 2, 6)),
        (WINDOWS, (728, 500), None),
        (WINDOWS, (700, 300), (1512, 504, 1, 3)),
        (WINDOWS, (1000, 1300), (1008, 1512, 3, 2)),
        (WINDOWS, (3024, 20), None),
        (WINDOWS, (60_000, 900), (18_144, 504, 1, 36)),
        (TileRule(504, "windows", 1 << 30, most=36, area=728), (30_000, 20_000), (3024, 2016, 4, 6)),
        (CHOICES, (300, 200), (336, 672, 2, 1)),
        (CHOICES, (1000, 900), (672, 672, 2, 2)),
    ],
)
def test_tiles(rule, size, wanted):
    cut = rule(*size)
    assert (cut and (*cut.sizes[-1], cut.rows, cut.columns)) == wanted
    assert cut is None or cut.rows * cut.columns < rule.most_tiles


@pytest.mark.parametrize(
    "rule", [SizeRule("area", 32, 4096 * 1024, 64 * 1024), SizeRule("mean", 14, 448), SizeRule("mean", 8, 20)]
)
def test_no_shape_makes_a_picture_larger_than_the_most(rule):
    shapes = [(1, 64_000_000), (64_000_000, 1), (8000, 8000), (1, 1), *((n, 1000) for n in range(3, 200))]
    for size in shapes:
        across, down = rule(*size)
        assert across * down <= rule.most_tokens * rule.align**2, size
