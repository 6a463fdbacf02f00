"""How soon the first token comes when the last message of a long conversation is answered again, or edited:

    python -m tests.turn_rates MODEL... [--backend cuda] [--tokens 8192] [--repetitions 5]

Only what follows the beginning that is in the KV cache is computed. A model with recurrent state goes back to a
checkpoint before that place, so it may compute more: it belongs beside a model without such a state, of about the same
size. The time includes the chat template and the tokenizer.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.generated_model import PASSAGE

REPLY = 64  # tokens
Times = dict[str, list[tuple[float, int, int]]]


def first_token_times(path: str, backend: str, n: int, repetitions: int) -> Times:
    """For each way of going on with a conversation of `n` tokens: milliseconds to the first token, tokens that were
    computed for it, and tokens of the prompt. To be called in a process of its own."""
    from engine.backends import install, prepare
    from engine.events import Chat, EngineOptions, Generate, Message, Sampling, Thinking, Token

    options = EngineOptions(model_path=path, backend=backend, context_length=n + 1024)
    install(prepare(options))
    from engine.model.generate import TextModel

    model, draw = TextModel(options, lambda _: None), random.Random(0)
    model.warm_up(lambda: False)
    gc.freeze()  # as the engine's process does: no collection visits the model in the middle of an answer
    text = lambda words: " ".join(draw.choices(PASSAGE.split(), k=words))

    def ask(messages: list[Message]) -> tuple[float, int, int]:
        request = Generate(
            request_id=1,
            prompt=Chat(messages=tuple(messages)),
            sampling=Sampling(temperature=0),
            max_tokens=REPLY,
            ignore_eos=True,
        )
        came: list[float] = []

        def report(event: object) -> None:
            if isinstance(event, Token | Thinking):
                came.append(time.perf_counter())

        started = time.perf_counter()
        end = model.generate(request, report, lambda: False)
        return (came[0] - started) * 1e3, end.prompt_n - end.cached_n, end.prompt_n

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF files")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    for path in given.models:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
            arguments = path, given.backend, given.tokens, given.repetitions
            times = own.submit(first_token_times, *arguments).result()
        for name, runs in times.items():
            ms = [run[0] for run in runs]
            computed, prompt = sorted({run[1] for run in runs}), runs[-1][2]
            spread = f"{min(ms):.1f} to {max(ms):.1f}"
            print(
                f"{Path(path).stem}, {name}: {statistics.median(ms):.1f} ms ({spread}), {computed} of {prompt} tokens "
                "computed",
                flush=True,
            )


if __name__ == "__main__":
    main()
