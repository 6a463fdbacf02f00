"""Whole models of several types of weights: decode, and prefill by the length of the prompt.

    python -m tools.measure type_rates qwen3:1.7b [--backend cuda] [--mixes Q4_K_M,Q5_K_M,IQ4_XS,UD,F16]
        [--prompts 32,64,128,512,2048] [--llama-bench PROGRAM]

For each mix (`mixed_model`) a file of the shape is written, measured as `step_rates` does it, and deleted. A cell has
tokens a second and their share of the first mix's, or, with llama-bench, their ratio to its. What is printed is
Markdown.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

from tools.measure.engine_process import add_chip, alone, numbers
from tools.measure.mixed_model import MIXES, write
from tools.measure.step_rates import REPLY, Rates, ours, pair, theirs

OTHERS = ("UD", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "F16", "BF16", "F32")
FIRST = "Q4_K_M"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mixes = [FIRST, *(name for name in MIXES if name != FIRST), *OTHERS]
    parser.add_argument("shape")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--mixes", default=mixes, type=lambda text: text.split(","))
    parser.add_argument("--prompts", default="32,64,128,512,2048", type=numbers, help="tokens of the prompts")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--llama-bench", metavar="PROGRAM")
    add_chip(parser)


def run(given: argparse.Namespace) -> None:
    print(f"| {given.shape} | tg{REPLY} | " + " | ".join(f"pp{n}" for n in given.prompts) + " |")
    print("|---" * (2 + len(given.prompts)) + "|", flush=True)
    measured = partial(ours, repetitions=given.repetitions, kv="f16", chip=given.chip)
    first: list[float] = []
    for mix in given.mixes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{mix}.gguf"
            write(given.shape, path, mix)
            rates = _cells(alone(measured, str(path), given.backend, [0], given.prompts), given.prompts)
            others: list[float] = []
            if program := given.llama_bench:
                threads = os.cpu_count() or 1
                other = theirs(program, str(path), [0], given.prompts, given.repetitions, threads, "f16")
                others = _cells(other, given.prompts)
        first = first or rates
        if others:
            cells = [pair(rate, other) for rate, other in zip(rates, others, strict=True)]
        else:
            cells = [f"{rate:,.0f}, {rate / of:.0%}" for rate, of in zip(rates, first, strict=True)]
        print(f"| {mix} | " + " | ".join(cells) + " |", flush=True)


def _cells(rates: Rates, prompts: list[int]) -> list[float]:
    return [rates.decode[0], *(rates.prefill[n, 0] for n in prompts)]
