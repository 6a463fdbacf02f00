"""What the guide knows: facts, each with its answer and the ways to ask for it.

They come from the TOML files in knowledge/ and from the program's own tables (`sources`).
"""

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tools.guide import sources
from tools.guide.shape import SHAPE
from tools.guide.wording import Wording

KNOWLEDGE = Path(__file__).parent / "knowledge"
FIRST_DAY = ("day.txt", "first.txt", "minutes.txt", "again.txt", "second.txt")
"""Files of asked/ with what somebody asks on the first days: it comes more often."""
_TOPIC_OF_TABLE = {"key": "keys", "command": "commands", "exit": "exit codes", "program": "commands"}
PRONOUNS = ("it", "that", "this", "it", "that one")

Slots = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Ask:
    """Ways to ask: one of `patterns`, with choices from `slots`. `weight` is relative to the other ways to ask."""

    patterns: Sequence[str]
    slots: Slots = field(default_factory=dict)
    weight: float = 1.0


@dataclass(frozen=True)
class Fact:
    """One thing that the guide can say. `must` are texts that every answer must contain. `asks` are questions that need
    no context; `short` are patterns that only make sense after the subject was named. `slots` hold its names."""

    subject: str
    aspect: str
    topic: str
    answer: str
    must: tuple[str, ...]
    asks: tuple[Ask, ...]
    short: tuple[str, ...] = ()
    slots: Slots = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.subject}.{self.aspect}"

    def question(self, wording: Wording, rng: random.Random) -> str:
        ask = rng.choices(self.asks, [ask.weight for ask in self.asks])[0]
        return wording.phrase(rng.choice(ask.patterns), rng, ask.slots)

    @property
    def weight(self) -> float:
        """How often training asks for it: more often if there are more ways to ask."""
        return 1.0 + min(3.0, sum(len(ask.patterns) * ask.weight for ask in self.asks) / 40)


@dataclass(frozen=True)
class Follow:
    """Short questions that lead to the fact `to`, from facts whose id is `after` or begins with it."""

    after: str
    patterns: Sequence[str]
    to: Fact

    def follows(self, fact: Fact) -> bool:
        return f"{fact.id}.".startswith(f"{self.after}.")


@dataclass(frozen=True)
class Knowledge:
    """All facts by id, and how questions are worded. `pairs` maps a subject to a related one, `grammar` is
    grammar.toml, and `follow` leads from one fact to another. `starting` has the ways to ask for a model, and
    `families` the names of each family of models, by its subject. `snapshot` holds the texts that the guide must say of
    the program. `unused` are phrases for things that the program lacks. `first` maps the id of a fact to questions
    of a first day."""

    facts: Mapping[str, Fact]
    pairs: Mapping[str, str]
    grammar: Mapping[str, Any]
    follow: Sequence[Follow]
    starting: Mapping[str, Any]
    families: Mapping[str, Sequence[str]]
    snapshot: Mapping[str, Sequence[str]]
    unused: Sequence[str]
    first: Mapping[str, Sequence[str]]
    wording: Wording


@cache
def load() -> Knowledge:
    """Reads all knowledge. Raises KeyError for a follow-up to a fact that does not exist."""
    read = {path.stem: tomllib.loads(path.read_text("utf-8")) for path in sorted(KNOWLEDGE.glob("*.toml"))}
    grammar, unknown, follow = (read.pop(name) for name in ("grammar", "unknown", "follow"))
    phrases = {"key": read.pop("keys"), "command": read.pop("commands"), "program": read.pop("programs")}
    option_phrases = read.pop("options")
    types: dict[str, Any] = read["quantization"].pop("types")
    starting: dict[str, Any] = read["starting"]["starting"].pop("ask")
    compare: dict[str, Any] = {}
    subjects: dict[str, dict[str, Any]] = {name: dict(table) for name, table in option_phrases.items()}
    topics = dict.fromkeys(option_phrases, "options")
    for topic, tables in read.items():
        for name, table in tables.items():
            if name == "compare":
                compare |= {key: table | {"topic": topic} for key, table in table.items()}
            else:
                subjects.setdefault(name, {}).update(table)
                topics[name] = "options and sampling" if name in option_phrases else topic
    for name, table in types.items():
        subjects[f"types.{name}"] = table

    from_tables = sources.all_sources(KNOWLEDGE)
    builder = _Builder(grammar)
    for source in from_tables:
        head, _, name = source.subject.partition(".")
        if head in phrases:
            builder.from_table(source, _TOPIC_OF_TABLE[head], phrases[head].pop(name, {}))
        elif head == "exit":
            builder.from_table(source, _TOPIC_OF_TABLE[head], {})
        elif head in ("types", "preset", "label") and name:
            more = {"names": source.slots["name"]} if "name" in source.slots else {}
            subjects.setdefault(source.subject, {}).update(more | {"what": _table(source)})
            topics[source.subject] = {"types": "quantization", "preset": "presets"}.get(head, "labels")
        else:
            table = subjects.setdefault(source.subject, {"names": (source.subject.replace("_", " "),)})
            table[source.aspect] = table.get(source.aspect, {}) | _table(source) | {"slots": source.slots}
    for name, table in subjects.items():
        builder.subject(name, table, topics.get(name, "options"))
    for name, table in compare.items():
        builder.compare(name, table)
    for name in ("topic", "calculate", "live", "write", "file", "why"):
        builder.unknown(name, unknown["unknown"])
    asked = read_asked()
    for name in asked.keys() & builder.facts.keys():
        builder.asked(name, asked[name])
    pairs = {name: table["pair"] for name, table in subjects.items() if "pair" in table}
    return Knowledge(
        facts=builder.facts,
        pairs=pairs,
        grammar=grammar,
        follow=[
            Follow(entry["after"], entry["ask"], _find(builder.facts, entry["to"]))
            for entry in follow["follow"]
        ],
        starting=starting,
        families={
            name: table["names"] for name, table in subjects.items() if table.get("what", {}).get("family")
        },
        snapshot=sources.snapshot(from_tables),
        unused=(
            *(f"{kind} {name}" for kind, left in phrases.items() for name in left),
            *(name for name in asked if name not in builder.facts),
        ),
        first=read_asked(names=FIRST_DAY),
        wording=Wording(
            grammar["groups"],
            grammar["noise"],
            [(re.compile(entry["from"]), entry["to"]) for entry in grammar["rewrite"]],
        ),
    )


def read_asked(names: Sequence[str] = ()) -> dict[str, list[str]]:
    """Whole questions by the id of the fact that answers them: the lines under a [fact id] of asked/*.txt, or
    of its files with these `names`. Raises ValueError for a line without a fact id above it."""
    asked: dict[str, list[str]] = {}
    for path in sorted((KNOWLEDGE / "asked").glob("*.txt")):
        if names and path.name not in names:
            continue
        lines: list[str] | None = None
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if line.startswith("[") and line.endswith("]"):
                lines = asked.setdefault(line[1:-1], [])
            elif line.strip() and not line.startswith("#"):
                if lines is None:
                    raise ValueError(f"{path.name}, line {number}: a question stands under a [fact]")
                lines.append(line)
    return asked


def _find(facts: Mapping[str, Fact], name: str) -> Fact:
    """The fact with this id, or else the first of the subject with this name. Raises KeyError if there is none."""
    return facts.get(name) or facts[next((id for id in facts if id.startswith(f"{name}.")), name)]


def _table(source: sources.Source) -> dict[str, Any]:
    return {"answer": source.answer, "must": list(source.must)}


class _Builder:
    """Makes facts from tables, with the question frames of the grammar."""

    def __init__(self, grammar: Mapping[str, Any]) -> None:
        self.facts: dict[str, Fact] = {}
        self._frames: Mapping[str, list[str]] = grammar["frames"]
        self._follow: Mapping[str, list[str]] = grammar["follow"]
        self._figures = _KnownFigures(SHAPE.figures() | sources.figures())

    def from_table(self, source: sources.Source, topic: str, phrases: Mapping[str, Any]) -> None:
        """A fact from one of the program's tables. Questions use its names in `source.slots`, what one wants to `do`,
        or are written whole."""
        frames = self._frames
        by_name, by_verb, short = {
            "press": ("key_name", "press", self._follow["press"]),
            "command": ("command_name", "command", self._follow["command"]),
            "program": ("option_name", "option_do", ()),
            "exit": ("exit", "", ()),
            "list": ("", "", ()),
            "none": ("", "", ()),
        }[source.aspect]
        do = phrases.get("do", ())
        slots = {**source.slots, "do": do}
        asks = [Ask(frames[by_name], slots, 0.7)] if by_name else []
        if do:
            asks += [Ask(frames["do"], slots, 1.2), Ask(frames[by_verb], slots)]
        if questions := phrases.get("ask"):
            asks.append(Ask(questions, slots, 0.8))
        fact = Fact(*source[:2], topic, source.answer, source.must, tuple(asks), tuple(short), slots)
        self.facts[fact.id] = fact
        if "undo" in phrases:
            answer = phrases["undo"].format_map(self._figures)
            undo = replace(fact, aspect="undo", answer=answer, must=(answer,), asks=())
            self.facts[undo.id] = undo

    def subject(self, name: str, table: Mapping[str, Any], topic: str) -> None:
        """All aspects of a subject: questions by its names, by what one wants to do, and questions written whole."""
        aspects = {aspect: value for aspect, value in table.items() if isinstance(value, Mapping)}
        names = tuple(table.get("names", ()))
        for aspect, value in aspects.items():
            slots: dict[str, Sequence[str]] = {"name": names, "do": table.get("do", ())}
            slots |= value.get("slots", {})
            asks: list[Ask] = []
            if names:
                asks += self._by_name(aspect, aspects.keys(), slots, name)
            if slots.get("option"):
                asks.append(Ask(self._frames["option_name"], slots, 1.0))
            if aspect == "set" and slots["do"]:
                asks += [Ask(self._frames["do"], slots, 1.2), Ask(self._frames["option_do"], slots, 0.8)]
            questions = [
                *(self._frames["family"] if value.get("family") else ()),
                *value.get("ask", ()),
                *(table.get("ask", ()) if aspect == "set" else ()),
            ]
            if questions:
                asks.append(Ask(questions, slots, 1.2))
            self.facts[f"{name}.{aspect}"] = Fact(
                name,
                aspect,
                topic,
                value["answer"].format_map(self._figures),
                tuple(must.format_map(self._figures) for must in value["must"]),
                tuple(asks),
                (*self._follow.get(aspect, ()), *(each for each in questions if "{name}" in each)),
                slots,
            )

    def _by_name(self, aspect: str, others: Any, slots: Slots, subject: str) -> list[Ask]:
        frames = self._frames
        asks: list[Ask] = []
        if aspect == "what":
            asks.append(Ask(frames["what"], slots, 1.5))
            if subject.startswith("label."):
                asks.append(Ask(frames["label"], slots, 1.5))
            asks += [Ask(frames[kind], slots, 0.5) for kind in ("how", "why") if kind not in others]
        elif aspect in ("how", "why", "default", "live"):
            asks.append(Ask(frames[aspect], slots, 1.2))
        elif aspect == "set":
            asks.append(Ask(frames["set"], slots, 1.0))
            if "default" in others:
                asks.append(Ask(frames["degree"], slots, 0.3))
            if "what" not in others:
                asks.append(Ask(frames["what"], slots, 0.5))
        elif aspect == "where":
            asks.append(Ask(frames["where"], slots, 0.5))
        return asks

    def compare(self, name: str, table: Mapping[str, Any]) -> None:
        one = {"a": table["names"], "b": table["with"]}
        other = {"a": table["with"], "b": table["names"]}
        asks = [Ask(self._frames["compare"], one), Ask(self._frames["compare"], other)]
        if table.get("ask"):
            asks.append(Ask(table["ask"]))
        fact = Fact("compare", name, table["topic"], table["answer"], tuple(table["must"]), tuple(asks))
        self.facts[fact.id] = fact

    def unknown(self, kind: str, unknown: Mapping[str, Any]) -> None:
        table = unknown[kind]
        slots = {"thing": unknown["things"], "person": unknown["persons"], "place": unknown["places"]}
        asks = [Ask(table["ask"], slots)] if table.get("ask") else []
        if kind == "topic":
            asks = [Ask(unknown["frames"], slots, 2.0), Ask(unknown["near"], slots, 1.0)]
        answer = table["answer"].format_map(self._figures)
        fact = Fact("unknown", kind, "unknown topics", answer, tuple(table["must"]), tuple(asks))
        self.facts[fact.id] = fact

    def asked(self, name: str, lines: Sequence[str]) -> None:
        """Adds whole questions to a fact. Twelve or more get half of its weight."""
        fact = self.facts[name]
        weight = max(1.0, sum(ask.weight for ask in fact.asks)) * min(1.0, len(lines) / 12)
        slots = fact.asks[0].slots if fact.asks else {}
        self.facts[name] = replace(fact, asks=(*fact.asks, Ask(lines, slots, weight)))


class _KnownFigures(dict[str, str]):
    """For `format_map`: keeps a {name} that is not a known figure."""

    def __missing__(self, key: str) -> str:
        return "{" + key + "}"
