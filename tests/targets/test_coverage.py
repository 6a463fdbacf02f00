"""What runs as tensor graphs because a device has no kernels for it, and what a user is told."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine.devices import cuda_driver
from engine.errors import UsageError
from engine.model import open_runner
from engine.model.memory_need import memory_need, runs_as_graph
from engine.targets.coverage import lacks_kernels_because, runs_as_graph_because
from tests import generated_model
from tests.targets.layers import opened


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    lacks_kernels_because.cache_clear()
    yield
    lacks_kernels_because.cache_clear()


@pytest.mark.parametrize(
    "found, as_graph",
    [
        ((7, 5), True),
        ((5, 2), True),
        ((8, 0), False),
        ((12, 0), False),
        ((0, 0), False),
    ],  # the last: no driver
)
def test_a_gpu_without_the_instructions_of_the_kernels_runs_graphs(found, as_graph, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_driver, "compute_capability", lambda: found)
    weights = opened(generated_model.write(tmp_path / "model.gguf"))
    spec = weights.spec
    assert runs_as_graph(spec, "CUDA", "auto") is runs_as_graph(spec, "NV", "auto") is as_graph
    assert not runs_as_graph(spec, "CPU", "auto")
    alike = memory_need(spec, 512, "CUDA", "graph") == memory_need(spec, 512, "CUDA")
    assert alike is as_graph
    if as_graph:
        why = runs_as_graph_because(spec, "CUDA")
        assert why.startswith(
            f"orin-chat's kernels need a GPU of compute capability 8.0, and this one has {found[0]}.{found[1]}."
        )
        monkeypatch.setattr(open_runner, "Device", SimpleNamespace(DEFAULT="CUDA"))
        with pytest.raises(UsageError, match="compute capability"):
            open_runner.open_runner(weights, 512, kernels="fused")


def test_a_head_that_is_no_multiple_of_a_tile_runs_as_graphs(tmp_path):
    spec = opened(generated_model.write(tmp_path / "model.gguf", dim=96, heads=4, kv_heads=2)).spec
    assert runs_as_graph_because(spec, "CUDA") == (
        "This model has heads of 24 elements, which orin-chat has no CUDA kernels for. "
        "It runs as tensor graphs, which are slower."
    )
    assert not runs_as_graph_because(spec, "CPU")
