"""What runs as tensor graphs because a device has no kernels for it, and what a user is told."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine.description.recurrent import DeltaNet
from engine.devices import cuda_driver
from engine.errors import UsageError
from engine.model import open_runner
from engine.model.coverage import lacks_kernels_because, runs_as_graph_because, target_of
from engine.targets.cpu.handlers import HANDLERS
from tests import generated_model
from tests.opened import opened


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    lacks_kernels_because.cache_clear()
    yield
    lacks_kernels_because.cache_clear()


@pytest.mark.parametrize(
    "found, as_graph",
    # The last: no driver.
    [((7, 5), True), ((5, 2), True), ((8, 0), False), ((12, 0), False), ((0, 0), False)],
)
def test_a_gpu_without_the_instructions_of_the_kernels_runs_graphs(found, as_graph, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_driver, "compute_capability", lambda: found)
    weights = opened(generated_model.write(tmp_path / "model.gguf"))
    spec = weights.spec
    of_gpus = "graph" if as_graph else "nvidia"
    assert target_of(spec, "CUDA") == target_of(spec, "NV") == of_gpus and target_of(spec, "CPU") == "cpu"
    if as_graph:
        why = runs_as_graph_because(spec, "CUDA")
        assert why.startswith(
            f"orin-chat's kernels need a GPU of compute capability 8.0, and this one has {found[0]}.{found[1]}."
        )
        monkeypatch.setattr(open_runner, "Device", SimpleNamespace(DEFAULT="CUDA"))
        with pytest.raises(UsageError, match="compute capability"):
            open_runner.open_runner(weights, 512, kernels="fused")


@pytest.mark.parametrize("architecture", ("qwen2", "qwen35moe", "gpt-oss", "gemma4-moe", "gemma4"))
def test_matrices_of_any_types_run_on_kernels(architecture, tmp_path):
    kinds = ("attn_k", "attn_v", "ffn_gate", "ffn_gate_exps", "ffn_gate_shexp", "ffn_down_shexp", "attn_gate")
    types = {
        f"blk.{i}.{kind}": ("F16", "Q4_0", "IQ4_NL")[(i + k) % 3]
        for k, kind in enumerate(kinds)
        for i in (0, 1)
    }
    path = generated_model.write(tmp_path / "model.gguf", architecture=architecture, types=types, tied=False)
    spec = opened(path).spec
    assert not runs_as_graph_because(spec, "CUDA") and not runs_as_graph_because(spec, "CPU")


@pytest.mark.parametrize("architecture", ("gemma3n", "llama4", "laguna", "muse-glimmer", "phimoe", "bloom"))
def test_a_family_with_parts_of_its_own_runs_on_kernels(architecture, tmp_path):
    spec = opened(generated_model.write(tmp_path / "model.gguf", architecture=architecture)).spec
    assert not runs_as_graph_because(spec, "CUDA") and not runs_as_graph_because(spec, "CPU")


def test_keys_that_are_no_whole_groups_of_rows_run_as_graphs(tmp_path):
    """On a CPU: they would overwrite the values."""
    path = generated_model.write(tmp_path / "m.gguf", heads=8, kv_heads=2, head_dim=20)
    spec = opened(path).spec
    assert "has 2 heads of 20 elements for its keys, which" in runs_as_graph_because(spec, "CPU")


def test_a_head_that_is_no_multiple_of_a_tile_runs_as_graphs(tmp_path):
    spec = opened(generated_model.write(tmp_path / "model.gguf", dim=96, heads=4, kv_heads=2)).spec
    assert runs_as_graph_because(spec, "CUDA") == (
        "This model has heads of 24 elements, which orin-chat has no CUDA kernels for. "
        "It runs as tensor graphs, which are slower."
    )
    assert not runs_as_graph_because(spec, "CPU")


def test_columns_that_fill_no_unit_run_as_graphs_on_a_cpu(tmp_path):
    path = generated_model.write(
        tmp_path / "model.gguf", quant="F16", dim=64, heads=5, kv_heads=1, head_dim=48
    )
    spec = opened(path).spec
    assert runs_as_graph_because(spec, "CPU").startswith("This model has a matrix of 240 columns, which")
    assert not runs_as_graph_because(spec, "CUDA")


def test_a_sublayer_that_a_table_does_not_have_runs_as_graphs(tmp_path, monkeypatch):
    spec = opened(generated_model.write(tmp_path / "model.gguf", architecture="qwen35moe")).spec
    assert target_of(spec, "CPU") == "cpu" and target_of(spec, "CPU", "graph") == "graph"
    monkeypatch.delitem(HANDLERS, DeltaNet)
    assert target_of(spec, "CPU") == "graph"
    assert runs_as_graph_because(spec, "CPU").startswith("This model has gated delta nets, which")


@pytest.mark.parametrize(
    "architecture",
    (
        *("ernie4_5-moe", "bailingmoe2", "deepseek2", "deepseek2-lite"),
        *("phi2", "gpt2", "falcon-h1", "nemotron_h", "nemotron_h_moe", "granitehybrid"),
    ),
)
def test_families_that_run_on_kernels(architecture, tmp_path):
    spec = opened(generated_model.write(tmp_path / "model.gguf", architecture=architecture, layers=3)).spec
    assert not runs_as_graph_because(spec, "CUDA") and not runs_as_graph_because(spec, "CPU")


@pytest.mark.parametrize(
    ("size", "dim", "lacks"), [(256, 80, ""), (96, 64, ""), (128, 72, "72"), (512, 128, "128")]
)
def test_sizes_of_mamba_layers_on_gpus(size, dim, lacks, tmp_path):
    keys = {"ssm.state_size": size, "ssm.group_count": 1, "ssm.time_step_rank": 2, "ssm.inner_size": 2 * dim}
    path = generated_model.write(
        tmp_path / "m.gguf", architecture="nemotron_h", quant="F16", layers=3, keys=keys
    )
    why = runs_as_graph_because(opened(path).spec, "CUDA")
    assert f"has Mamba 2 heads of {lacks} elements and states of {size}, which" in why if lacks else not why


def test_a_device_without_kernels_runs_graphs(tmp_path):
    spec = opened(generated_model.write(tmp_path / "model.gguf")).spec
    assert target_of(spec, "METAL") == "graph"
    assert runs_as_graph_because(spec, "METAL").startswith("orin-chat has no METAL kernels.")
