"""How soon the first token comes when the last message of a long conversation is answered again, or edited:

    python -m tools.measure turn_rates MODEL... [--backend cuda] [--tokens 8192] [--repetitions 5]

Only what follows the beginning that is in the KV cache is computed. A model with recurrent state goes back to a
checkpoint before that place, so it may compute more: it belongs beside a model without such a state, of about the same
size. The time includes the chat template and the tokenizer.
"""

import argparse
import random
import statistics
from pathlib import Path

from engine.protocol.events import Chat, Message
from tests.generated_model import PASSAGE
from tools.measure.engine_process import add_models, alone, first_token, warm_model

REPLY = 64  # tokens
Times = dict[str, list[tuple[float, int, int]]]


def first_token_times(path: str, backend: str, n: int, repetitions: int) -> Times:
    """For each way of going on with a conversation of `n` tokens: milliseconds to the first token, tokens that were
    computed for it, and tokens of the prompt. To be called in a process of its own."""
    model, draw = warm_model(path, backend, n + 1024), random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choices(PASSAGE.split(), k=words))

    def ask(messages: list[Message]) -> tuple[float, int, int]:
        seconds, _, end = first_token(model, Chat(messages=tuple(messages)), REPLY)
        return seconds * 1e3, end.prompt_n - end.cached_n, end.prompt_n

    question = Message(role="user", content=text(60))
    turn = Message(role="user", content=text(150)), Message(role="assistant", content=text(200))
    turn_tokens = ask([*turn, *turn, question])[2] - ask([*turn, question])[2]
    earlier = [
        Message(role=message.role, content=text(len(message.content.split())))
        for _ in range(n // turn_tokens)
        for message in turn
    ]
    times: Times = {"answer again": [], "edit": []}
    for repetition in range(repetitions + 1):
        ask([*earlier, question])
        again = ask([*earlier, question])
        edited = ask([*earlier, Message(role="user", content=text(60))])
        if repetition:  # the first ones capture steps
            times["answer again"].append(again)
            times["edit"].append(edited)
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=5)


def run(given: argparse.Namespace) -> None:
    for path in given.models:
        times = alone(first_token_times, path, given.backend, given.tokens, given.repetitions)
        for name, runs in times.items():
            ms = [run[0] for run in runs]
            computed, prompt = sorted({run[1] for run in runs}), runs[-1][2]
            print(
                f"{Path(path).stem}, {name}: {statistics.median(ms):.1f} ms ({min(ms):.1f} to {max(ms):.1f}), "
                f"{computed} of {prompt} tokens computed",
                flush=True,
            )
