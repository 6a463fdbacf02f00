import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.formats.quantization import FLOATS, QUANTIZED
from tests.generated_families import ARCHITECTURES
from tests.generated_model import write
from tests.reference import Reference
from tests.thorough import rarely, thorough

NEUTRAL = {  # the values of metadata that do nothing
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.original_context_length": 2048,
    "rope.scaling.attn_factor": 1.0,
    "rope.freq_base_swa": 10_000.0,
    "attention.temperature_scale": 0.0,
    "attention.sliding_window": 4096,
    "attention.sliding_window_pattern": 6,
    "attention.scale": 0.25,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "expert_used_count": 1,
}


WITH_ALL_PARTS = "phi3", "gemma4", "gemma4-moe", "gpt-oss", "qwen35moe"  # together


@pytest.mark.parametrize("architecture", [a if a in WITH_ALL_PARTS else rarely(a) for a in ARCHITECTURES])
def test_the_same_arguments_give_the_same_file(tmp_path, architecture):
    first, second, other = (
        write(tmp_path / f"{name}.gguf", architecture=architecture, seed=seed).read_bytes()
        for name, seed in (("first", 0), ("second", 0), ("other", 1))
    )
    assert first == second != other


@thorough
@pytest.mark.parametrize("quant", [Type(kind).name for kind in (*FLOATS, *QUANTIZED)])
def test_weights_of_every_type_have_the_spread_of_a_trained_model(tmp_path, quant):
    reader = gguf.GGUFReader(write(tmp_path / "model.gguf", quant=quant, dim=256, layers=1))
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight")
    weights = gguf.dequantize(tensor.data, tensor.tensor_type)
    assert tensor.tensor_type.name == quant
    assert weights.shape == (256, 512)
    assert abs(weights.std() * 512**0.5 - 1) < 0.02 and abs(weights.mean()) < 1e-3


def test_sizes_that_a_type_cannot_hold_are_refused(tmp_path):
    with pytest.raises(ValueError, match="256"):
        write(tmp_path / "model.gguf", quant="Q4_K", dim=64)


@thorough  # these models hardly ever change
@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        (name, key)
        for name, parts in ARCHITECTURES.items()
        for key, value in parts.keys.items()
        if key in NEUTRAL and not isinstance(value, list)
    ],
)
def test_all_that_an_architecture_has_counts(tmp_path, architecture, key):
    tokens = np.random.default_rng(0).integers(0, 256, 100).tolist()

    def logits(**keys):
        path = write(tmp_path / "m.gguf", architecture=architecture, quant="F32", layers=3, **keys)
        return Reference(path, context=128).logits(tokens)

    as_it_is, without = logits(), logits(keys={key: NEUTRAL[key]})
    assert np.abs(without - as_it_is).max() > 0.05 * as_it_is.std()
