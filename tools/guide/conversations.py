"""Conversations with the guide, drawn at random: questions, follow-up questions, small talk, what it declines."""

from __future__ import annotations

import random
import string
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tools.guide.facts import PRONOUNS, Fact, Knowledge
from tools.guide.template import Message
from tools.guide.wording import gist, normalized

TURNS = ((1, 40), (2, 20), (3, 14), (4, 8), (6, 8), (9, 6), (14, 3), (22, 1))
"""How many questions a conversation has, and how often."""
STANDALONE = {
    "fact": 62,
    "topic": 11,
    "calculate": 2,
    "live": 3,
    "write": 4,
    "talk": 14,
    "unclear": 2,
    "dangling": 2,
    "name": 11,
}
FOLLOW = 0.5
"""How often a question goes on from the answer before."""
SYSTEM = (
    "You are a helpful assistant.", "Answer briefly.", "You are orin-guide.", "Be polite.", "You are an expert.",
    "Answer in one sentence.", "You are a helpful, honest assistant.", "Be concise and precise.", "Help the user.",
)  # fmt: skip
_KEPT_BY = {"talk.ok", "talk.thanks", "talk.really", "talk.wait", "talk.praise", "talk.sorry"}
"""Small talk after which the subject is still the one before."""


class _Short(NamedTuple):
    """A way to go on: one of `patterns`, answered by `answer`; the subject is then `fact`'s."""

    patterns: Sequence[str]
    slots: Mapping[str, Sequence[str]]
    answer: str
    fact: Fact | None
    weight: float


class Conversations:
    """Draws conversations. None of their questions is one of `excluded`, nor has the same words as one in another
    order or with other small words."""

    def __init__(self, knowledge: Knowledge, rng: random.Random, excluded: Collection[str] = ()) -> None:
        self._know, self._rng = knowledge, rng
        self._last: Fact | None = None
        self._said, self._person = "", ""
        self._small = frozenset(knowledge.grammar["noise"]["dropped"])
        self._excluded = {normalized(question) for question in excluded}
        self._gists = {gist(question, self._small) for question in excluded} - {""}
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
        self._leads = {
            fact.id: [entry for entry in knowledge.follow if entry.follows(fact)] for fact in known
        }
        self._kinds, self._kind_weights = zip(*STANDALONE.items(), strict=True)

    def draw(self) -> list[Message]:
        """One conversation: user and assistant in turn, sometimes a system prompt first."""
        rng = self._rng
        count = rng.choices([n for n, _ in TURNS], [weight for _, weight in TURNS])[0]
        messages = [Message("system", rng.choice(SYSTEM))] if rng.random() < 0.06 else []
        self._last, self._said, self._person = None, "", ""
        for _ in range(count if count < 4 else count + rng.randrange(3)):
            question, answer = self._turn()
            messages += [Message("user", question), Message("assistant", answer)]
            self._said = answer
        return messages

    def single(self) -> list[Message]:
        """One question that stands alone, and its answer."""
        self._last, self._said, self._person = None, "", ""
        while True:
            question, answer = self._standalone()
            if self._may_say(question):
                return [Message("user", question), Message("assistant", answer)]

    def _turn(self) -> tuple[str, str]:
        while True:
            follow = self._follow_ups(self._last) if self._last and self._rng.random() < FOLLOW else []
            before = self._last
            question, answer = self._short(follow) if follow else self._standalone()
            if self._may_say(question):
                return question, answer
            self._last = before

    def _may_say(self, question: str) -> bool:
        return normalized(question) not in self._excluded and gist(question, self._small) not in self._gists

    # --- questions that stand alone ---------------------------------------------------------------------

    def _standalone(self) -> tuple[str, str]:
        rng, facts = self._rng, self._know.facts
        kind = rng.choices(self._kinds, self._kind_weights)[0]
        if kind == "fact":
            return self._ask(rng.choices(self._plain, self._plain_weights)[0])
        if kind == "talk":
            return self._ask(rng.choice(self._talk), plain=rng.random() < 0.7)
        if kind == "name":
            return self._name()
        if kind == "unclear":
            self._last = None
            return self._gibberish(), facts["talk.unclear"].answer
        if kind == "dangling" and self._last is None:
            return self._dangling()
        if kind == "write" and rng.random() < 0.15:
            self._last = facts["unknown.write"]
            return self._pasted(), self._last.answer
        return self._ask(facts[f"unknown.{kind}"] if f"unknown.{kind}" in facts else rng.choice(self._plain))

    def _ask(self, fact: Fact, *, plain: bool = False) -> tuple[str, str]:
        question = self._wording.typed(fact.question(self._wording, self._rng), self._rng, plain=plain)
        if fact.topic != "talk":
            self._last = fact
        elif fact.id not in _KEPT_BY:
            self._last = None
        return question, fact.answer

    def _name(self) -> tuple[str, str]:
        rng, said = self._rng, self._grammar["name"]
        if rng.random() < (0.6 if self._person else 0.2):
            question = self._wording.phrase(rng.choice(said["ask"]), rng)
            known = said["answer_ask"] if self._person else said["answer_unknown"]
            return self._wording.typed(question, rng, plain=True), known.format(person=self._person)
        person = rng.choice(said["people"])
        if rng.random() < 0.75:  # one that nobody has: it must be copied, not recognized
            syllables = rng.choice((1, 2, 2, 3))
            person = "".join(
                self._wording.phrase(said["syllable"], rng) for _ in range(syllables)
            ).capitalize()
        if rng.random() < 0.1:
            person = person.lower()
        self._person, self._last = person, None
        pattern = rng.choice(said["tell"]).replace("{person}", person)
        written = pattern if rng.random() < 0.5 else pattern[:1].upper() + pattern[1:]
        return written + rng.choice(("", ".", "!")), said["answer_tell"].format(person=person)

    def _gibberish(self) -> str:
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            return rng.choice(
                (
                    "?",
                    "??",
                    "???",
                    "!",
                    "...",
                    ".",
                    "!!!",
                    "#",
                    "-",
                    "x",
                    "q",
                    "/",
                    ":)",
                    ":(",
                    ";-)",
                    "<3",
                    "…",
                    "👍",
                    "😀",
                    "🙂",
                    "❤",
                    "🤔",
                    "*",
                    "0",
                    "1",
                    "42",
                    "a",
                    "b",
                    "aaa",
                    "asdf",
                    "qwerty",
                    "lol",
                    "haha",
                    "hahaha",
                    "foo",
                    "foo bar",
                    "bla",
                    "blah blah",
                    "lorem ipsum",
                    "xyz",
                    "abc",
                    "uh",
                    "eh",
                    "huh",
                )
            )
        letters = string.ascii_lowercase if kind < 3 else string.ascii_letters + string.digits + "#$%&*+-/;=@"
        words = (
            "".join(rng.choice(letters) for _ in range(rng.randrange(2, 12)))
            for _ in range(rng.choice((1, 1, 2, 3)))
        )
        return " ".join(words)

    def _dangling(self) -> tuple[str, str]:
        """A question about "it" where nothing was named."""
        aspect = self._rng.choice(
            ("set", "default", "how", "what", "command", "other", "live", "again", "undo")
        )
        question = self._wording.phrase(self._rng.choice(self._grammar["follow"][aspect]), self._rng)
        nothing = aspect == "again" and not self._said
        if aspect == "again" and not nothing:
            return self._wording.typed(question, self._rng, plain=True), self._said
        answer = self._know.facts["talk.nothing-yet" if nothing else "talk.which"].answer
        return self._wording.typed(question, self._rng, plain=True), answer

    def _pasted(self) -> str:
        """A longer text with a request."""
        rng, slots = self._rng, self._know.facts["unknown.topic"].asks[0].slots
        frames = (
            "{thing} and {thing} were seen in {place}",
            "{person} likes {thing}",
            "in {place} there is {thing}",
            "nobody knows why {thing} and {thing} matter",
            "the report says that {person} went to {place} in {number}",
            "{thing}: {number}, {thing}: {number}",
            "it was about {thing}",
        )
        sentences = [
            self._wording.phrase(rng.choice(frames), rng, slots).capitalize() + "."
            for _ in range(rng.randrange(2, 12))
        ]
        text = (" " if rng.random() < 0.6 else "\n").join(sentences)
        request = rng.choice(
            (
                "Summarize this.",
                "summarize this text",
                "Translate this into German.",
                "What does this say?",
                "What is this text about?",
                "Correct this:",
                "Shorten this, please.",
                "explain this text",
                "TL;DR?",
                "What is the main point?",
                "Rewrite this.",
            )
        )
        return f"{text}\n\n{request}" if rng.random() < 0.6 else f"{request}\n\n{text}"

    # --- questions that go on -----------------------------------------------------------------------------

    def _short(self, follow: Sequence[_Short]) -> tuple[str, str]:
        rng = self._rng
        chosen = rng.choices(follow, [way.weight for way in follow])[0]
        question = self._wording.phrase(rng.choice(chosen.patterns), rng, chosen.slots)
        if chosen.fact is not None:
            self._last = chosen.fact
        return self._wording.typed(question, rng, plain=rng.random() < 0.8), chosen.answer

    def _follow_ups(self, fact: Fact) -> list[_Short]:
        """All ways to go on from `fact`."""
        follow, facts = self._grammar["follow"], self._know.facts
        ways = [_Short(follow["again"], {}, self._said, None, 0.5)]
        if fact.aspect == "press":
            ways += [_Short(follow["again_key"], {}, self._said, None, 0.5), self._in_line_mode(fact)]
        if fact.topic == "unknown topics":
            ways[0] = ways[0]._replace(weight=0.2)
        else:
            ways += self._about_the_same(fact) + self._about_another(fact)
            ways.append(_Short(follow["more"], {}, facts["talk.more"].answer, None, 0.3))
        ways += self._undoing(fact)
        if fact.subject.startswith("command.") and (key := facts.get(f"key.{self._key_of(fact)}.press")):
            ways.append(_Short(follow["press"], {}, key.answer, key, 1.0))
        for entry in self._leads.get(fact.id, ()):
            ways.append(_Short(entry.patterns, {}, entry.to.answer, entry.to, 2.0))
        return ways

    def _about_the_same(self, fact: Fact) -> list[_Short]:
        same = [other for other in self._by_subject[fact.subject] if other.id != fact.id and other.short]
        slots = {"name": PRONOUNS, "do": ("do it", "do that")}
        return [_Short(other.short, slots, other.answer, other, 3.0 / len(same)) for other in same]

    def _undoing(self, fact: Fact) -> list[_Short]:
        """How to undo what `fact` tells to do, if that is not said in follow.toml."""
        facts, asked = self._know.facts, self._grammar["follow"]["undo"]
        if undo := facts.get(f"{fact.subject}.undo"):
            return [] if fact is undo else [_Short(asked, {}, undo.answer, undo, 1.0)]
        if any("undo" in pattern for entry in self._leads.get(fact.id, ()) for pattern in entry.patterns):
            return []
        if fact.aspect == "set" and fact.topic.startswith("options"):
            return [_Short(asked, {}, facts["option.undo"].answer, None, 0.7)]
        return [_Short(asked, {}, facts["talk.undo"].answer, None, 0.1)]

    def _about_another(self, fact: Fact) -> list[_Short]:
        follow, facts, ways = self._grammar["follow"], self._know.facts, []
        pair = self._know.pairs.get(fact.subject)
        if pair and (other := facts.get(f"{pair}.{fact.aspect}") or facts.get(f"{pair}.what")):
            ways.append(_Short(follow["other"], {}, other.answer, other, 1.0))
        others = [other for other in self._by_aspect.get(fact.aspect, ()) if other.id != fact.id]
        if fact.aspect in ("what", "set", "default", "live", "exit", "press", "why") and others:
            other = self._rng.choice(others)
            names = other.slots.get("name") or other.slots.get("code") or other.slots.get("key") or ()
            if names:
                ways.append(_Short(follow["switch"], {"name": names}, other.answer, other, 1.2))
        return ways

    def _in_line_mode(self, fact: Fact) -> _Short:
        """The same in the line mode, for a key; or that there is no command for it."""
        name = fact.answer.rpartition(" In the line mode: /")[2].rstrip(".")
        command = self._know.facts.get(f"command.{name}.command")
        if command is None and "In the line mode" in fact.answer:
            return _Short(self._grammar["follow"]["command"], {}, self._said, None, 0.6)
        target = command or self._know.facts["command.none.none"]
        return _Short(self._grammar["follow"]["command"], {}, target.answer, command, 0.8)

    def _key_of(self, command: Fact) -> str:
        """The action whose key does what a command does."""
        ending = f"In the line mode: /{command.subject.partition('.')[2]}."
        return next(
            (
                key.subject.partition(".")[2]
                for key in self._know.facts.values()
                if key.answer.endswith(ending)
            ),
            "",
        )
