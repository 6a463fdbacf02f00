"""Questions with known answers that training never sees, written by hand in words of their own.

held_out.txt is what the guide is judged by. development.txt is what its making is judged by on the way, so that
the first stays unseen. A line is

    question >> next question => fact & fact | the same in other words

under a [topic]; the answer to the last question is judged. Each fact must be in it, in one of its forms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.guide.wording import gist, normalized


class Question(NamedTuple):
    """`turns` are asked one after another. `must`: of each inner sequence one text must be in the answer."""

    topic: str
    turns: tuple[str, ...]
    must: tuple[tuple[str, ...], ...]


def read(path: Path) -> list[Question]:
    """Raises ValueError for a line that is no question."""
    questions: list[Question] = []
    topic = ""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.startswith("[") and line.endswith("]"):
            topic = line[1:-1]
        elif line.strip() and not line.startswith("#"):
            turns, arrow, must = line.rpartition(" => ")
            if not arrow or not topic:
                raise ValueError(f"{path.name}, line {number}: a question and its facts stand around =>")
            facts = tuple(tuple(form.strip() for form in fact.split(" | ")) for fact in must.split(" & "))
            questions.append(Question(topic, tuple(turn.strip() for turn in turns.split(" >> ")), facts))
    return questions


def holds(answer: str, must: Sequence[Sequence[str]]) -> bool:
    """Whether `answer` has a form of every fact, in any case of letters."""
    low = answer.lower()
    return all(any(form.lower() in low for form in fact) for fact in must)


def loops(answer: str) -> bool:
    """Whether the answer says the same four words three times."""
    words = answer.split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return any(runs.count(run) >= 3 for run in set(runs))


def judge(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, Any]:
    """How many answers are right, in all and by topic, and what was said instead in the others."""
    topics: dict[str, list[int]] = {}
    wrong = []
    for question, answer in zip(questions, answers, strict=True):
        right = holds(answer, question.must)
        count = topics.setdefault(question.topic, [0, 0])
        count[0] += right
        count[1] += 1
        if not right:
            wrong.append(
                {"topic": question.topic, "turns": question.turns, "must": question.must, "answer": answer}
            )
    return {
        "right": sum(right for right, _ in topics.values()),
        "of": len(questions),
        "looping": sum(map(loops, answers)),
        "topics": topics,
        "wrong": wrong,
    }


def asked(questions: Sequence[Question], small: Collection[str]) -> Iterator[str]:
    """Every turn of every question that must not be in training, normalized: all but those of a word or two,
    and later turns with fewer than three words besides the `small` ones, which anybody may say."""
    for question in questions:
        for number, turn in enumerate(question.turns):
            if len(normalized(turn).split()) > 2 and (number == 0 or gist(turn, small)):
                yield normalized(turn)


HELD_OUT = read(Path(__file__).with_name("held_out.txt"))
DEVELOPMENT = read(Path(__file__).with_name("development.txt"))
