"""A model's steps beside llama.cpp's own bench, on one machine in one run:

    python -m tools.measure step_rates MODEL... [--llama-bench PROGRAM] [--depths 0,4096] [--prompts 32,64,512]

Both sides are timed at their steps: no prompt, no text and no other process between. All are medians: ours of greedy
decode, one step ahead, and of prefill; llama-bench's with flash attention, whose first repetition of a short prompt is
slow, and with it the mean. `--kv` is the format of both KV caches. `--starts N` also times a one-shot as a whole
process, first with nothing kept, then with its kernels kept. What is printed is Markdown.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.paths import ROOT
from tools.measure.engine_process import Sequences, add_chip, add_models, alone, numbers, warm_model

REPLY = 128


@dataclass(frozen=True)
class Rates:
    """What a side reached on a file, in tokens a second: decode by depth of the context, prefill by the prompt's
    tokens and depth."""

    decode: dict[int, float]
    prefill: dict[tuple[int, int], float]
    about: str = ""


def ours(
    path: str, backend: str, depths: list[int], prompts: list[int], repetitions: int, kv: str, chip: str = ""
) -> Rates:
    """To be called in a process of its own."""
    from engine.protocol.events import Measure
    from engine.runtime.model_runner import same_rows

    model = warm_model(path, backend, max(depths) + max(*prompts, REPLY) + 1, kv=kv, chip=chip)
    from tinygrad import Device

    sequences, device, draw = Sequences(model._runner), Device[Device.DEFAULT], random.Random(0)
    ids = [draw.randrange(1000) for _ in range(max(depths) + max(prompts))]

    def read(n: int, position: int) -> None:
        sequences.prefill(ids[position : position + n], position)
        device.synchronize()

    def decode(n: int, position: int) -> None:
        sequences.blocks.cut(0, position)
        token = [1]
        for i in range(n):
            token = sequences.decode(token, same_rows if i < n - 1 else None)

    def rate(step: Callable[[int, int], None], n: int, depth: int) -> float:
        read(depth, 0)
        step(n, depth)  # what a first time needs
        return n / statistics.median(_seconds(partial(step, n, depth)) for _ in range(repetitions))

    decoded = {depth: rate(decode, REPLY, depth) for depth in depths}
    prefilled = {(n, depth): rate(read, n, depth) for n in prompts for depth in depths}
    measured = model.measure(Measure(request_id=0))
    weights = model.ready.weight_bytes_per_token
    about = (
        f"{measured.kernels_per_token} kernels and {weights / 1e6:,.0f} MB of weights a token, "
        f"{weights * decoded[depths[0]] / 1e9:,.0f} of the {measured.copy_gbps:,.0f} GB/s of a copy; "
        f"{model.ready.backend} on {model.ready.device_name}"
    )
    return Rates(decoded, prefilled, about)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def theirs(
    program: str, path: str, depths: list[int], prompts: list[int], repetitions: int, threads: int, kv: str
) -> Rates:
    """Raises CalledProcessError."""
    # fmt: off
    command = [
        program, "-m", path, "-p", ",".join(map(str, prompts)), "-n", str(REPLY), "-d", ",".join(map(str, depths)),
        "-r", str(repetitions), "-t", str(threads), "-ngl", "99", "-fa", "1", "-ctk", kv, "-ctv", kv, "-o", "json",
    ]
    # fmt: on
    tests = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    rates = [statistics.median(test["samples_ts"]) for test in tests]
    decode = {test["n_depth"]: rate for test, rate in zip(tests, rates, strict=True) if test["n_gen"]}
    prefill = {
        (test["n_prompt"], test["n_depth"]): rate
        for test, rate in zip(tests, rates, strict=True)
        if test["n_prompt"]
    }
    return Rates(decode, prefill, f"llama.cpp {tests[0]['build_commit']}")


def starts(path: str, backend: str, kept: int) -> list[float]:
    """Seconds of whole one-shots: the first with nothing kept, then `kept` more."""
    command = [sys.executable, "-m", "app", "--model", path, "--backend", backend, "--max-tokens", "1", "Hi"]
    with tempfile.TemporaryDirectory() as home:
        folders = {f"XDG_{kind}_HOME": f"{home}/{kind}" for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
        run = lambda: subprocess.run(
            command, cwd=ROOT, env={**os.environ, **folders}, stdout=subprocess.DEVNULL, check=True
        )
        return [_seconds(run) for _ in range(kept + 1)]


def pair(left: float, right: float | None) -> str:
    return f"{left:,.0f}" if right is None else f"{left:,.0f} : {right:,.0f} = {left / right:.2f}x"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--depths", default="0,4096", type=numbers)
    parser.add_argument("--prompts", default="512", type=numbers, help="tokens of the prompts")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--kv", default="f16", help="the format of the KV cache")
    parser.add_argument("--llama-bench", metavar="PROGRAM")
    add_chip(parser)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="llama-bench's")
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="one-shots with kept kernels")


def run(given: argparse.Namespace) -> None:
    prompts = [(n, depth) for n in given.prompts for depth in given.depths]
    tests = [f"tg{REPLY} at {depth}" for depth in given.depths]
    tests += [f"pp{n} at {depth}" for n, depth in prompts]
    print(f"| | {' | '.join(tests)} |")
    print("|---" * (1 + len(tests)) + "|", flush=True)
    notes = []
    for path in given.models:
        our = alone(
            ours, path, given.backend, given.depths, given.prompts, given.repetitions, given.kv, given.chip
        )
        their = Rates({}, {})
        if given.llama_bench:
            their = theirs(given.llama_bench, path, given.depths, given.prompts, 5, given.threads, given.kv)
        cells = [pair(our.decode[depth], their.decode.get(depth)) for depth in given.depths]
        cells += [pair(our.prefill[test], their.prefill.get(test)) for test in prompts]
        print(f"| {Path(path).stem} | " + " | ".join(cells) + " |", flush=True)
        notes.append(f"{Path(path).stem}: {our.about}" + (f"; beside {their.about}" if their.about else ""))
        if given.starts:
            first, *kept = starts(path, given.backend, given.starts)
            later = ", ".join(f"{s:.2f}" for s in kept)
            notes.append(f"  starts: {first:.2f} s with nothing kept, then {later} s")
    print("", *notes, sep="\n")
