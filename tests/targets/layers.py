"""Models of every architecture, and their residual stream held against the reference's after each sublayer."""

from pathlib import Path
from typing import Any

import numpy as np

from tests import generated_model
from tests.reference import Reference, wrong_by
from tests.targets.sublayers import Step

# Every architecture, tied and untied heads, with and without rope frequency factors, floats and blocks. Every
# quantization type by itself is proven in tests/kernels.
MODELS: dict[str, dict[str, Any]] = {
    "llama F32 untied, rope factors": {"quant": "F32", "tied": False, "rope_factors": True},
    "llama4 F32": {
        "architecture": "llama4",
        "quant": "F32",
        "keys": {"attention.sliding_window_pattern": 2},
    },
    "qwen2 F32": {"architecture": "qwen2", "quant": "F32"},
    "qwen3 F32": {"architecture": "qwen3", "quant": "F32"},
    "mistral3 F32": {"architecture": "mistral3", "quant": "F32"},
    "phi3 Q8_0, 12 of 16 rotated": {"architecture": "phi3", "rotated": 12},
    "gemma3 Q8_0": {"architecture": "gemma3", "layers": 3},
    "plamo2 F32": {"architecture": "plamo2", "quant": "F32"},
    "plamo3 F32": {"architecture": "plamo3", "quant": "F32"},
    "gemma4 F32, rope factors": {"architecture": "gemma4", "quant": "F32", "layers": 4, "rope_factors": True},
    "gemma4 Q8_0 with experts": {"architecture": "gemma4-moe"},
    "gemma3n F32": {"architecture": "gemma3n", "quant": "F32", "layers": 3},
    "gemma2 F32": {"architecture": "gemma2", "quant": "F32"},
    "chatglm F32, 8 of 16 rotated": {"architecture": "chatglm", "quant": "F32", "rotated": 8},
    "exaone4 F32": {"architecture": "exaone4", "quant": "F32"},
    "qwen2moe F32": {"architecture": "qwen2moe", "quant": "F32"},
    "glm4moe F32, 8 of 16 rotated": {"architecture": "glm4moe", "quant": "F32", "rotated": 8},
    "ernie4_5-moe Q8_0": {"architecture": "ernie4_5-moe"},
    "dots1 F32": {"architecture": "dots1", "quant": "F32"},
    "bailingmoe2 F32": {"architecture": "bailingmoe2", "quant": "F32"},
    "deepseek2 F32": {"architecture": "deepseek2", "quant": "F32"},
    "deepseek2-lite Q8_0": {"architecture": "deepseek2-lite"},
    "minicpm3 F32": {"architecture": "minicpm3", "quant": "F32"},
    "granite F32": {"architecture": "granite", "quant": "F32"},
    "smollm3 F32": {"architecture": "smollm3", "quant": "F32", "layers": 4},
    "olmo2 F32": {"architecture": "olmo2", "quant": "F32"},
    "olmoe F32": {"architecture": "olmoe", "quant": "F32"},
    "qwen3moe F32": {"architecture": "qwen3moe", "quant": "F32"},
    "cohere2 F32": {"architecture": "cohere2", "quant": "F32", "layers": 4},
    "cohere2moe F32": {"architecture": "cohere2moe", "quant": "F32"},
    "command-r F32": {"architecture": "command-r", "quant": "F32", "layers": 1},
    "phi2 F32, 8 of 16 rotated": {
        "architecture": "phi2",
        "quant": "F32",
        "layers": 1,
        "rotated": 8,
        "tied": False,
    },
    "gpt2 F32": {"architecture": "gpt2", "quant": "F32", "layers": 1},
    "apertus F32": {"architecture": "apertus", "quant": "F32", "layers": 1},
    "deci F32": {"architecture": "deci", "quant": "F32", "layers": 3},
    "olmo F32": {"architecture": "olmo", "quant": "F32", "layers": 1},
    "afmoe F32": {"architecture": "afmoe", "quant": "F32"},
    "muse-glimmer F32": {"architecture": "muse-glimmer", "quant": "F32", "layers": 4},
    "laguna F32, 8 of 16 rotated": {"architecture": "laguna", "quant": "F32", "rotated": 8},
    "step35 F32": {"architecture": "step35", "quant": "F32"},
    "nanbeige F32": {"architecture": "nanbeige", "quant": "F32", "layers": 1},
    "mpt F32": {"architecture": "mpt", "quant": "F32", "layers": 1},
    "bloom F32": {"architecture": "bloom", "quant": "F32", "layers": 1},
    "stablelm-12b F32": {"architecture": "stablelm-12b", "quant": "F32", "layers": 1},
    "gptneox F32": {"architecture": "gptneox", "quant": "F32", "layers": 1},
    "nemotron F32, 8 of 16 rotated": {
        "architecture": "nemotron",
        "quant": "F32",
        "layers": 1,
        "rotated": 8,
    },
    "falcon-h1 F32": {"architecture": "falcon-h1", "quant": "F32", "layers": 1},
    "nemotron_h F32": {"architecture": "nemotron_h", "quant": "F32", "layers": 3},
    "nemotron_h_moe F32, narrow": {"architecture": "nemotron_h_moe-narrow", "quant": "F32", "layers": 3},
    "granitehybrid F32": {"architecture": "granitehybrid", "quant": "F32"},
    "jamba F32": {"architecture": "jamba", "quant": "F32"},
    "mamba F32": {"architecture": "mamba", "quant": "F32", "layers": 1},
    "talkie F32": {"architecture": "talkie", "quant": "F32", "tied": False},
    "rwkv6 F32": {"architecture": "rwkv6", "quant": "F32", "tied": False},
    "rwkv6qwen2 F32": {"architecture": "rwkv6qwen2", "quant": "F32", "tied": False},
    "rwkv7 F32": {"architecture": "rwkv7", "quant": "F32", "tied": False, "dim": 128},
    "arwkv7 F32": {"architecture": "arwkv7", "quant": "F32", "tied": False, "dim": 128},
    "kimi-linear F32": {"architecture": "kimi-linear", "quant": "F32"},
    "bailingmoe3 F32": {"architecture": "bailingmoe3", "quant": "F32"},
    "lfm2 F32": {"architecture": "lfm2", "quant": "F32"},
    "lfm2moe F32": {"architecture": "lfm2moe", "quant": "F32"},
    "hunyuan-dense F32": {"architecture": "hunyuan-dense", "quant": "F32", "layers": 1},
    "qwen3next F32, 8 of 16 rotated": {"architecture": "qwen3next", "quant": "F32", "rotated": 8},
    "qwen35 F32, 8 of 16 rotated": {"architecture": "qwen35", "quant": "F32", "rotated": 8},
    "qwen35moe F32, 8 of 16 rotated": {"architecture": "qwen35moe", "quant": "F32", "rotated": 8},
    "qwen4exp F32, 8 of 16 rotated": {"architecture": "qwen4exp", "quant": "F32", "rotated": 8},
    "mimo2 F32": {"architecture": "mimo2", "quant": "F32", "tied": False},
    "minimax-m3 F32, 8 of 16 rotated": {
        "architecture": "minimax-m3",
        "quant": "F32",
        "rotated": 8,
        "tied": False,
    },
    "deepseek32 F32": {"architecture": "deepseek32", "quant": "F32", "tied": False},
    "bitnet F32": {"architecture": "bitnet", "quant": "F32", "layers": 1},
    "bitnet-b1.58 TQ2_0": {"architecture": "bitnet-b1.58", "quant": "TQ2_0", "layers": 1, "dim": 256},
    "jais F32": {"architecture": "jais", "quant": "F32", "layers": 1},
    "hunyuan_vl F32": {"architecture": "hunyuan_vl", "quant": "F32", "layers": 1},
    "smallthinker F32": {
        "architecture": "smallthinker",
        "quant": "F32",
        "keys": {"attention.sliding_window": 24},
    },
    "gpt-oss F32": {"architecture": "gpt-oss", "quant": "F32", "keys": {"expert_used_count": [2, 3]}},
}
AS_GRAPHS = "qwen4exp F32, 8 of 16 rotated", "mimo2 F32", "rwkv6 F32", "rwkv6qwen2 F32"
"""Those for which CPUs have no kernels."""
CONTEXT = 256

TIE = 1e-4  # experts whose log-probabilities differ by less may be taken for one another
# Chunks of several sizes and single tokens, in the middle of a sequence and beyond the ring of a window.
STEPS = (
    ("prefill", 32),
    ("prefill", 5),
    ("decode", 3),
    ("prefill", 64),
    ("prefill", 9),
    ("prefill", 64),
    ("decode", 4),
)


def written(name: str, folder: Path, **shape: Any) -> Path:
    return generated_model.write(folder / "model.gguf", **MODELS[name] | shape)


def hold(path: Path, prefill: Step, decode: Step, max_chunk: int) -> None:
    """Raises AssertionError if an element of the stream differs from the reference's by more than 1e-5 of the stream's
    root mean square at that token; by 4e-5 with recurrent states, which keep all errors so far, or with embeddings of
    layers, which make more sublayers; by 6e-3 if the cache and the activations are rounded. Or if the experts are not
    those that the reference chooses for the same stream, and are no `TIE`."""
    tokens = np.random.default_rng(1).integers(0, 256, sum(n for _, n in STEPS)).tolist()
    reference = Reference(path, CONTEXT)
    embedding, *wanted = reference.streams(tokens)
    exact = 4e-5 if reference.spec.recurrent or reference.spec.layer_embeddings else 1e-5
    tolerance = exact if reference.spec.is_float32 else 6e-3
    start = 0
    for kind, n in STEPS:
        size = 1 if kind == "decode" else max_chunk
        for at in range(start, start + n, size):
            chunk = tokens[at : min(at + size, start + n)]
            streams, choices = (decode if kind == "decode" else prefill)(chunk, at)
            assert len(streams) == len(wanted)
            routers = reference.routers([embedding[at : at + len(chunk)], *streams[:-1]])
            # With hyper-connections, routers read streams that are not at hand.
            for router, chosen in zip(routers, choices, strict=len(routers) > 0):
                assert wrong_by(router, chosen).max() < TIE, f"{kind} at {at}"
            for sublayer, (got, want) in enumerate(zip(streams, wanted, strict=True)):
                want = want[at : at + len(chunk)]
                size_of = np.sqrt((want * want).mean(-1, keepdims=True))
                worst = float((np.abs(got - want) / size_of).max())
                assert worst < tolerance, f"{kind} at {at}, after sublayer {sublayer}: {worst}"
        start += n
