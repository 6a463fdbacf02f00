import gguf
import pytest

from tests.generated_model import write


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_same_arguments_give_the_same_file(tmp_path, architecture):
    first, second, other = (
        write(tmp_path / f"{name}.gguf", architecture=architecture, seed=seed).read_bytes()
        for name, seed in (("first", 0), ("second", 0), ("other", 1))
    )
    assert first == second != other


@pytest.mark.parametrize(
    "quant", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
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
