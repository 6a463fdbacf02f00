"""Counts how many held-out questions the guide answers right, asked through the engine.

python -m tools.guide.evaluate [--model FILE] [--questions development] [--backend CUDA] [--deep TOKENS]

report.md holds what this prints for the built-in model.
"""

import argparse
import collections
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import presets
from engine import backends
from engine.protocol.events import (
    Chat,
    EngineOptions,
    Event,
    Finished,
    Generate,
    Message,
    Sampling,
    Token,
    decode_rate,
)
from tools.guide import template
from tools.guide.questions import DEVELOPMENT, HELD_OUT, Question, judge

MAX_TOKENS = 120
GREEDY = Sampling(temperature=0.0)


class Chatter:
    """Asks a model file, greedily. `tokens_per_s` are the decode speeds of its answers."""

    def __init__(self, path: Path, backend: str = "CPU") -> None:
        options = EngineOptions(model_path=str(path), backend=backend)
        backends.prepare(options)
        # `prepare` sets the environment that tinygrad reads when it is imported.
        from engine.model.text_model import TextModel

        self._model = TextModel(options, lambda event: None)
        self.tokens_per_s: list[float] = []

    def ask(self, turns: Sequence[str], before: Sequence[Message] = ()) -> str:
        """The answer to the last of `turns` after the chat `before`. The model also answers the turns before it."""
        messages = list(before)
        for turn in turns:
            messages.append(Message(role="user", content=turn))
            messages.append(Message(role="assistant", content=self._answer(messages)))
        return messages[-1].content

    def _answer(self, messages: Sequence[Message]) -> str:
        pieces: list[str] = []

        def report(event: Event) -> None:
            if isinstance(event, Token):
                pieces.append(event.text)

        request = Generate(
            request_id=1, prompt=Chat(messages=tuple(messages)), sampling=GREEDY, max_tokens=MAX_TOKENS
        )
        end: Finished = self._model.generate(request, report, lambda: False)
        self.tokens_per_s.append(decode_rate(end.predicted_n, end.predicted_ms))
        return "".join(pieces)


def long_chat(tokens: int, seed: int) -> list[Message]:
    """A chat of about so many tokens of the built-in model: questions that it may be trained on, answered right."""
    from tools.guide import export, facts
    from tools.guide.bpe import from_merges
    from tools.guide.conversations import Conversations

    shipped = export.read(presets.guide_path())
    bpe = from_merges(shipped.tokens, shipped.merges)
    source, messages = Conversations(facts.load(), random.Random(seed)), list[Message]()
    while True:
        for message in source.draw():
            if message.role == "user" and len(_ids(bpe, messages)) >= tokens:
                return messages
            if message.role != "system":
                role: Literal["user", "assistant"] = "user" if message.role == "user" else "assistant"
                messages.append(Message(role=role, content=message.content))


def _ids(bpe: Any, messages: Sequence[Message]) -> Sequence[int]:
    text = template.rendered([template.Message(m.role, m.content) for m in messages])
    ids: Sequence[int] = bpe.encode(text, add_special_tokens=False).ids
    return ids


def confusion(
    wrong: Sequence[Mapping[str, Any]], answers: Mapping[str, str]
) -> dict[str, collections.Counter[str]]:
    """For the topic of each wrong answer, the topics of the given answers. `answers` maps an answer to its topic."""

    def topic(answer: str) -> str:
        words = set(re.findall(r"\w+", answer))
        nearest = max(answers, key=lambda known: len(words & set(re.findall(r"\w+", known))) / len(known))
        return answers.get(answer) or answers[nearest]

    table: dict[str, collections.Counter[str]] = {}
    for item in wrong:
        table.setdefault(item["topic"], collections.Counter())[topic(item["answer"])] += 1
    return table


def report(questions: Sequence[Question], answers: Sequence[str]) -> str:
    """A Markdown table of the score by topic, with the topics that the wrong answers belong to."""
    from tools.guide import facts

    result = judge(questions, answers)
    instead = confusion(result["wrong"], {fact.answer: fact.topic for fact in facts.load().facts.values()})
    lines = ["| topic | right | of | wrong answers come from |", "|---|---|---|---|"]
    for topic, (right, count) in result["topics"].items():
        sources = ", ".join(
            f"{name} {n}" for name, n in instead.get(topic, collections.Counter()).most_common()
        )
        lines.append(f"| {topic} | {right} | {count} | {sources} |")
    share = result["right"] / result["of"]
    lines.append(
        f"| all | {result['right']} | {result['of']} | {share:.1%} right, {result['looping']} loop |"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=presets.guide_path())
    parser.add_argument("--backend", default="CPU")
    parser.add_argument("--questions", choices=("held-out", "development"), default="held-out")
    parser.add_argument(
        "--deep",
        type=int,
        metavar="TOKENS",
        help="only questions of several turns, at the end of a chat so long",
    )
    parser.add_argument("--wrong", action="store_true", help="list the wrong answers")
    given = parser.parse_args()
    questions = HELD_OUT if given.questions == "held-out" else DEVELOPMENT
    before: list[list[Message]] = [[]]
    if given.deep:
        questions = [question for question in questions if len(question.turns) > 1]
        before = [long_chat(given.deep, seed) for seed in range(5)]
    chatter = Chatter(given.model, given.backend)
    answers = [
        chatter.ask(question.turns, before[i * len(before) // len(questions)])
        for i, question in enumerate(questions)
    ]
    where = f", after {given.deep} tokens of chat" if given.deep else ""
    print(f"{given.model.name}, {given.questions} questions{where}, greedy, on {given.backend}\n")
    print(report(questions, answers))
    speeds = sorted(chatter.tokens_per_s)
    print(f"\ndecode {speeds[len(speeds) // 2]:.0f} tok/s (median of {len(speeds)} answers)")
    if given.wrong:
        print(json.dumps(judge(questions, answers)["wrong"], indent=1))


if __name__ == "__main__":
    main()
