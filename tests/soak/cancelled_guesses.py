"""Replies whose next tokens are guessed, several at a time, and cancelled at random moments."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from engine.backends import prepare
from engine.protocol.events import EngineOptions, Finished, Generate, Sampling, Token, TokenIds
from tests import environment, generated_model
from tests.soak.child import follow, report
from tests.soak.counts import Counts

_CONTEXT, _AT_ONCE = 256, 4


def run(tries: int, number: int = 0) -> Counts:
    """Each text is that of the model without guesses, as far as it goes; then no block is held."""
    counts = Counts("replies with guesses that are cancelled")
    follow(counts, "tests.soak.cancelled_guesses", number, tries)
    return counts


class _Reply:
    """A request, which is cancelled once it has `most` tokens."""

    def __init__(self, model: Any, prompt: tuple[int, ...], sampling: Sampling, n: int, most: int) -> None:
        self.prompt, self.sampling, self.n = prompt, sampling, n
        self.said: list[int] = []
        self.end: Finished | Exception | None = None
        request = Generate(
            request_id=1,
            prompt=TokenIds(ids=prompt),
            sampling=sampling,
            max_tokens=n,
            ignore_eos=True,
            client=str(most % 2),
        )
        take = lambda event: self.said.append(event.id) if isinstance(event, Token) else None
        keep = lambda end: setattr(self, "end", end)
        model.scheduler.add(model.begin(request, take), lambda: len(self.said) >= most, keep)


def _round(model: Any, plain: Any, choose: random.Random) -> tuple[str, ...]:
    """How the replies of some requests at once went."""
    replies = []
    for _ in range(choose.randint(1, _AT_ONCE + 2)):
        piece = [choose.randrange(200) for _ in range(choose.randint(3, 9))]
        prompt = tuple((piece * 20)[: choose.randint(4, 90)])
        sampling = Sampling(temperature=choose.choice((0, 0, 0.8)), seed=choose.randrange(9))
        n = choose.randint(1, 80)
        replies.append(_Reply(model, prompt, sampling, n, choose.choice((0, 1, choose.randint(1, n), 999))))
        for _ in range(choose.randrange(6)):
            model.scheduler.step()
    while model.scheduler.busy:
        model.scheduler.step()
    assert all(count.held == 0 for count in model.scheduler.blocks.counts()), "blocks are held"
    return tuple(_outcome(reply, plain) for reply in replies)


def _outcome(reply: _Reply, plain: Any) -> str:
    assert isinstance(reply.end, Finished), reply.end
    alone = _Reply(plain, reply.prompt, reply.sampling, reply.n, 999)
    while not alone.end:
        plain.scheduler.step()
    assert reply.said == alone.said[: len(reply.said)], "another text"
    assert reply.end.reason == "cancelled" or reply.said == alone.said, "a text that is cut"
    guessed = "with guesses" if reply.end.draft_n else "without guesses"
    return f"{'cancelled' if reply.end.reason == 'cancelled' else 'whole'} {guessed}"


def main(number: int, tries: int) -> None:
    environment.enter()
    prepare(EngineOptions(model_path="", backend="CPU"))
    from engine.model.text_model import TextModel  # tinygrad reads the environment when it is imported

    with tempfile.TemporaryDirectory() as folder, mock.patch("engine.runtime.speculation.WORTH", 0.0):
        # as float32, so that no two tokens are as probable but for what is rounded
        path = generated_model.write(Path(folder, "model.gguf"), architecture="qwen3", layers=1, quant="F32")
        options = EngineOptions(model_path=str(path), context_length=_CONTEXT)
        plain = TextModel(EngineOptions(**_fields(options, speculate="off")), lambda _: None)
        model = TextModel(EngineOptions(**_fields(options, parallel=_AT_ONCE)), lambda _: None)
        choose, outcomes = random.Random(number), list[str]()

        def attempt() -> str:
            if not outcomes:
                outcomes.extend(_round(model, plain, choose))
            return outcomes.pop()

        for rows in model._runner.check_rows:
            model._runner.prepare_check(rows)
        for i in range(tries):
            report(i, attempt)


def _fields(options: EngineOptions, **changes: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__struct_fields__} | changes


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
