"""How soon a long conversation goes on after the engine was started again, without and with its KV cache on disk:

    python -m tests.reopen_rates MODEL [--backend cuda] [--tokens 16384] [--repetitions 5]

The time is from the request to its first token; loading the model comes before. XDG_CACHE_HOME says where the disk is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor


def first_token_s(path: str, backend: str, n: int, limit_bytes: int) -> tuple[float, int, float, int]:
    """Seconds to the first token, how many tokens of the prompt were cached, seconds to store what was not, and the
    token. To be called in a process of its own."""
    from engine.backends import install, prepare
    from engine.events import EngineOptions, Generate, Sampling, Token, TokenIds

    options = EngineOptions(
        model_path=path, backend=backend, context_length=n + 64, prefix_cache_bytes=limit_bytes
    )
    install(prepare(options))
    from engine.model.generate import TextModel

    model, draw = TextModel(options, lambda _: None), random.Random(0)
    model.warm_up(lambda: False)
    ids = tuple(draw.randrange(1000) for _ in range(n))
    found: list[tuple[float, int]] = []

    def report(event: object) -> None:
        if isinstance(event, Token):
            found.append((time.perf_counter(), event.id))

    request = Generate(request_id=1, prompt=TokenIds(ids=ids), sampling=Sampling(temperature=0), max_tokens=2)
    started = time.perf_counter()
    end = model.generate(request, report, lambda: False)
    idle = time.perf_counter()
    model.warm_up(lambda: False)
    return found[0][0] - started, end.cached_n, time.perf_counter() - idle, found[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()

    def run(limit_bytes: int) -> tuple[float, int, float, int]:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
            arguments = given.model, given.backend, given.tokens, limit_bytes
            return own.submit(first_token_s, *arguments).result()

    for name, limit_bytes in (("computed", 0), ("kept", 64 << 30)):
        if limit_bytes:
            print(f"storing took {run(limit_bytes)[2]:.2f} s after the first answer")
        runs = [run(limit_bytes) for _ in range(given.repetitions)]
        seconds = [s for s, *_ in runs]
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        tokens = {token for *_, token in runs}
        print(
            f"{name}: {statistics.median(seconds):.3f} s ({spread}), {runs[-1][1]} tokens cached, first token {tokens}"
        )


if __name__ == "__main__":
    main()
