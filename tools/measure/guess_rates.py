"""Answers whose next tokens are guessed and checked (`engine.runtime.speculation`), beside the same without guesses:

    python -m tools.measure guess_rates MODEL... [--backend cuda] [--streams 1,8] [--tokens 400] [--prompts FILE]
        [--draft FILE]

The prompts are those of MODEL.json, or of another such file: {"prompts": [{"share": 0.8, "ids": [...]}]}. Both kinds
take turns in one engine, so the machine is the same for both. Rates are medians of greedy answers in tokens a second
after the first token, of all streams together, which ask alike. A step's tokens are those of a reply. Texts have to be
the same; if they are not, the first token that differs is told. What is printed is Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from engine.protocol.events import Finished, Generate, Sampling, Token, TokenIds
from tools.measure.engine_process import add_models, alone, numbers, warm_model

if TYPE_CHECKING:
    from engine.model.text_model import TextModel

TURNS = 3
Texts = list[list[int]]


def answers(
    model: TextModel, prompt: list[int], streams: int, tokens: int, guesses: bool
) -> tuple[float, Texts, list[Finished]]:
    """The rate of so many answers to a prompt at the same time, their tokens, and their ends."""
    texts: Texts = [[] for _ in range(streams)]
    ends: list[Finished] = []

    def ended(end: Finished | Exception) -> None:
        if isinstance(end, Exception):
            raise end
        ends.append(end)

    for stream, text in enumerate(texts):
        request = Generate(
            request_id=stream,
            prompt=TokenIds(ids=tuple(prompt)),
            sampling=Sampling(temperature=0),
            max_tokens=tokens,
            ignore_eos=True,
            guesses=guesses,
        )
        report = lambda event, text=text: text.append(event.id) if isinstance(event, Token) else None
        model.scheduler.add(model.begin(request, report), lambda: False, ended)
    while model.scheduler.busy:
        model.scheduler.step()
    seconds = max(end.predicted_ms for end in ends) / 1e3
    return sum(end.predicted_n - 1 for end in ends) / seconds, texts, ends


def rates(
    path: str, backend: str, prompts: list[tuple[str, list[int]]], streams: int, tokens: int, **who: str
) -> list[list[str]]:
    """A line for each prompt. To be called in a process of its own."""
    context = max(len(prompt) for _, prompt in prompts) + tokens + 64
    model, lines = warm_model(path, backend, context, parallel=streams, **who), list[list[str]]()
    for name, prompt in prompts:
        found: dict[bool, list[float]] = {False: [], True: []}
        texts: dict[bool, Texts] = {}
        for _ in range(TURNS):
            for guesses in (False, True):
                rate, texts[guesses], ends = answers(model, prompt, streams, tokens, guesses)
                found[guesses].append(rate)
        plain, guessed = (statistics.median(found[guesses]) for guesses in (False, True))
        drafted, right = (sum(getattr(end, key) for end in ends) for key in ("draft_n", "draft_n_accepted"))
        without, with_guesses = (itertools.chain.from_iterable(texts[g]) for g in (False, True))
        pairs = zip(without, with_guesses, strict=True)
        parts = next((str(i % tokens) for i, (a, b) in enumerate(pairs) if a != b), "none")
        share = f"{right / drafted:.2f}" if drafted else "-"
        gain = f"{guessed / plain:.2f}x"
        lines.append(
            [name, str(streams), f"{plain:,.1f}", f"{guessed:,.1f}", gain, share, f"{right:,}", parts]
        )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--streams", type=numbers, default=[1])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--draft", default="", help="the file of a draft model")


def run(args: argparse.Namespace) -> None:
    print("| model | prompt | streams | tok/s | with guesses | gain | share right | right | differs at |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in args.models:
        file = args.prompts or Path(f"{path}.json")
        prompts = [(f"{p['share']:g}", p["ids"]) for p in json.loads(file.read_text())["prompts"]]
        for streams in args.streams:
            who = {"speculate": args.speculate, "draft": args.draft}
            for line in alone(rates, path, args.backend, prompts, streams, args.tokens, **who):
                print("| " + " | ".join([Path(path).stem, *line]) + " |", flush=True)
