"""How soon a long conversation goes on after the engine was started again, without and with its KV cache on disk:

    python -m tools.measure reopen_rates MODEL... [--backend cuda] [--tokens 16384] [--repetitions 5]

The time is from the request to its first token; loading the model comes before. XDG_CACHE_HOME says where the disk is.
"""

import argparse
import random
import statistics
import time

from engine.protocol.events import TokenIds
from tools.measure.engine_process import add_models, alone, first_token, warm_model


def reopened(path: str, backend: str, n: int, limit_bytes: int) -> tuple[float, int, float, int]:
    """Seconds to the first token, how many tokens of the prompt were cached, seconds to store what was not, and the
    token. To be called in a process of its own."""
    model, draw = warm_model(path, backend, n + 64, prefix_cache_bytes=limit_bytes), random.Random(0)
    prompt = TokenIds(ids=tuple(draw.randrange(1000) for _ in range(n)))
    seconds, token, end = first_token(model, prompt, 2)
    idle = time.perf_counter()
    model.warm_up(lambda: False)
    return seconds, end.cached_n, time.perf_counter() - idle, token.id


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repetitions", type=int, default=5)


def run(given: argparse.Namespace) -> None:
    for path in given.models:
        for name, limit_bytes in (("computed", 0), ("kept", 64 << 30)):
            how = path, given.backend, given.tokens, limit_bytes
            if limit_bytes:
                print(f"storing took {alone(reopened, *how)[2]:.2f} s after the first answer")
            runs = [alone(reopened, *how) for _ in range(given.repetitions)]
            seconds, tokens = [s for s, *_ in runs], {token for *_, token in runs}
            print(
                f"{name}: {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
                f"{runs[-1][1]} tokens cached, first token {tokens}",
                flush=True,
            )
