"""What a model will need in memory. What it takes is compared with this where runners are tested
(`tests/targets/test_graph`, `tests/targets/test_cpu`, `tests/kernels/gpu/check_layers`)."""

from dataclasses import replace
from typing import get_args

import pytest

from engine.description.architectures import read_spec
from engine.description.recurrent import DeltaNet
from engine.description.spec import Sublayer
from engine.description.sublayers import Vector, Weight
from engine.errors import BackendError, UsageError
from engine.formats.ggml_types import GGML_TYPES
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.formats.quantization import FLOATS, QUANTIZED
from engine.kernels.quantized_matrix import QuantizedMatrix
from engine.measure.free_memory import host_free_bytes
from engine.model import load_plan
from engine.model.memory_need import (
    Target,
    check_fits,
    chosen_context,
    largest_context,
    memory_need,
    squeezed_because,
)
from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions
from engine.targets.cpu.kernels.lanes import register_lanes
from engine.targets.cpu.kernels.weight_layout import LaneLayout
from engine.targets.cpu.memory import MEMORY as of_cpus
from engine.targets.graph.memory import MEMORY as of_graphs
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout as GPULayout
from engine.targets.nvidia.memory import MEMORY as of_gpus
from tests import generated_model

GB = 10**9
TARGETS = get_args(Target)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return generated_model.write(
        tmp_path_factory.mktemp("model") / "m.gguf", architecture="qwen3", context=40960
    )


@pytest.fixture(scope="module")
def spec(path):
    """A small model that was trained for 40,960 tokens, with so many layers, which share their matrices, and such an
    embedding that it is large."""
    small = read_spec(GGUF(path))
    embedding = replace(small.embedding, experts=400_000)
    return replace(
        small, name="Large 16B", embedding=embedding, head=embedding, sublayers=small.sublayers * 100
    )


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTIZED], ids=lambda kind: GGML_TYPES[kind].name)
def test_matrices_are_as_large_as_the_layouts_make_them(kind):
    rows, cols = 41, 3 * max(32, GGML_TYPES[kind].block)  # which fill neither vectors nor units
    weight, layout = Weight("m", rows, cols, kind), LaneLayout(kind, register_lanes())
    assert of_cpus.weight_bytes(weight) == layout.size(rows, cols) * layout.dtype.itemsize
    planes = GPULayout(kind).shapes(rows, cols)
    assert of_gpus.weight_bytes(weight) == sum(n * dtype.itemsize for n, dtype in planes)
    matrix = QuantizedMatrix(kind, rows, cols).planes.values()
    assert of_graphs.weight_bytes(weight) == sum(plane.nbytes() for plane in matrix)


@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_context_that_fits_is_found(spec, target):
    need = memory_need(spec, 8192, target)
    context = largest_context(spec, need.total_bytes, target)
    assert 8192 <= context < 8192 + 1280  # a GPU's cache grows in steps
    assert memory_need(spec, context, target).total_bytes <= need.total_bytes
    assert largest_context(spec, 10 * need.total_bytes, target) == spec.trained_context
    assert largest_context(spec, need.weights_bytes, target) == 0


@pytest.mark.parametrize(
    "asked, free, chosen",
    [
        (None, 0, 8192),
        (1000, 0, 1000),
        ("max", None, 8192),  # not known
        ("max", 100 * GB, 40_960),  # as it was trained for
        ("max", 19 * GB, 31_232),
        ("max", 1 * GB, 512),  # which `check_fits` refuses
    ],
)
def test_the_longest_context_is_bounded_by_training_and_memory(spec, asked, free, chosen):
    context = chosen_context(spec, asked, free, "nvidia")
    assert context == chosen
    said = squeezed_because(spec, asked, context)
    assert bool(said) == (asked == "max" and context < spec.trained_context)
    if chosen == 31_232:
        need = memory_need(spec, context, "nvidia").total_bytes
        assert 0.85 * free < need <= 0.9 * free, "other programs need memory too"
        assert "31,232 tokens of the 40,960 that Large 16B was trained for" in said


def test_a_context_that_no_model_was_trained_for_is_refused(spec):
    with pytest.raises(UsageError, match="context of 40,961 tokens") as raised:
        chosen_context(spec, 40_961, None, "cpu")
    assert "or max" in raised.value.hint
    assert chosen_context(spec, 40_961, None, "cpu", at_most=True) == 40_960, "settings are for all models"


def test_what_fits_is_not_refused(spec):
    need = memory_need(spec, 8192, "nvidia").total_bytes
    assert check_fits(spec, 8192, need, "nvidia").total_bytes == need
    check_fits(spec, 8192, None, "nvidia")  # the free memory is not known


def test_several_conversations_have_a_cache_each_on_a_gpu(spec):
    one, four = (memory_need(spec, 8192, "nvidia", parallel=n) for n in (1, 4))
    assert (four.cache_bytes, four.weights_bytes) == (4 * one.cache_bytes, one.weights_bytes)
    assert "for 4 contexts of 8,192 tokens" in str(four)
    assert memory_need(spec, 8192, "cpu", parallel=4) == memory_need(spec, 8192, "cpu")
    with pytest.raises(BackendError, match="4 contexts") as raised:
        check_fits(spec, 8192, one.total_bytes, "nvidia", 4)
    assert "--context" in raised.value.hint


@pytest.mark.parametrize(
    "free, hint",
    [
        (17.0, "A context of 27,392 tokens would fit: --context 27392."),
        (15.0, "This model in Q6_K would fit."),
        (4.0, "A model with up to 6.0 billion weights in Q4_K_M would fit."),
        (0.1, "Close other programs."),
    ],
)
def test_a_refusal_gives_the_figures_and_what_would_fit(spec, free, hint):
    with pytest.raises(BackendError) as raised:
        check_fits(spec, 32_768, int(free * GB), "nvidia")
    assert raised.value.message == (
        "Large 16B needs 17.1 GB of memory: 16.0 GB of weights, 0.8 GB for a context of 32,768 tokens, "
        "0.3 GB for kernels. "
        f"{free} GB are free."
    )
    assert raised.value.hint == hint and raised.value.exit_code == 4


@pytest.mark.parametrize("target", TARGETS)
def test_a_quantized_cache_takes_34_bytes_in_place_of_64(spec, target):
    f16, q8_0 = (memory_need(spec, 8192, target, kv=kv) for kv in KVFormat)
    assert q8_0.cache_bytes * 64 == f16.cache_bytes * 34 and q8_0.weights_bytes == f16.weights_bytes
    assert largest_context(spec, f16.total_bytes, target, kv=KVFormat.Q8_0) > 8192


def test_a_format_that_no_kernel_has_is_refused_before_loading(path):
    with pytest.raises(UsageError, match="Choose one of f16, q8_0"):
        TextModel(EngineOptions(model_path=str(path), kv="q3"), lambda _: None)
    with pytest.raises(UsageError, match="blocks of 32 elements, and this model's heads have 16"):
        TextModel(EngineOptions(model_path=str(path), kv="q8_0", kernels="graph"), lambda _: None)


@pytest.mark.parametrize("heads, works", [(2, True), (4, False)])  # of 32 elements and of 16
def test_a_refusal_names_a_format_of_the_cache_that_would_fit(tmp_path, heads, works):
    spec = read_spec(GGUF(generated_model.write(tmp_path / "m.gguf", heads=heads, kv_heads=1)))
    need = memory_need(spec, 2048, "cpu").total_bytes
    with pytest.raises(BackendError) as raised:
        check_fits(spec, 2048, need - 1, "cpu")
    assert (raised.value.hint == "With --kv q8_0 it would fit.") == works


def test_the_engine_refuses_before_it_loads(path, monkeypatch):
    monkeypatch.setattr(load_plan, "free_bytes", lambda device: 1000)
    reports = []
    with pytest.raises(BackendError, match=r"random noise needs .* for a context of 8,192 tokens"):
        TextModel(EngineOptions(model_path=str(path)), reports.append)
    assert not reports


def test_the_engine_says_beforehand_what_the_longest_context_costs(path, monkeypatch):
    need = memory_need(read_spec(GGUF(path)), 1024).total_bytes
    monkeypatch.setattr(load_plan, "free_bytes", lambda device: int(need / 0.9) + 1)
    reports = []
    ready = TextModel(EngineOptions(model_path=str(path), context_length="max"), reports.append).ready
    assert ready.is_squeezed and ready.context_length == 1024
    assert "1,024 tokens of the 40,960" in ready.warnings[-1]
    first = reports[0]
    assert (first.done_bytes, first.context_length) == (0, 1024)
    assert first.cache_bytes == ready.cache_bytes == memory_need(read_spec(GGUF(path)), 1024).cache_bytes


GROUP = "sys/fs/cgroup/user/chat"
OLD = "sys/fs/cgroup/memory/docker/1"


@pytest.mark.parametrize(
    "files, free",
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB"}, 4_096_000),
        (  # the group's limit, and that of one above it; cached files count as free
            {
                "proc/meminfo": "MemAvailable: 9000 kB",
                "proc/self/cgroup": "0::/user/chat",
                f"{GROUP}/memory.max": "max",
                f"{GROUP}/memory.current": "5",
                "sys/fs/cgroup/user/memory.max": "5000",
                "sys/fs/cgroup/user/memory.current": "4500",
                "sys/fs/cgroup/user/memory.stat": "anon 9\ninactive_file 200\nactive_file 50\nslab 7",
            },
            750,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 9000 kB",
                "proc/self/cgroup": "12:cpu,cpuacct:/docker/1\n4:memory:/docker/1",
                f"{OLD}/memory.limit_in_bytes": "5000",
                f"{OLD}/memory.usage_in_bytes": "6000",
                f"{OLD}/memory.stat": "inactive_file 9999\ntotal_inactive_file 20",
            },
            0,
        ),
    ],
)
def test_free_memory_is_the_machines_within_its_groups_limits(tmp_path, files, free):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_free_bytes(tmp_path) == free


def test_recurrent_states_and_their_checkpoints_are_counted(spec):
    vectors = [Vector("v", 1)] * 4
    weight = Weight("w", 8, 8, 0)
    delta = DeltaNet((weight,), *[weight] * 4, *vectors, key_heads=2, value_heads=4, size=128, taps=4)
    recurrent = replace(spec, sublayers=(*spec.sublayers, Sublayer(None, delta, None)))
    one, four = (memory_need(recurrent, 8192, "nvidia", parallel=n) for n in (1, 4))
    state = 4 * (4 * 128 * 128 + 3 * 8 * 128)
    # a GPU has each state before and after a step, and a single conversation those after 8 rows of a check
    assert (one.states_bytes, four.states_bytes) == ((9 + 8) * state, (8 + 16) * state)
    # checks of guesses have 4 more on a CPU
    assert memory_need(recurrent, 8192, "cpu", parallel=4).states_bytes == (4 + 4 + 16) * state
    without = memory_need(spec, 8192, "nvidia")
    assert one.total_bytes - without.total_bytes >= one.states_bytes > 0 == without.states_bytes
    assert "for recurrent states" in str(one) and "states" not in str(without)
