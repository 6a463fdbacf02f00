"""Draws random conversations with the guide: questions, follow-up questions, small talk, questions it declines."""

import random
import string
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tools.guide.facts import PRONOUNS, Fact, Knowledge
from tools.guide.signs import accented, emoji, signed
from tools.guide.sources import IN_LINE_MODE
from tools.guide.starting import NAMED, Starting
from tools.guide.template import Message
from tools.guide.wording import SIGNED, gist, normalized

QUESTION_COUNTS = ((1, 40), (2, 20), (3, 14), (4, 8), (6, 8), (9, 6), (14, 3), (22, 1), (46, 3))
"""(questions in a conversation, weight of this count). The longest fill the context."""
STANDALONE_WEIGHTS = {
    "fact": 62, "first": 22, "topic": 11, "calculate": 2, "live": 3, "write": 4, "talk": 14, "unclear": 2,
    "dangling": 2, "name": 9, "file": 4, "start": 22, "language": 5,
}  # fmt: skip
FOLLOW_UP_CHANCE = 0.5
"""The share of questions that follow up on the previous answer."""
_KEEPS_THE_SUBJECT = {"talk.ok", "talk.thanks", "talk.really", "talk.wait", "talk.praise", "talk.sorry"}
"""Small talk that does not change the subject."""


@cache
def _project_files() -> list[tuple[str, list[str]]]:
    """The names and lines of the project's own files of text, by name."""
    root = Path(__file__).parents[2]
    found = [
        path
        for pattern in ("*.md", "*.toml", "Makefile", "app/**/*.py", "engine/**/*.py")
        for path in root.glob(pattern)
    ]
    texts = ((path.name, path.read_text("utf-8").splitlines()) for path in sorted(found))
    return [(name, lines) for name, lines in texts if lines]


class _FollowUp(NamedTuple):
    """One kind of follow-up question: its wordings (`patterns` with `slots`), its answer, and the fact that becomes
    the subject (None: the subject stays). `weight` is relative to other kinds. `model` is the name in the answer."""

    patterns: Sequence[str]
    slots: Mapping[str, Sequence[str]]
    answer: str
    fact: Fact | None
    weight: float
    model: str = ""


class Conversations:
    """Draws conversations without the `excluded` questions. A question also counts as excluded if it has the same
    words in another order, or with other stop words."""

    def __init__(self, knowledge: Knowledge, rng: random.Random, excluded: Collection[str] = ()) -> None:
        self._knowledge, self._rng = knowledge, rng
        self._subject: Fact | None = None
        self._last_answer, self._user_name, self._model = "", "", ""
        self._starting = Starting(knowledge)
        self._stop_words = frozenset(knowledge.grammar["noise"]["dropped"])
        self._excluded = {normalized(question) for question in excluded}
        self._gists = {gist(question, self._stop_words) for question in excluded} - {""}
        self._wording, self._grammar = knowledge.wording, knowledge.grammar
        known = [fact for fact in knowledge.facts.values() if fact.asks]
        self._plain = [fact for fact in known if fact.topic not in ("talk", "unknown topics")]
        self._talk = [fact for fact in known if fact.topic == "talk"]
        self._plain_weights = [fact.weight for fact in self._plain]
        self._by_subject: dict[str, list[Fact]] = {}
        self._by_aspect: dict[str, list[Fact]] = {}
        for fact in knowledge.facts.values():
            self._by_subject.setdefault(fact.subject, []).append(fact)
            if fact.slots.get("name") or fact.aspect in ("exit", "press"):
                self._by_aspect.setdefault(fact.aspect, []).append(fact)
        self._entries_after = {
            fact.id: [entry for entry in knowledge.follow if entry.follows(fact)]
            for fact in knowledge.facts.values()
        }
        self._first = [(name, lines) for name, lines in knowledge.first.items() if name in knowledge.facts]
        self._first_weights = [len(lines) ** 0.5 for _, lines in self._first]
        self._kinds, self._kind_weights = zip(*STANDALONE_WEIGHTS.items(), strict=True)

    def draw(self) -> list[Message]:
        """One conversation: user and assistant turns, sometimes after a system prompt."""
        rng = self._rng
        count = rng.choices([n for n, _ in QUESTION_COUNTS], [weight for _, weight in QUESTION_COUNTS])[0]
        messages = [Message("system", rng.choice(self._grammar["system"]))] if rng.random() < 0.06 else []
        self._subject, self._last_answer, self._user_name, self._model = None, "", "", ""
        for _ in range(count if count < 4 else count + rng.randrange(3)):
            question, answer = self._turn()
            messages += [Message("user", question), Message("assistant", answer)]
            self._last_answer = answer
        return messages

    def single(self) -> list[Message]:
        """One question that needs no context, and its answer."""
        self._subject, self._last_answer, self._user_name, self._model = None, "", "", ""
        while True:
            question, answer = self._standalone()
            if self._is_allowed(question):
                return [Message("user", question), Message("assistant", answer)]

    def copied(self) -> list[Message]:
        """One question how a model is started whose name nobody has, and its answer."""
        while True:
            question, answer = self._starting.copied(self._rng)[:2]
            if self._is_allowed(question):
                return [Message("user", question), Message("assistant", answer)]

    def _turn(self) -> tuple[str, str]:
        while True:
            follow_ups: list[_FollowUp] = []
            if self._subject and self._rng.random() < FOLLOW_UP_CHANCE:
                follow_ups = self._follow_ups(self._subject)
            before = self._subject
            question, answer = self._follow_up_question(follow_ups) if follow_ups else self._standalone()
            if self._is_allowed(question):
                return question, answer
            self._subject = before

    def _is_allowed(self, question: str) -> bool:
        return (
            normalized(question) not in self._excluded and gist(question, self._stop_words) not in self._gists
        )

    # --- questions that need no context -----------------------------------------------------------------

    def _standalone(self) -> tuple[str, str]:
        rng, facts = self._rng, self._knowledge.facts
        kind = rng.choices(self._kinds, self._kind_weights)[0]
        if kind == "fact":
            return self._question_about(rng.choices(self._plain, self._plain_weights)[0])
        if kind == "first":
            return self._first_day()
        if kind == "talk":
            return self._question_about(rng.choice(self._talk), plain=rng.random() < 0.7)
        if kind == "name":
            return self._name_turn()
        if kind == "start":
            started = self._starting.turn(rng)
            self._subject, self._model = started.fact, started.model
            return started.question, started.answer
        if kind == "file":
            self._subject = facts["unknown.file"]
            return self._file(), self._subject.answer
        if kind == "unclear":
            self._subject = None
            return self._gibberish(), facts["talk.unclear"].answer
        if kind == "language":
            return self._question_about(facts["guide.language"])
        if kind == "dangling" and self._subject is None:
            return self._dangling()
        if kind == "write" and rng.random() < 0.15:
            self._subject = facts["unknown.write"]
            return self._pasted(), self._subject.answer
        return self._question_about(
            facts[f"unknown.{kind}"] if f"unknown.{kind}" in facts else rng.choice(self._plain)
        )

    def _question_about(self, fact: Fact, *, plain: bool = False) -> tuple[str, str]:
        question = self._wording.typed(fact.question(self._wording, self._rng), self._rng, plain=plain)
        if fact.topic != "talk":
            self._subject = fact
        elif fact.id not in _KEEPS_THE_SUBJECT:
            self._subject = None
        return question, fact.answer

    def _first_day(self) -> tuple[str, str]:
        rng = self._rng
        name, patterns = rng.choices(self._first, self._first_weights)[0]
        fact = self._subject = self._knowledge.facts[name]
        slots = fact.asks[0].slots if fact.asks else {}
        question = self._wording.phrase(rng.choice(patterns), rng, slots)
        return self._wording.typed(question, rng, plain=rng.random() < 0.5), fact.answer

    def _name_turn(self) -> tuple[str, str]:
        """The user tells their name, or asks what it is."""
        rng, phrases = self._rng, self._grammar["name"]
        if rng.random() < (0.6 if self._user_name else 0.2):
            question = self._wording.phrase(rng.choice(phrases["ask"]), rng)
            known = phrases["answer_ask"] if self._user_name else phrases["answer_unknown"]
            return self._wording.typed(question, rng, plain=True), known.format(person=self._user_name)
        person = rng.choice(phrases["people"])
        if rng.random() < 0.75:  # an invented name: the guide must copy it, not recognize it
            syllables = rng.choice((1, 2, 2, 3))
            person = "".join(
                self._wording.phrase(phrases["syllable"], rng) for _ in range(syllables)
            ).capitalize()
        if rng.random() < 0.1:
            person = person.lower()
        if rng.random() < 0.15:
            person = accented(person, rng)
        self._user_name, self._subject = person, None
        pattern: str = rng.choice(phrases["tell"])
        written = pattern if rng.random() < 0.5 else pattern[:1].upper() + pattern[1:]
        written = written.replace("{person}", NAMED) + rng.choice(("", ".", "!"))
        written = signed(written, rng) if rng.random() < SIGNED else written
        return written.replace(NAMED, person), phrases["answer_tell"].format(person=person)

    def _gibberish(self) -> str:
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            word: str = rng.choice(self._grammar["gibberish"])
            return word if rng.random() < 0.6 else emoji(rng)
        letters = string.ascii_lowercase if kind < 3 else string.ascii_letters + string.digits + "#$%&*+-/;=@"
        words = (
            "".join(rng.choice(letters) for _ in range(rng.randrange(2, 12)))
            for _ in range(rng.choice((1, 1, 2, 3)))
        )
        return " ".join(words)

    def _dangling(self) -> tuple[str, str]:
        """A question about "it" at a point where nothing was named. Some ask for the program."""
        if self._rng.random() < 0.2:
            self._subject = self._knowledge.facts["orin-chat.what"]
            question = self._wording.phrase(self._rng.choice(self._grammar["of_the_program"]), self._rng)
            return self._wording.typed(question, self._rng, plain=True), self._subject.answer
        aspect = self._rng.choice(self._grammar["dangling"])
        question = self._wording.phrase(self._rng.choice(self._grammar["follow"][aspect]), self._rng)
        nothing = aspect == "again" and not self._last_answer
        if aspect == "again" and not nothing:
            return self._wording.typed(question, self._rng, plain=True), self._last_answer
        answer = self._knowledge.facts["talk.nothing-yet" if nothing else "talk.which"].answer
        return self._wording.typed(question, self._rng, plain=True), answer

    def _pasted(self) -> str:
        """A longer pasted text with a request, as "summarize this"."""
        rng, pasted = self._rng, self._grammar["pasted"]
        if rng.random() < 0.3:
            text = self._project_text()[1]
        else:
            text = (" " if rng.random() < 0.6 else "\n").join(self._made_up(rng.randrange(2, 12)))
        request = rng.choice(pasted["requests"])
        return f"{text}\n\n{request}" if rng.random() < 0.6 else f"{request}\n\n{text}"

    def _file(self) -> str:
        """A question about a file that goes along, as the chat sends it: lines of this project, or made up."""
        rng, files = self._rng, self._grammar["files"]
        if rng.random() < 0.6:
            name, text = self._project_text()
        else:
            name = self._wording.phrase(rng.choice(files["names"]), rng)
            text = "\n".join(self._made_up(rng.choice((1, 1, 2, 3, 6, 12))))
        asked = files["requests"] if rng.random() < 0.6 else files["questions"]
        slots = {"file": (f"@{name}", "this file")}
        request = self._wording.typed(self._wording.phrase(rng.choice(asked), rng, slots), rng, plain=True)
        return f"{name}:\n```\n{text}\n```\n\n{request}"

    def _project_text(self) -> tuple[str, str]:
        """The name of one of the project's files, and some of its lines."""
        rng = self._rng
        name, lines = rng.choice(_project_files())
        first, count = rng.randrange(len(lines)), rng.choice((1, 4, 10, 25, 60, 120))
        return name, "\n".join(lines[first : first + count])[: rng.choice((300, 1000, 2500, 5000))]

    def _made_up(self, count: int) -> list[str]:
        """Sentences about things in the world."""
        slots = self._knowledge.facts["unknown.topic"].asks[0].slots
        patterns = self._grammar["pasted"]["sentences"]
        drawn = (self._wording.phrase(self._rng.choice(patterns), self._rng, slots) for _ in range(count))
        return [sentence.capitalize() + "." for sentence in drawn]

    # --- follow-up questions ------------------------------------------------------------------------------

    def _follow_up_question(self, follow_ups: Sequence[_FollowUp]) -> tuple[str, str]:
        rng = self._rng
        chosen = rng.choices(follow_ups, [kind.weight for kind in follow_ups])[0]
        if chosen.fact is not None:
            self._subject = chosen.fact
        if chosen.model:
            self._model = chosen.model
            return chosen.patterns[0], chosen.answer
        question = self._wording.phrase(rng.choice(chosen.patterns), rng, chosen.slots)
        return self._wording.typed(question, rng, plain=rng.random() < 0.8), chosen.answer

    def _follow_ups(self, fact: Fact) -> list[_FollowUp]:
        """All kinds of follow-up questions after `fact`."""
        follow, facts = self._grammar["follow"], self._knowledge.facts
        kinds = [_FollowUp(follow["again"], {}, self._last_answer, None, 0.5)]
        if fact.aspect == "press":
            kinds += [
                _FollowUp(follow["again_key"], {}, self._last_answer, None, 0.5),
                self._in_line_mode(fact),
            ]
        if fact.topic == "unknown topics":
            kinds[0] = kinds[0]._replace(weight=0.2)
        else:
            kinds += self._same_subject(fact) + self._other_subjects(fact)
            kinds.append(_FollowUp(follow["more"], {}, facts["talk.more"].answer, None, 0.3))
        kinds += self._undo(fact)
        if fact.subject.startswith("command.") and (key := facts.get(f"key.{self._key_of(fact)}.press")):
            kinds.append(_FollowUp(follow["press"], {}, key.answer, key, 1.0))
        for started in self._starting.after(fact, self._model, self._rng):
            kinds.append(_FollowUp((started.question,), {}, started.answer, started.fact, 6.0, started.model))
        for entry in self._entries_after.get(fact.id, ()):
            kinds.append(_FollowUp(entry.patterns, {}, entry.to.answer, entry.to, 2.0))
        return kinds

    def _same_subject(self, fact: Fact) -> list[_FollowUp]:
        same = [other for other in self._by_subject[fact.subject] if other.id != fact.id and other.short]
        slots = {"name": PRONOUNS, "do": ("do it", "do that")}
        return [_FollowUp(other.short, slots, other.answer, other, 3.0 / len(same)) for other in same]

    def _undo(self, fact: Fact) -> list[_FollowUp]:
        """How to undo what `fact` says to do, unless follow.toml has an entry for it."""
        facts, asked = self._knowledge.facts, self._grammar["follow"]["undo"]
        if undo := facts.get(f"{fact.subject}.undo"):
            return [] if fact is undo else [_FollowUp(asked, {}, undo.answer, undo, 1.0)]
        if any(
            "undo" in pattern for entry in self._entries_after.get(fact.id, ()) for pattern in entry.patterns
        ):
            return []
        if fact.aspect == "set" and fact.topic.startswith("options"):
            return [_FollowUp(asked, {}, facts["option.undo"].answer, None, 0.7)]
        return [_FollowUp(asked, {}, facts["talk.undo"].answer, None, 0.1)]

    def _other_subjects(self, fact: Fact) -> list[_FollowUp]:
        follow, facts, kinds = self._grammar["follow"], self._knowledge.facts, []
        pair = self._knowledge.pairs.get(fact.subject)
        if pair and (other := facts.get(f"{pair}.{fact.aspect}") or facts.get(f"{pair}.what")):
            kinds.append(_FollowUp(follow["other"], {}, other.answer, other, 1.0))
        others = [other for other in self._by_aspect.get(fact.aspect, ()) if other.id != fact.id]
        if fact.aspect in ("what", "set", "default", "live", "exit", "press", "why") and others:
            other = self._rng.choice(others)
            names = other.slots.get("name") or other.slots.get("code") or other.slots.get("key") or ()
            if names:
                kinds.append(_FollowUp(follow["switch"], {"name": names}, other.answer, other, 1.2))
        return kinds

    def _in_line_mode(self, fact: Fact) -> _FollowUp:
        """The line-mode command that does the same as a key, or that there is none."""
        name = fact.answer.rpartition(f"{IN_LINE_MODE}/")[2].rstrip(".")
        command = self._knowledge.facts.get(f"command.{name}.command")
        if command is None and "In the line mode" in fact.answer:
            return _FollowUp(self._grammar["follow"]["command"], {}, self._last_answer, None, 0.6)
        target = command or self._knowledge.facts["command.none.none"]
        return _FollowUp(self._grammar["follow"]["command"], {}, target.answer, command, 0.8)

    def _key_of(self, command: Fact) -> str:
        """The action whose key does the same as a line-mode command; "" for none."""
        ending = f"{IN_LINE_MODE}/{command.subject.partition('.')[2]}."
        return next(
            (
                key.subject.partition(".")[2]
                for key in self._knowledge.facts.values()
                if key.answer.endswith(ending)
            ),
            "",
        )
