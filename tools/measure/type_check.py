"""Small files whose tensors differ in type from one to the next, each beside the float32 reference:

    python -m tools.measure type_check [--backend cuda] [--count 64] [--first 0] [--processes N] [--seconds 60]

File n is of the same shape and types each time. Architectures take turns. Drawn are the type of each matrix, sizes
that are no multiples of 256, heads of many sizes and numbers, a tied head or one of its own. Prompts of 50 and 120
tokens are read, and a few more decoded one by one. A line says how far the answers are, and whether the file ran on
kernels of its device or as tensor graphs; it comes as soon as the file is done. The exit code is 1 if one did not,
failed, or differs more than roundings explain. After `--seconds` what is not done is given up and counted.

Most of a file's time goes to compiling its kernels. So each core has a process with files of its own, which compiles
only what its answers run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from engine.devices.cpus import allowed_cpus
from tools.measure.engine_process import log_probabilities, set_up

PROMPTS, DECODED, CONTEXT = (50, 120), 4, 256
LIMIT = 1e-3  # of a divergence: an expert chosen otherwise, because two are nearly equal, gives up to 1e-2
_FLOATS: tuple[str, ...] = "F32", "F16", "BF16"
_SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
_LARGE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")  # of blocks of 256
# Of blocks of 256 too.
_OF_GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
_HEADS = ((4, 2), (3, 1), (5, 5), (7, 1), (9, 3), (14, 2), (8, 1), (6, 3))
_HEAD_SIZES = (64, 80, 96, 128, 256, 48, 112)


def drawn(n: int) -> dict[str, Any]:
    """The arguments of `generated_model.write` for file n."""
    from tests.generated_families import ARCHITECTURES

    draw, names = random.Random(n), [*ARCHITECTURES]
    name = names[n % len(names)]
    parts = ARCHITECTURES[name]
    layers, dim, ffn = (
        4 if parts.layers or parts.delta else 2,
        draw.choice((256, 288, 512)),
        draw.choice((256, 352, 512)),
    )
    shape: dict[str, Any] = {"architecture": name, "quant": "F16", "layers": layers, "dim": dim, "ffn": ffn}
    shape |= {"seed": n, "tied": draw.random() < 0.5}
    if parts.beside or parts.layers:
        shape |= {"dim": (dim := 256), "heads": 4, "kv_heads": 2}
    else:
        heads, kv_heads = draw.choice(_HEADS)
        shape |= {"heads": heads, "kv_heads": kv_heads, "head_dim": draw.choice(_HEAD_SIZES)}
    out = shape["heads"] * shape.get("head_dim", dim // shape["heads"])
    if parts.latent:
        of_a_head = parts.keys.get("attention.value_length_mla", parts.keys["attention.value_length"])
        out = shape["heads"] * of_a_head
    width = draw.choice((256, 96))
    if parts.experts and "expert_feed_forward_length" in parts.keys:
        shape["keys"] = {"expert_feed_forward_length": width}
        shape["keys"] |= {"expert_shared_feed_forward_length": width} if parts.shared else {}
    else:
        width = ffn

    def type_of(cols: int) -> str:
        kinds = [_FLOATS]
        if cols % 32 == 0:
            kinds += [_SMALL, _LARGE, _OF_GRIDS] if cols % 256 == 0 else [_SMALL, _SMALL]
        return draw.choice(draw.choice(kinds))

    cols = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "ffn_gate", "ffn_up"), dim)
    cols |= dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp", "ssm_alpha", "ssm_beta", "inp_gate"), dim)
    cols |= dict.fromkeys(("shortconv.in_proj", "shortconv.out_proj"), dim)
    cols |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"), dim)
    cols |= {"ffn_down_exps": width, "ffn_down_shexp": width, "proj": 32, "ssm_out": 64}
    if parts.latent:
        cols |= {"attn_q_a": dim, "attn_q_b": 96, "attn_kv_a_mqa": dim, "attn_k_b": 32}
        cols |= {"attn_v_b": 64, "attn_kv_b": 64}
    types = {f"blk.{i}.{kind}": type_of(n) for i in range(layers) for kind, n in cols.items()}
    for i in range(layers):
        types[f"blk.{i}.ffn_down"] = type_of(32 if parts.layers else ffn)
        types[f"blk.{i}.attn_output"] = type_of(32 if parts.layers or parts.beside else out)
        types[f"blk.{i}.ffn_gate_inp"] = draw.choice(("F32", "F32", "F16", "BF16"))
    types |= {"token_embd": type_of(dim), "output": type_of(dim), "per_layer_token_embd": type_of(32)}
    return shape | {"types": types}


def begin(backend: str) -> None:
    """Sets a process up that checks files."""
    set_up(backend)
    from engine.kernels import compilation

    # A runner compiles what answers of any length may need, of which these run a part.
    compilation.begin_once = lambda description, *makes: lambda: None


def check(n: int) -> tuple[str, bool]:
    """A line for file n, and whether it is as it should be."""
    from tinygrad import Device

    from engine.description.architectures import read_spec
    from engine.formats.gguf import GGUF
    from engine.loading.weights import Weights
    from engine.model.coverage import target_of
    from engine.model.open_runner import open_runner
    from tests import generated_model
    from tests.reference import Reference, divergence

    shape = drawn(n)
    heads = f"{shape['heads']}/{shape['kv_heads']} heads of {shape.get('head_dim', '-')}"
    about = f"{n:4} {shape['architecture']:10} {shape['dim']}, {shape['ffn']}, {heads}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = generated_model.write(Path(folder) / "model.gguf", **shape)
            file, reference = GGUF(path), Reference(path, CONTEXT)
        spec = read_spec(file)
        target = target_of(spec, Device.DEFAULT)
        worst, wrong, draw = 0.0, 0, np.random.default_rng(n)
        runner = open_runner(Weights(file, spec, lambda _: None), CONTEXT)
        for prompt in PROMPTS:
            tokens = draw.integers(0, spec.vocab, prompt + DECODED).tolist()
            wanted = reference.logits(tokens, DECODED)
            got = log_probabilities(runner, tokens, prompt)
            # numpy.max gives NaN if one of them is NaN.
            worst = float(np.max([worst, *(divergence(a, b) for a, b in zip(wanted, got, strict=True))]))
            wrong += int((got.argmax(-1) != wanted.argmax(-1)).sum())
    except Exception:
        return f"{about}: {traceback.format_exc()}{shape}", False
    is_narrow = Device.DEFAULT == "CPU" and any(weight.cols % 32 for weight in spec.weights())
    is_fine = (target != "graph" or is_narrow) and worst < LIMIT
    told = f"{about:58} {target:7} divergence {worst:8.1e} wrong tokens {wrong} of {DECODED * len(PROMPTS)}"
    return told if is_fine else f"{told} {shape}", is_fine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--count", type=int, default=64, help="files")
    parser.add_argument("--first", type=int, default=0, help="the number of the first file")
    parser.add_argument("--processes", type=int, default=len(allowed_cpus()), help="at once")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="after which what is not done is given up"
    )


def run(given: argparse.Namespace) -> None:
    # One thread each: the processes share the cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PARALLEL": "0"}
    files, started = range(given.first, given.first + given.count), time.monotonic()
    done = faults = 0
    pool = ProcessPoolExecutor(
        min(given.processes, given.count), multiprocessing.get_context("spawn"), begin, (given.backend,)
    )
    with pool:
        checks = [pool.submit(check, n) for n in files]
        try:
            for finished in as_completed(checks, timeout=given.seconds):
                line, is_fine = finished.result()
                done, faults = done + 1, faults + (not is_fine)
                print(line, flush=True)
        except TimeoutError:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown(cancel_futures=True)
    took = time.monotonic() - started
    print(f"{done} of {given.count} files in {took:.0f} s, {faults} not as they should be")
    sys.exit(1 if faults or not done else 0)
