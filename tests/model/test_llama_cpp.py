"""llama.cpp's answers, where they are at hand: the float32 reference gives the same, and so do the engine's kernels for
CPUs and its tensor graphs. `python -m tools.measure oracle_check` runs all that are here in part."""

import functools

import numpy as np
import pytest

from engine.targets.cpu.runner import CPURunner
from engine.targets.graph.runner import GraphRunner
from tests import oracles
from tests.opened import opened
from tests.reference import Reference, divergence
from tests.reference_functions import log_softmax
from tests.targets.lone_sequence import LoneSequence
from tests.thorough import rarely

# Exact answers, of float32 weights. Keys and values of float16, and rounded activations, make the differences.
DIFFERENCE, ROUNDED_DIFFERENCE = 1e-4, 8e-3
ON_CPU = (rarely("tiny-gemma3-F32"), rarely("tiny-phi3-Q4_K_M"), rarely("tiny-qwen35moe-Q4_K_M"))

# A commit is checked with one: the reference itself seldom changes.
COMMON = "tiny-gpt-oss-MXFP4"
OF_REFERENCE = [name if name == COMMON else rarely(name) for name in oracles.NAMES]

# Answers of llama.cpp as it is, which rounds activations.
MODELS = (
    rarely("tiny-llama-F32"),
    rarely("tiny-llama-Q8_0"),
    rarely("tiny-llama-Q6_K"),
    rarely("tiny-llama-Q4_K"),
    rarely("tiny-qwen3-F32"),
    rarely("tiny-qwen3-Q8_0"),
    rarely("tiny-qwen3-Q4_K_M"),
)
IN_CPU_KERNELS = (rarely("tiny-llama-F32"), rarely("tiny-qwen3-Q4_K_M"))
IN_TENSOR_GRAPHS = (rarely("tiny-qwen3-Q8_0"),)
IN_FULL_WIDTH = ("tiny-llama-F32",)  # others with 8 lanes, as there is less to compile
N_GREEDY = 24


class Oracle:
    """A model, and what llama.cpp says of two prompts: the `tokens` of each, `last_logits` and `greedy` tokens after
    it, and for every position the `top16_ids` and `top16_logprobs`."""

    def __init__(self, name, path, answers):
        self.name, self.path, self.is_float = name, path, name.endswith("F32")
        self._answers = answers

    def __call__(self, what, prompt):
        return self._answers[f"{what}{prompt}"]

    @functools.cached_property
    def reference(self):
        """The float32 reference's logits of both prompts, (positions, vocabulary) each."""
        reference = Reference(self.path)
        return [reference.logits(self("tokens", prompt)) for prompt in (0, 1)]


@pytest.fixture(scope="module", params=MODELS)
def oracle(request, shared, tmp_path_factory):
    answers = np.load(shared / f"oracle/{request.param}-0.npz")
    shape, quant = request.param[: request.param.rindex("-")], request.param.rpartition("-")[2]
    path = tmp_path_factory.mktemp("oracle") / "model.gguf"
    oracles.make_model(shared, shape, quant, path, answers["last_logits0"].size)
    yield Oracle(request.param, path, answers)
    path.unlink()


def agree(text, oracle, prompt):
    """The runner's logits after the prompt are llama.cpp's, and so are the greedy tokens of a float model."""
    tokens = oracle("tokens", prompt).tolist()
    text.prefill(tokens[:-1], 0)
    greedy = [text.decode(tokens[-1], len(tokens) - 1)]
    logits = np.array(text.logits())
    assert divergence(oracle("last_logits", prompt), logits) < (1e-6 if oracle.is_float else 1e-3)
    assert divergence(oracle.reference[prompt][-1], logits) < 1e-5
    if oracle.is_float:
        top = oracle("top16_ids", prompt)[-1].astype(np.int64)
        wanted = oracle("top16_logprobs", prompt)[-1]
        np.testing.assert_allclose(log_softmax(logits)[top], wanted, atol=2e-3)
        while len(greedy) < N_GREEDY:
            greedy.append(text.decode(greedy[-1], len(tokens) + len(greedy) - 1))
        assert greedy == oracle("greedy", prompt).tolist()


def test_the_reference_agrees(oracle):
    for prompt, logits in enumerate(oracle.reference):
        assert divergence(oracle("last_logits", prompt), logits[-1]) < 1e-3
        if oracle.is_float:
            top = np.take_along_axis(log_softmax(logits), oracle("top16_ids", prompt).astype(np.int64), 1)
            assert np.abs(top - oracle("top16_logprobs", prompt)).max() < 2e-3


@pytest.mark.parametrize("oracle", IN_CPU_KERNELS, indirect=True)
def test_kernels_of_the_cpu_agree(oracle, monkeypatch):
    if oracle.name in IN_FULL_WIDTH:
        monkeypatch.setattr("engine.targets.cpu.runner.register_lanes", lambda: 16)
    agree(LoneSequence(CPURunner(opened(oracle.path), 256)), oracle, prompt=1)


@pytest.mark.parametrize("oracle", IN_TENSOR_GRAPHS, indirect=True)
def test_tensor_graphs_agree(oracle):
    agree(LoneSequence(GraphRunner(opened(oracle.path), 128)), oracle, prompt=0)


@pytest.fixture
def exact(shared, tmp_path):
    """Compares answers to prompts of a model, by default both, with llama.cpp's exact ones."""

    def hold(name, answers, difference, first=0):
        path = tmp_path / "model.gguf"
        oracles.make(shared, name, path)
        for prompt in oracles.prompts(shared, name)[first:]:
            agreement = oracles.agreement(prompt, answers(path, prompt))
            assert agreement.difference < difference
            assert agreement.divergence < 1e-6
            assert agreement.wrong == 0

    return hold


@pytest.mark.parametrize("name", OF_REFERENCE)
def test_the_reference_is_exact(name, exact):
    exact(name, oracles.of_reference, DIFFERENCE)


@pytest.mark.parametrize("name", ON_CPU)
def test_kernels_of_the_cpu_are_exact(name, exact):
    is_float = name.endswith("F32")
    answers = functools.partial(oracles.of_runner, CPURunner)
    exact(name, answers, DIFFERENCE if is_float else ROUNDED_DIFFERENCE, first=1)
