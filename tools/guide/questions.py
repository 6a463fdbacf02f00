r"""Questions with known answers that are not in the training data, written by hand in other words.

The questions in held_out.txt judge the guide. Those in development.txt judge changes of the corpus on the way, so that
nobody looks at the first. A line is

    question >> next question => fact & fact | the same in other words

under a [topic]; \n in a question is a new line. The answer to the last question is judged: it must contain each fact,
in one of its forms.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.guide.wording import gist, normalized


class Question(NamedTuple):
    """`turns` are asked one after another. `must`: the answer must contain one text of each inner sequence."""

    topic: str
    turns: tuple[str, ...]
    must: tuple[tuple[str, ...], ...]


def read(path: Path) -> list[Question]:
    """Raises ValueError for a line that is not a question."""
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
            asked = tuple(turn.strip().replace("\\n", "\n") for turn in turns.split(" >> "))
            questions.append(Question(topic, asked, facts))
    return questions


def holds(answer: str, must: Sequence[Sequence[str]]) -> bool:
    """Whether `answer` contains a form of every fact, in upper or lower case."""
    low = answer.lower()
    return all(any(form.lower() in low for form in fact) for fact in must)


def loops(answer: str) -> bool:
    """Whether the answer contains the same four words three times."""
    words = answer.split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return any(runs.count(run) >= 3 for run in set(runs))


def judge(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, Any]:
    """How many answers are right, in total and by topic, how many loop, and the wrong answers."""
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


def excluded_turns(questions: Sequence[Question], stop_words: Collection[str]) -> Iterator[str]:
    """Every turn that must not be in the training data, normalized. Turns that anybody may say are left out: those of
    one or two words, and later turns with fewer than three words besides the `stop_words`."""
    for question in questions:
        for number, turn in enumerate(question.turns):
            if len(normalized(turn).split()) > 2 and (number == 0 or gist(turn, stop_words)):
                yield normalized(turn)


HELD_OUT = read(Path(__file__).with_name("held_out.txt"))
DEVELOPMENT = read(Path(__file__).with_name("development.txt"))
