"""Whole steps of a small model: decode steps that run, and a prefill step that is only looked at."""

import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

from engine.events import Sampling
from engine.formats.gguf import GGUF
from engine.kernels.gpu.sampling import Shortlist
from engine.measure import profile
from engine.measure.kernel_roles import roles_of
from engine.model import weights
from engine.model.architectures import read_spec
from engine.model.fused import FusedRunner
from engine.model.lower.device_sampler import DeviceSampler
from engine.model.lower.gpu_weights import GPUModel
from engine.model.model_runner import SamplingRunner
from engine.model.weights import Weights
from tests import generated_model
from tests.reference import Reference, divergence


def check_decode_steps() -> None:
    """Whole decode steps with experts, one of them launched ahead of being asked for and then not wanted, one that
    draws. The choices of all are counted. Large matrices were repacked in pieces."""
    shape = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
    tokens, used = [3, 77], generated_model.EXPERTS["expert_used_count"]
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(
            Path(folder) / "model.gguf", architecture="qwen3moe", quant="F32", **shape
        )
        file, wanted = GGUF(path), Reference(path).logits(tokens)
    with mock.patch.object(weights, "PIECE_BYTES", 1):
        runner = FusedRunner(Weights(file, read_spec(file), lambda _: None), 32)
        alternating = {m.spec.alternating: len(m.pieces) for m in runner._model.matrices if len(m.pieces) > 1}
        assert alternating.keys() == {False, True}
    runner._sampler = DeviceSampler(
        Shortlist(wanted.shape[1], 16, (16, 4, 1)), 32
    )  # emulation takes its time
    runner.decode(tokens[0], 0, run_ahead=True)
    assert isinstance(runner, SamplingRunner)
    assert runner.prepare_sampling(Sampling(top_k=1), tokens, np.zeros(1))
    assert runner.decode_and_sample(tokens[1], 1) == wanted[1].argmax()
    assert divergence(wanted[1], runner.logits()) < 1e-6
    (choices,) = runner.expert_choices()
    assert choices.sum() == 3 * used and choices.max() <= 3


def check_profile_of_a_prompt() -> None:
    """What the kernels of a prompt are for and must move, of 8 tokens after 24."""
    heads, tokens, position, padded = 2, 8, 24, 64
    shape = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": heads, "ffn": 64}
    with tempfile.TemporaryDirectory() as folder:
        path = generated_model.write(Path(folder) / "model.gguf", architecture="qwen3", quant="F16", **shape)
        file = GGUF(path)
    spec = read_spec(file)
    with (
        mock.patch.object(FusedRunner, "_compile"),
        mock.patch.object(GPUModel, "fill"),
    ):  # nothing is to run
        runner = FusedRunner(Weights(file, spec, lambda _: None), 32)
    kernels = runner._prefill.step(padded).compile().src
    replay = profile.Replay(kernels, runner._uses(), tokens, run=lambda: None)
    told = {}
    for call, role in zip(replay.calls, roles_of(replay.calls, replay.uses), strict=True):
        name = profile._name(call).split("_")[1]
        told[name] = role, profile._bytes(replay, call, role, position)
    assert {name: role for name, (role, _) in told.items()} == {
        "embed": "embedding",
        "norm": "norm",
        "qkv0": "QKV projection",
        "rotate": "attention",
        "tile": "attention",
        "attend": "attention",
        "o": "attention output",
        "gate": "FFN gate+up",
        "down": "FFN down",
    }
    row = heads * spec.attention[0].head_dim * 2  # bytes of a token's keys, or values
    assert told["tile"][1] == 4 * row * (position + tokens) + 8, told
    queries = 2 * padded * spec.attention[0].query_size * 2  # and what comes of them
    assert told["attend"][1] == queries + 2 * row * (position + tokens) + 8, told
