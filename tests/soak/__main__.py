"""Faults and hostile input, again and again: python -m tests.soak [PART ...] [--share N]

Prints a row of a Markdown table for each part: the fault, the tries, how they ended, what was lost, the longest time;
to the standard error, every ten seconds how far the row is.
The exit code is 1 if anything was lost. `make soak` runs all of it, in about two hours on two cores; `--share 0.1`
makes a tenth of the tries. tests/soak/test_soak.py runs a few of most parts.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

from tests import environment
from tests.soak import (
    cancelled_guesses,
    changed_blocks,
    damaged_histories,
    damaged_weights,
    engine_faults,
    full_disks,
    gpu_faults,
    gpu_memory,
    hostile_encoders,
    hostile_files,
    hostile_hub,
    hostile_pictures,
    long_server,
    many_models,
    program_deaths,
    protocol_mutants,
    screen_storms,
    searches,
    served_chats,
    server_attacks,
    server_schemas,
    suspensions,
    switches,
    tool_servers,
    tunes,
)
from tests.soak.counts import Counts

PROGRESS_S = 10.0
PARTS = {
    "files": (hostile_files.run, 80_000),
    "pictures": (hostile_pictures.run, 10_000),
    "encoders": (hostile_encoders.run, 1_000),
    "weights": (damaged_weights.run, 2_000),
    "guesses": (cancelled_guesses.run, 5_000),
    "blocks": (changed_blocks.run, 1_000),
    "history": (damaged_histories.run, 3_000),
    "hub": (hostile_hub.run, 20_000),
    "engine": (engine_faults.run, 1_000),
    "program": (program_deaths.run, 1_000),
    "disk": (full_disks.run, 100),
    "screen": (screen_storms.run, 1_000),
    "search": (searches.run, 100),
    "gpu-memory": (gpu_memory.run, 100),
    "gpu-faults": (gpu_faults.run, 200),
    "gpu-search": (partial(searches.run, on_gpu=True), 100),
    "tune": (tunes.run, 100),
    "switch": (switches.run, 500),
    "served": (served_chats.run, 300),
    "suspension": (suspensions.run, 400),
    "request": (server_schemas.run, 20_000),
    "protocol": (protocol_mutants.run, 40_000),
    "models": (many_models.run, 20_000),
    "tools": (tool_servers.run, 1_000),
    "attack": (server_attacks.run, 4_000),
    "model-attack": (partial(server_attacks.run, real=True), 16_000),
    "memory": (long_server.run, 200_000),
}
"""What runs a part, and how often."""


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    """Prints to the standard error, again and again, how far a part is."""
    is_over = threading.Event()

    def say() -> None:
        while not is_over.wait(PROGRESS_S):
            print(Counts.latest and Counts.latest.row(), file=sys.stderr, flush=True)

    Counts.latest = None
    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--share", type=float, default=1.0, help="of the tries")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 1_000_000, help="of what is chosen at random"
    )
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(unknown)}")
    environment.enter()
    print(
        f"seed {args.seed}\n\n| fault | tries | survived | lost | longest |\n|---|---|---|---|---|",
        flush=True,
    )
    lost = 0
    try:
        for name in args.parts or PARTS:
            run, tries = PARTS[name]
            with _progress():
                counts = run(max(1, round(tries * args.share)), args.seed)
            lost += counts.lost.total()
            print(counts.row(), flush=True)
    finally:
        environment.leave()
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
