"""Steps of replies and pieces of a prompt on an NVIDIA GPU, beside those without pieces:

    python -m tools.measure mixed_rates MODEL... [--backend cuda] [--rows 7,31] [--depth 512] [--prompt 2048]

For each number of replies: the median milliseconds of a decode step, and for each room that a step may have for prompts
the median of a step with a piece of so many tokens, how many times as long that is, and the tokens of the prompt a
second. Each step is launched before the tokens of the one before are read. What is printed is Markdown.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.measure.engine_process import Sequences, add_models, alone, numbers, runners

STEPS = 24


def step_times(path: str, backend: str, rows: int, depth: int, prompt: int) -> list[tuple[int, float]]:
    """The room for prompts of each step, 0 first, and its median seconds. To be called in a process of its own."""
    open_runner, vocab = runners(path, backend)
    from engine.runtime.model_runner import Following, Slot

    draw, runner = random.Random(0), open_runner(max(depth + 16 * STEPS, prompt), parallel=rows + 1)
    for size in runner.chunk_sizes:
        runner.prepare(size)
    text = [draw.randrange(min(1000, vocab)) for _ in range(max(depth, prompt))]
    sequences, tokens = Sequences(runner), [draw.randrange(min(1000, vocab)) for _ in range(rows)]
    for s in range(rows):
        sequences.prefill(text[:depth], sequence=s)
    sequences.blocks.reserve(rows, prompt)
    found = []
    for room in (0, *runner.piece_sizes(rows)):
        took, at = [], 0

        def piece(room: int = room) -> Sequence[Slot]:
            nonlocal at
            at = at if at + room <= prompt else 0
            slots = [Slot(rows, tuple(text[at : at + room]), at, "none")] if room else []
            at += room
            return slots

        due: list[Sequence[Slot]] = []  # the pieces of the next step, once they are chosen

        def ahead(piece: Callable[[], Sequence[Slot]] = piece, due: list[Sequence[Slot]] = due) -> Following:
            due.append(piece())
            return Following(due[-1])

        for _ in range(STEPS):
            started = time.perf_counter()
            tokens = sequences.decode(tokens, ahead, pieces=due.pop() if due else piece())
            took.append(time.perf_counter() - started)
        sequences.decode(tokens, pieces=due.pop() if due else piece())
        found.append((room, statistics.median(took[2:])))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--rows", default="7", type=numbers)
    parser.add_argument("--depth", default=512, type=int, help="tokens of each reply before the first step")
    parser.add_argument("--prompt", default=2048, type=int, help="tokens of the prompt")


def run(given: argparse.Namespace) -> None:
    print("| | replies | room | ms | times | prompt, tok/s |\n" + "|---" * 6 + "|", flush=True)
    for path in given.models:
        for rows in given.rows:
            found = alone(step_times, path, given.backend, rows, given.depth, given.prompt)
            _, plain = found[0]
            for room, seconds in found:
                cells = f"{room} | {seconds * 1e3:.2f} | {seconds / plain:.2f} | {room / seconds:,.0f}"
                print(f"| {Path(path).stem} | {rows} | {cells} |", flush=True)
