"""What JSON schemas, log-probabilities, penalties and biases of some streams cost all of them:

    python -m tools.measure request_rates MODEL... [--backend cuda] [--streams 16] [--tokens 128]

Every second stream asks so; the others are greedy. All kinds take turns in one engine, so the machine is the same for
all. Rates are medians in tokens a second after the first token, of all streams together; the times from token to token
are of all streams, as a client sees them. What is printed is Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.protocol.events import Event, Finished, Generate, Grammar, Sampling, Token, TokenIds
from tools.measure.engine_process import add_models, alone, warm_model

if TYPE_CHECKING:
    from engine.model.text_model import TextModel

TURNS, PROMPT = 5, 64
_GREEDY = Sampling(temperature=0)
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b"]}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_SCHEMA = json.dumps({"type": "array", "items": _PERSON, "minItems": 200})

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"sampling": Sampling(temperature=0.8, top_p=0.95, seed=1)},
    "penalties and biases": {
        "sampling": Sampling(temperature=0.8, seed=1, repeat_penalty=1.1, presence_penalty=0.5),
        "logit_bias": ((5, 2.0), (6, -2.0)),
    },
    "20 log-probabilities": {"logprobs": 20},
    "JSON schema": {"grammar": Grammar(kind="json_schema", source=_SCHEMA)},
}


def rate(model: TextModel, streams: int, tokens: int, kind: dict[str, Any]) -> tuple[float, list[float]]:
    """The rate of so many answers at the same time, of which every second one is of a kind, and the times in ms from
    token to token."""
    ends, gaps_ms = list[Finished](), list[float]()

    def ended(end: Finished | Exception) -> None:
        if isinstance(end, Exception):
            raise end
        ends.append(end)

    def begin(stream: int) -> None:
        last_s = 0.0

        def report(event: Event) -> None:
            nonlocal last_s
            if isinstance(event, Token):
                now_s = time.perf_counter()
                if last_s:
                    gaps_ms.append((now_s - last_s) * 1e3)
                last_s = now_s

        request = Generate(
            request_id=stream,
            prompt=TokenIds(ids=tuple(range(10 + stream, 10 + stream + PROMPT))),
            max_tokens=tokens,
            ignore_eos=True,
            guesses=False,
            **{"sampling": _GREEDY} | (kind if stream % 2 else {}),
        )
        model.scheduler.add(model.begin(request, report), lambda: False, ended)

    for stream in range(streams):
        begin(stream)
    while model.scheduler.busy:
        model.scheduler.step()
    seconds = max(end.predicted_ms for end in ends) / 1e3
    return sum(end.predicted_n - 1 for end in ends) / seconds, gaps_ms


def rates(path: str, backend: str, streams: int, tokens: int) -> list[list[str]]:
    """A line for each kind. To be called in a process of its own."""
    model = warm_model(path, backend, PROMPT + tokens + 64, parallel=streams)
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    gaps: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(TURNS + 1):
        for name, kind in KINDS.items():
            a_rate, gaps_ms = rate(model, streams, tokens, kind)
            if turn:  # the first one is the warm-up
                found[name].append(a_rate)
                gaps[name] += gaps_ms
    greedy = statistics.median(found["greedy"])
    lines = []
    for name in KINDS:
        total, by_percent = statistics.median(found[name]), statistics.quantiles(gaps[name], n=100)
        lines.append(
            [
                name,
                f"{total:,.0f}",
                f"{total / greedy:.2f}x",
                f"{by_percent[49]:.2f}",
                f"{by_percent[98]:.2f}",
            ]
        )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)


def run(args: argparse.Namespace) -> None:
    print(
        "| model | every second stream | tok/s | to greedy | p50, ms | p99, ms |\n" + "|---" * 6 + "|",
        flush=True,
    )
    for path in args.models:
        for line in alone(rates, path, args.backend, args.streams, args.tokens):
            print("| " + " | ".join([Path(path).stem, *line]) + " |", flush=True)
