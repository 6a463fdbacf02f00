"""The encoder of pictures for a model is found beside it, and comes and goes with it."""

import pytest
from gguf import GGUFWriter

from engine.catalog import cache
from engine.catalog.downloads import download
from engine.catalog.encoders import encoder_beside, encoders_among
from engine.catalog.names import HubModel
from tests import generated_encoder


def model_file(path, architecture="gemma3", width=64):
    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_best_is_first():
    names = [
        "sub/mmproj-F16.gguf",
        "mmproj-F32.gguf",
        "mmproj-BF16.gguf",
        "a-Q4_0.gguf",
        "../mmproj-F16.gguf",
    ]
    assert encoders_among(names, "a-Q4_0.gguf") == [
        "mmproj-BF16.gguf",
        "mmproj-F32.gguf",
        "sub/mmproj-F16.gguf",
    ]
    assert encoders_among(["mmproj-a-F16.gguf", "mmproj-b-F32.gguf"], "b-Q4_0.gguf")[0] == "mmproj-b-F32.gguf"


def test_one_that_does_not_fit_is_not_taken(tmp_path):
    model = model_file(tmp_path / "gemma-Q4_0.gguf")
    generated_encoder.write(tmp_path / "mmproj-gemma-narrow.gguf", "gemma3", out=32)
    generated_encoder.write(tmp_path / "mmproj-gemma-other.gguf", "qwen3vl_merger")
    (tmp_path / "mmproj-gemma-cut.gguf").write_bytes(b"GGUF")
    assert encoder_beside(model) is None
    other = generated_encoder.write(tmp_path / "mmproj-some.gguf", "gemma3")
    assert encoder_beside(model) == other


def test_one_with_any_name_is_known_by_what_it_holds(tmp_path):
    model = model_file(tmp_path / "gemma-Q4_0.gguf")
    model_file(tmp_path / "clip-Q4_0.gguf")
    eyes = generated_encoder.write(tmp_path / "Its eyes.GGUF", "gemma3")
    assert encoder_beside(model) == eyes
    named = generated_encoder.write(tmp_path / "MMProj.gguf", "gemma3")
    assert encoder_beside(model) == named


@pytest.fixture
def seeing(fake_hub, tmp_path):
    """A hub with a model that sees."""
    fake_hub.architecture = "gemma3"
    for name in ("model-Q8_0.gguf", "model-F16.gguf"):
        fake_hub.files[name] = model_file(tmp_path / name).read_bytes()
    fake_hub.files["mmproj-F16.gguf"] = generated_encoder.write(tmp_path / "mmproj", "gemma3").read_bytes()
    return fake_hub


def test_it_comes_with_the_model_and_goes_with_the_last_one(seeing):
    told = []
    path = download(HubModel(seeing.repository, "Q8_0"), told.append)
    encoder = path.with_name("mmproj-F16.gguf")
    assert path.name == "model-Q8_0.gguf" and encoder_beside(path) == encoder
    assert told[-1].total_bytes == sum(len(seeing.files[file.name]) for file in (path, encoder))
    download(HubModel(seeing.repository, "F16"))
    one, other = cache.installed()
    cache.remove(one)
    assert encoder.exists()
    cache.remove(other)
    assert not cache.repository_folder(seeing.repository).exists()


def test_a_model_that_does_not_see_comes_alone(seeing):
    seeing.architecture = "olmo2"
    assert not download(HubModel(seeing.repository, "Q8_0")).with_name("mmproj-F16.gguf").exists()
