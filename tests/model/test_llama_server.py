"""Every architecture beside llama.cpp's own server, where one is installed: the float32 reference, which all targets
are held against, has its log-probabilities."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import BackendError
from engine.peers.llama_process import find_llama_server
from tests import generated_families, generated_model
from tests.reference import Reference
from tests.reference_functions import log_softmax
from tests.thorough import thorough

CONTEXT, STEPS, START_S = 256, 6, 20
SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
UNTIED = (
    *(
        "phi2",
        "stablelm",
        "gptneox",
        "nemotron",
        "orion",
        "internlm2",
        "olmo2",
        "qwen2moe",
        "bailingmoe",
        "bailingmoe2",
    ),
    *("stablelm-12b", "codeshell", "mellum", "muse-glimmer", "xverse", "exaone-moe", "minimax-m2", "dbrx"),
    "kimi-linear",
)
# What llama.cpp asks for beside: a head of its own, sections, factors, as many numbers of heads as layers.
NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"tied": False} for name in UNTIED},
    "command-r-plus": {"layers": 64},  # so many have norms of heads
    "apertus": {"tied": False, "layers": 16},
    "baichuan": {"tied": False, "layers": 40},  # so many have ALiBi
    "qwen": {"tied": False, "kv_heads": 4},
    "maple": {"tied": False, "keys": {"swiglu_clamp_exp": [0.5] * 4}},
    "step35": {
        "tied": False,
        "keys": {"swiglu_clamp_exp": [0.0, 0.5] * 2, "swiglu_clamp_shexp": [0.0, 0.3] * 2},
    },
    "deepseek2-ocr": {"kv_heads": 4},
    # always
    "llama4": {"keys": {"attention.sliding_window": 8192, "attention.temperature_length": 8192}},
    "dots1": {"tied": False, "kv_heads": 4},
    "olmoe": {"tied": False, "kv_heads": 4},
    "jais": {"tied": False, "kv_heads": 4},
    "smallthinker": {"layers": 5},  # with four, it rotates them all
    "hunyuan_vl": {"keys": SECTIONS},  # it gives texts a fourth position of 0, which published code does not
    "qwen35": {"keys": SECTIONS},
    "qwen35moe": {"keys": SECTIONS, "tied": False},
    "gemma4": {"rope_factors": True},
    "gemma4-moe": {"rope_factors": True, "layers": 8, "keys": {"embedding_length_per_layer_input": 0}},
    # llama.cpp reads the bounds of yarn only of mistral3: here they are the usual ones
    "gpt-oss": {"tied": False, "keys": {"rope.scaling.yarn_beta_fast": 32.0}},
    "deepseek2": {"keys": {"rope.scaling.yarn_beta_fast": 32.0}},
    # So many layers have no attn_q_a.
    "deepseek2-lite": {"keys": {"rope.scaling.yarn_beta_fast": 32.0}, "layers": 27},
    "exaone4": {"layers": 64, "keys": {"attention.sliding_window": 24}},  # so many have windows
}
ITS_OWN_GELU = (  # a table of float16 numbers
    *("starcoder2", "phi2", "gptneox", "falcon"),
    *("gemma", "gemma2", "gemma3", "gemma4", "gemma4-moe"),
    *("gpt2", "starcoder", "mpt", "bloom", "codeshell", "spark2_5"),
)
LEFT_OUT = (
    "qwen2vl",  # it does not read the eps of their norms (seen in September 2026)
    "deci",  # it leaves out layers that have attention alone (seen in November 2026, as what follows)
    "openelm",  # it reads only fused matrices
    "bitnet-b1.58",  # it does not run it
    "phimoe",  # its norms are RMS norms there
    "gemma3n",  # which that table (see above) takes far away
    *(name for name, parts in generated_families.ARCHITECTURES.items() if parts.keys.get("pooling_type")),
)


@contextmanager
def served(program: str, model: Path, folder: Path) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """llama-server with a float32 cache, as a function from requests for completions to answers."""
    command = [program, "-m", str(model), "-c", str(CONTEXT), "-np", "1", "-t", "1", "-fa", "off"]
    command += [
        "-ctk",
        "f32",
        "-ctv",
        "f32",
        "--no-warmup",
        "--swa-full",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    log = folder / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            end, address = time.monotonic() + START_S, ""
            while not address:
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
                time.sleep(0.05)
                words = log.read_text().partition("listening on ")[2].split()
                address = words[0] if words else ""

            def ask(body: dict[str, Any]) -> dict[str, Any]:
                request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
                request.add_header("Content-Type", "application/json")
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)  # type: ignore[no-any-return]

            yield ask
        finally:
            process.terminate()


@thorough
@pytest.mark.parametrize("name", [name for name in generated_families.ARCHITECTURES if name not in LEFT_OUT])
def test_log_probabilities_are_those_of_llama_cpp(name, tmp_path):
    try:
        program = find_llama_server()
    except BackendError as error:
        pytest.skip(str(error))
    shape: dict[str, Any] = {"quant": "F32", "layers": 4, **NEEDED.get(name, {})}
    path = generated_model.write(tmp_path / "m.gguf", architecture=name, **shape)
    reference, limit = Reference(path, context=CONTEXT), 5e-3 if name in ITS_OWN_GELU else 5e-5
    with served(program, path, tmp_path) as ask:
        for length in (5, 70):  # more than a window
            tokens = np.random.default_rng(length).integers(0, 500, length).tolist()
            for _ in range(STEPS):
                body = {
                    "prompt": tokens,
                    "n_predict": 1,
                    "temperature": 0,
                    "n_probs": 5,
                    "return_tokens": True,
                }
                answer = ask(body | {"ignore_eos": True})
                ours = log_softmax(reference.logits(tokens, last=1))[0]
                for found in answer.get("completion_probabilities", []):  # none of a part of a character
                    theirs = [(top["id"], top["logprob"]) for top in found["top_logprobs"]]
                    assert max(abs(ours[id] - logprob) for id, logprob in theirs) < limit, (
                        length,
                        len(tokens),
                    )
                tokens.append(answer["tokens"][0])
