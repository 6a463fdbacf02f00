"""LoRA adapters: the weights that a model has with them, beside those that numpy makes."""

import math

import gguf
import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.loading.adapters import Adapter, adapted, parse_adapters
from engine.loading.weights import Weights
from tests import generated_model
from tests.reference_weights import read_tensors

ALPHA, RANK = 8.0, 2
GATE = "blk.0.ffn_gate_exps.weight"
OF_ONE_EXPERT = {"a": (1, RANK, 64), "b": (8, 64, RANK)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    types = {r"blk.0.attn_q": "F16", r"blk.0.attn_k": "F32", r"blk.0.attn_output": "BF16"}
    return generated_model.write(path, architecture="qwen3moe", quant="Q4_0", types=types, tied=False)


def write_adapter(path, model, *names, keys=None, rank=RANK, tensors=None, lengthen=0, alpha=ALPHA):
    """An adapter for matrices of a model, with random numbers; `lengthen` makes A so much longer."""
    rng, shapes = np.random.default_rng(1), {name: t.shape for name, t in GGUF(model).tensors.items()}
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    kinds = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "qwen3moe"} | (
        keys or {}
    )
    for key, value in kinds.items():
        writer.kv_data[0].pop(key, None)
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name in names:
        *experts, rows, columns = shapes[name]
        sizes = {"a": (rank, columns + lengthen), "b": (rows, rank)}
        if name == "token_embd.weight":
            sizes = {"a": (rows, rank), "b": (columns, rank)}
        for half, size in sizes.items():
            writer.add_tensor(f"{name}.lora_{half}", rng.normal(size=(*experts, *size)).astype(np.float32))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name, error",
    [
        ("blk.0.attn_q.weight", 1e-3),
        ("blk.0.attn_k.weight", 1e-6),
        ("blk.0.attn_output.weight", 4e-3),
        ("blk.1.attn_v.weight", 5e-3),
        ("blk.1.ffn_down_exps.weight", 5e-3),
        ("token_embd.weight", 5e-3),
    ],
)
def test_weights_are_those_of_the_model_and_the_adapter(tmp_path, model, name, error):
    path = write_adapter(tmp_path / "adapter.gguf", model, name)
    a, b = (read_tensors(path)[f"{name}.lora_{half}"] for half in "ab")
    change = a @ b.T if name == "token_embd.weight" else b @ a
    want = read_tensors(model)[name] + 0.5 * ALPHA / RANK * change
    tensor = adapted(GGUF(model), f"{path}:0.5").tensors[name]
    whole = tensor.read()
    kind = gguf.GGMLQuantizationType(tensor.type)
    got = gguf.dequantize(whole.reshape(-1, whole.size // want[..., 0].size), kind).reshape(want.shape)
    assert np.abs(got - want).max() <= error * np.abs(want).max()
    part = np.empty(101, np.uint8)
    tensor.read_into(77, part.data)
    assert np.array_equal(part, whole[77:178]) and np.array_equal(tensor.part(77, 101), part)


def test_all_matrices_of_a_model_are_read(tmp_path, model, monkeypatch):
    monkeypatch.setattr("engine.loading.adapters._RUN", 512)  # weights, so that threads share a matrix
    name, norm = GATE, "blk.0.attn_norm.weight"
    ones = np.ones(64, np.float32)
    path = write_adapter(tmp_path / "adapter.gguf", model, name, tensors={norm: ones})
    file = adapted(GGUF(model), f"{path},{path}:-1")
    spec = read_spec(file)
    weights = Weights(file, spec, lambda done: None)
    [gate] = [weight for weight in spec.weights() if weight.tensor == name]
    rows = range(gate.experts * gate.rows)
    got = gguf.dequantize(weights.read(gate, rows).reshape(len(rows), -1), gguf.GGMLQuantizationType.Q8_0)
    want = read_tensors(model)[name].reshape(got.shape)  # one adapter takes off what the other adds
    assert np.abs(got - want).max() <= np.abs(want).max() / 250
    weights.release(gate, rows[3:5])
    assert np.array_equal(weights.vector(spec.sublayers[0].norm), ones)
    assert file.paths == [model, path, path] and adapted(GGUF(model), "").paths == [model]


@pytest.mark.parametrize(
    "names, how, said",
    [
        ((), {"keys": {"general.type": "model"}}, "is no LoRA adapter"),
        ((), {"keys": {"general.architecture": "llama"}}, "is for models of the architecture llama"),
        ((), {"keys": {"adapter.alora.invocation_tokens": [1, 2]}}, "aLoRA"),
        ((), {"tensors": {"blk.9.attn_q.weight.lora_a": np.ones((2, 2), np.float32)}}, "does not have"),
        ((), {"tensors": {"blk.0.attn_q.weight.lora_a": np.ones((2, 64), np.float32)}}, "has no matrix"),
        ((), {"tensors": {"rope_freqs.weight": np.ones(2, np.float32)}}, "is no matrix"),
        ((), {"tensors": {"output_norm.weight": np.ones(2, np.float32)}}, "has another norm"),
        ((), {"tensors": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, "are not finite"),
        (("blk.0.attn_q.weight",), {"lengthen": 1}, "has another shape of blk.0.attn_q.weight"),
        (
            (),
            {
                "tensors": {
                    f"{GATE}.lora_{x}": np.ones(shape, np.float32) for x, shape in OF_ONE_EXPERT.items()
                }
            },
            "has another shape of blk.0.ffn_gate_exps.weight",
        ),
        (("blk.0.attn_q.weight",), {"alpha": math.nan}, "by more than 10000, or by NaN"),
        (("blk.1.attn_v.weight",), {"alpha": 1e30}, "by more than 10000, or by NaN"),
    ],
)
def test_what_fits_no_model_is_refused(tmp_path, model, names, how, said):
    path = write_adapter(tmp_path / "adapter.gguf", model, *names, **how)
    with pytest.raises(ModelFileError, match=said):
        adapted(GGUF(model), str(path))


def test_matrices_of_any_name_are_changed(tmp_path):
    name, model = "blk.0.ssm_a", tmp_path / "model.gguf"
    generated_model.write(model, architecture="mamba", layers=1)
    path = write_adapter(tmp_path / "a.gguf", model, name, keys={"general.architecture": "mamba"})
    a, b = (read_tensors(path)[f"{name}.lora_{half}"] for half in "ab")
    got = adapted(GGUF(model), str(path)).tensors[name].data.view(np.float32)
    want = read_tensors(model)[name] + ALPHA / RANK * (b @ a)
    assert np.allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-5)


def test_embeddings_that_are_the_head_are_not_changed(tmp_path):
    model = generated_model.write(tmp_path / "model.gguf", architecture="qwen3moe")
    path = write_adapter(tmp_path / "adapter.gguf", model, "token_embd.weight")
    with pytest.raises(ModelFileError, match="whose output head they are"):
        adapted(GGUF(model), str(path))


def test_names():
    [first, second, third] = parse_adapters("a.gguf, b.gguf:0.5,/c:d/e.gguf:-2")
    assert (str(first.path), first.scale) == ("a.gguf", 1.0) and second.scale == 0.5
    assert third == Adapter(third.path, -2.0) and str(third.path) == "/c:d/e.gguf"
    assert [each.name for each in (first, second, third)] == ["a", "b × 0.5", "e × -2"]
    assert parse_adapters("") == []
