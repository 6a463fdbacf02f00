"""A model's steps beside llama.cpp's own bench, on one machine in one run:

    python -m tests.step_rates MODEL... [--llama-bench PROGRAM] [--depths 0,4096] [--prompts 32,64,512] [--kv q8_0]

Both sides are timed at their steps: no prompt, no text and no other process between. Ours are medians of greedy
decode, one step ahead, and of prefill; llama-bench's are its means, with flash attention. `--kv` is the format of
both KV caches. `--starts N` also times a one-shot as a whole process, first with nothing kept, then with its kernels
kept. What is printed is Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

REPLY = 128


@dataclass(frozen=True)
class Rates:
    """What a side reached on a file, in tokens a second: decode by depth of the context, prefill by the prompt's
    tokens and depth."""

    decode: dict[int, float]
    prefill: dict[tuple[int, int], float]
    about: str = ""


def ours(path: str, backend: str, depths: list[int], prompts: list[int], repetitions: int, kv: str) -> Rates:
    """To be called in a process of its own, which the engine sets up as it does its worker."""
    from engine.backends import install, prepare
    from engine.events import EngineOptions, Measure

    options = EngineOptions(
        model_path=path, backend=backend, context_length=max(depths) + max(*prompts, REPLY) + 1, kv=kv
    )
    install(prepare(options))
    from tinygrad import Device

    from engine.model.generate import TextModel

    model = TextModel(options, lambda _: None)
    model.warm_up(lambda: False)
    runner, device, draw = model._runner, Device[Device.DEFAULT], random.Random(0)
    ids = [draw.randrange(1000) for _ in range(max(depths) + max(prompts))]

    def prefill(tokens: list[int], position: int) -> None:
        for start in range(0, len(tokens), runner.max_chunk):
            runner.prefill(tokens[start : start + runner.max_chunk], position + start)
        device.synchronize()

    def decode(position: int) -> None:
        token = 1
        for i in range(REPLY):
            token = runner.decode(token, position + i, run_ahead=i < REPLY - 1)

    def rates(step: Callable[[int], None], n: int) -> Iterator[tuple[int, float]]:
        for depth in depths:
            prefill(ids[:depth], 0)
            step(depth)  # what a first time needs
            took = [_seconds(lambda at=depth: step(at)) for _ in range(repetitions)]
            yield depth, n / statistics.median(took)

    decoded = dict(rates(decode, REPLY))
    prefilled: dict[tuple[int, int], float] = {}
    for n in prompts:

        def prompt(depth: int, n: int = n) -> None:
            prefill(ids[depth : depth + n], depth)

        prefilled |= {(n, depth): rate for depth, rate in rates(prompt, n)}
    measured = model.measure(Measure(request_id=0))
    read = model.ready.weight_bytes_per_token
    about = (
        f"{measured.kernels_per_token} kernels and {read / 1e6:,.0f} MB of weights a token, "
        f"{read * decoded[depths[0]] / 1e9:,.0f} of the {measured.copy_gbps:,.0f} GB/s of a copy; "
        f"{model.ready.backend} on {model.ready.device_name}"
    )
    return Rates(decoded, prefilled, about)


def _seconds(run: Callable[[], None]) -> float:
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
    decode = {test["n_depth"]: test["avg_ts"] for test in tests if test["n_gen"]}
    prefill = {(test["n_prompt"], test["n_depth"]): test["avg_ts"] for test in tests if test["n_prompt"]}
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF files")
    parser.add_argument("--backend", default="auto")
    numbers = lambda text: [int(n) for n in text.split(",")]
    parser.add_argument("--depths", default="0,4096", type=numbers)
    parser.add_argument("--prompts", default="512", type=numbers, help="tokens of the prompts")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--kv", default="f16", help="the format of the KV cache")
    parser.add_argument("--llama-bench", metavar="PROGRAM")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="llama-bench's")
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="one-shots with kept kernels")
    given = parser.parse_args()
    prompts = [(n, depth) for n in given.prompts for depth in given.depths]
    tests = [f"tg{REPLY} at {depth}" for depth in given.depths] + [
        f"pp{n} at {depth}" for n, depth in prompts
    ]
    print(f"| | {' | '.join(tests)} |")
    print("|---" * (1 + len(tests)) + "|", flush=True)
    notes = []
    for path in given.models:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
            our = own.submit(
                ours, path, given.backend, given.depths, given.prompts, given.repetitions, given.kv
            ).result()
        their = Rates({}, {})
        if given.llama_bench:
            their = theirs(given.llama_bench, path, given.depths, given.prompts, 5, given.threads, given.kv)
        cells = [pair(our.decode[depth], their.decode.get(depth)) for depth in given.depths]
        cells += [pair(our.prefill[test], their.prefill.get(test)) for test in prompts]
        print(f"| {Path(path).stem} | " + " | ".join(cells) + " |", flush=True)
        notes.append(f"{Path(path).stem}: {our.about}" + (f"; beside {their.about}" if their.about else ""))
        if given.starts:
            first, *kept = starts(path, given.backend, given.starts)
            notes.append(
                f"  starts: {first:.2f} s with nothing kept, then {', '.join(f'{s:.2f}' for s in kept)} s"
            )
    print("", *notes, sep="\n")


if __name__ == "__main__":
    main()
