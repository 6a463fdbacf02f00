"""Hyperparameters from a file's metadata: what the forward pass cannot run is refused with a reason."""

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.model.config import ModelConfig
from tests import generated_model

SHAPE = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return generated_model.write(tmp_path_factory.mktemp("model") / "model.gguf", **SHAPE)


def config_with(path, **metadata) -> ModelConfig:
    with GGUF(path) as file:
        changes = {key.replace("__", "."): value for key, value in metadata.items()}
        file.metadata = {**file.metadata, **changes}
        return ModelConfig.from_gguf(file)


def test_sizes(path):
    config = config_with(path)
    assert (config.query_size, config.kv_size) == (64, 32)
    assert config.kv_bytes_per_token == 2 * 2 * 32  # float16 keys and values of one layer
    cos, sin = config.rope_tables(3)
    assert cos.shape == sin.shape == (3, 8) and cos.dtype == np.float32
    np.testing.assert_allclose(np.arctan2(sin[2], cos[2]), (2 * config.rope_frequencies), rtol=1e-6)


def test_linear_scaling_divides_the_frequencies(path):
    scaled = config_with(path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    np.testing.assert_array_equal(scaled.rope_frequencies, config_with(path).rope_frequencies / 4)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "mamba"}, "of the architecture mamba, which orin-chat does not run"),
        ({"llama__block_count": 0}, "is damaged: llama.block_count is 0"),
        ({"llama__embedding_length": 1 << 31}, "is damaged: llama.embedding_length is 2147483648"),
        ({"llama__attention__key_length": 15, "llama__attention__value_length": 15}, "heads of a shape"),
        ({"llama__attention__value_length": 8}, "heads of a shape"),
        ({"llama__attention__head_count_kv": 3}, "heads of a shape"),
        ({"llama__rope__dimension_count": 8}, "heads that are partly rotated"),
        ({"llama__rope__scaling__type": "yarn"}, "RoPE scaling yarn"),
        ({"llama__rope__freq_base": -1.0}, "RoPE frequencies"),
        ({"llama__rope__freq_base": float("inf")}, "RoPE frequencies"),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 0.0},
            "RoPE frequencies",
        ),
    ],
)
def test_what_cannot_run_is_refused(path, metadata, message):
    with pytest.raises(ModelFileError, match=message) as error:
        config_with(path, **metadata)
    assert str(error.value).startswith("model.gguf ") and error.value.hint


def test_a_vocabulary_is_no_model(path):
    with GGUF(path) as file:
        file.tensors = {}
        with pytest.raises(ModelFileError, match="has no weights"):
            ModelConfig.from_gguf(file)
