"""Questions how a model is started, whose answers repeat its name.

Names are those of the catalog, as people write them, and names that nobody has: of models, files and repositories. The
guide has to copy these, so hardly one of them comes twice.
"""

import math
import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.catalog.names import known_models
from tools.guide.facts import Fact, Knowledge
from tools.guide.wording import normalized, typo

NAMED = "\ue000"
"""Stands for the name while the words around it are varied: the name itself must stay as it is."""
_KINDS = {"known": 60, "other": 14, "file": 16, "hub": 30, "family": 8}
"""The weight of each kind of name; `family`: one that starts nothing by itself, and is answered as a family."""
_COPIED = ("other", "file", "hub", "hub")
"""Kinds of names that nobody has: each answer has to copy one."""
_USUAL = 4.0
"""Of a family without a size, the model nearest to so many billion weights is meant."""


class Started(NamedTuple):
    """A question, the answer, the fact behind it, and the model's name, as orin-chat takes it."""

    question: str
    answer: str
    fact: Fact
    model: str


class Starting:
    """Draws questions how a model is started, and those that follow them."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._facts, self._wording = knowledge.facts, knowledge.wording
        self._ask: Mapping[str, Any] = knowledge.starting
        self._syllable: str = knowledge.grammar["name"]["syllable"]
        self._models = [model.name for model in known_models() if model.chats]
        self._families = {base: self.named(base) for base in sorted({_base(name) for name in self._models})}
        meant: Mapping[str, Sequence[str]] = knowledge.starting["meant"]
        self._families |= {name: model for model, names in meant.items() for name in names}
        self._of_subject: dict[str, str] = {}
        self._without: list[tuple[str, Fact]] = []  # names of families that start no model
        for subject, names in knowledge.families.items():
            for name in names:
                if model := self._families.get(name) or self.named(name):
                    self._families[name] = model
                    self._of_subject.setdefault(subject, model)
                else:
                    self._without.append((name, knowledge.facts[f"{subject}.what"]))
        said = " ".join(fact.answer for fact in knowledge.facts.values())
        self._words = sorted(set(re.findall(r"[A-Za-z]{3,}", said)))  # names are often words of a language
        self._told_of = {normalized(name) for names in knowledge.families.values() for name in names}

    def turn(self, rng: random.Random) -> Started:
        """A question that needs no context."""
        return self._of_kind(rng.choices(list(_KINDS), list(_KINDS.values()))[0], rng)

    def copied(self, rng: random.Random) -> Started:
        """A question with a name that nobody has."""
        return self._of_kind(rng.choice(_COPIED), rng)

    def _of_kind(self, kind: str, rng: random.Random) -> Started:
        names = {"known": self._known, "other": self._other, "file": self._file, "hub": self._on_hub}
        if kind == "family":
            written, fact = rng.choice(self._without)
            question = self._question(rng.choice(self._ask["known"]), written, rng)
            return Started(question, fact.answer, fact, "")
        model, written = names[kind](rng)
        return self._started(kind, rng.choice(self._patterns(kind, written, rng)), model, written, rng)

    def after(self, fact: Fact, model: str, rng: random.Random) -> list[Started]:
        """Questions that follow an answer with the name `model`, or one about a family of models."""
        follow: list[Started] = []
        if fact.subject == "starting" and model:
            other, written = self._known(rng)
            follow.append(self._started("known", rng.choice(self._ask["another"]), other, written, rng))
            base, _, size = model.partition(":")
            if size and "/" not in model:
                kind = "known" if model in self._models else "other"
                sizes = [name.partition(":")[2] for name in self._models if name.startswith(f"{base}:")]
                sizes = [other for other in sizes if other != size] if kind == "known" else [self._size(rng)]
                if sizes:
                    size = rng.choice(sizes)
                    pattern = rng.choice(self._ask["size"]).replace("{size}", "{model}")
                    written = _sized(size, rng)
                    follow.append(self._started(kind, pattern, f"{base}:{size}", written, rng))
        elif meant := self._of_subject.get(fact.subject):
            follow.append(self._started("known", rng.choice(self._ask["it"]), meant, "", rng))
        return follow

    def named(self, written: str) -> str:
        """The model of this name or, of a family with this name, the one whose size is nearest to the usual; "" if
        there is none. It does not matter how the name is written."""
        wanted = _parts(written)
        same = [name for name in self._models if _parts(name) == wanted]
        of_family = [name for name in self._models if _parts(_base(name)) == wanted]
        return min(same or of_family, key=_distance, default="")

    def _started(self, kind: str, pattern: str, model: str, written: str, rng: random.Random) -> Started:
        fact = self._facts[f"starting.{kind}"]
        answer = fact.answer.replace("{model}", model)
        return Started(self._question(pattern, written, rng), answer, fact, model)

    def _question(self, pattern: str, written: str, rng: random.Random) -> str:
        while True:  # until no word that was left out is the name
            asked = self._wording.phrase(pattern, rng, {"model": (NAMED,)})
            question = self._wording.typed(asked, rng, plain=rng.random() < 0.4)
            if (NAMED in question) == ("{model}" in pattern):
                return question.replace(NAMED, written)

    def _patterns(self, kind: str, written: str, rng: random.Random) -> Sequence[str]:
        """Ways to ask for a name that is `written` so."""
        is_new = normalized(written) not in self._told_of
        stands_alone = (
            kind in ("hub", "file") or ":" in written or (any(map(str.isdigit, written)) and is_new)
        )
        weights = {
            "known": 60,
            "tongues": 14,
            "of_ollama": 0 if kind == "file" else 8,
            "held": 30 if kind in ("file", "hub") else 0,
            "bare": 14 if stands_alone else 0,
        }
        patterns: Sequence[str] = self._ask[rng.choices(list(weights), list(weights.values()))[0]]
        return patterns

    # --- names, each with the way in which somebody writes it -----------------------------------------------

    def _known(self, rng: random.Random) -> tuple[str, str]:
        if rng.random() < 0.25:
            written, model = rng.choice(list(self._families.items()))
            written = written if rng.random() < 0.5 else written.lower()
            return model, typo(written, rng) if rng.random() < 0.08 else written
        model = rng.choice(self._models)
        written = spelled(model, rng)
        return model, typo(written, rng) if rng.random() < 0.08 else written

    def _other(self, rng: random.Random) -> tuple[str, str]:
        base = self._drawn("makers", rng) if rng.random() < 0.3 else self._word(rng)
        if rng.random() < 0.4:
            base += rng.choice(("", "-")) + self._drawn(rng.choice(("versions", "kinds")), rng)
        size = self._size(rng)
        return f"{base}:{size}", f"{base}{rng.choice((':', ':', ':', ' '))}{size}"

    def _file(self, rng: random.Random) -> tuple[str, str]:
        name = self._drawn("files", rng) if rng.random() < 0.5 else self._title(rng)
        if rng.random() < 0.5:
            name += rng.choice((".", "-", "-", "_")) + self._drawn("quantizations", rng)
        name = name if rng.random() < 0.5 else name.lower()
        path = f"{self._drawn('folders', rng)}{name}.gguf"
        return path, path

    def _on_hub(self, rng: random.Random) -> tuple[str, str]:
        user = self._drawn("users", rng) if rng.random() < 0.3 else self._word(rng)
        if rng.random() < 0.3:
            user += self._drawn("suffixes", rng)
        name = self._drawn("repositories", rng) if rng.random() < 0.3 else self._title(rng)
        name = name if rng.random() < 0.8 else name.lower()
        repository = f"{user}/{name}" + rng.choice(("-GGUF", "-GGUF", "-GGUF", "-gguf", ""))
        if rng.random() < 0.25:
            repository += f":{self._drawn('quantizations', rng)}"
        before = (
            "",
            "",
            "",
            "hf.co/",
            "hf.co/",
            "huggingface.co/",
            "https://huggingface.co/",
            "https://hf.co/",
        )
        return f"hf.co/{repository}", rng.choice(before) + repository

    def _title(self, rng: random.Random) -> str:
        """A name as those of repositories, whose parts come in any order: none tells the next."""
        base = self._drawn("bases", rng) if rng.random() < 0.4 else self._word(rng)
        if rng.random() < 0.4:
            base += rng.choice(("", "", "-", "_")) + self._drawn("versions", rng)
        parts = [base]
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
            key = rng.choice(("billions", "billions", "kinds", "kinds", "versions", "word", "quantizations"))
            parts.append(self._word(rng) if key == "word" else self._drawn(key, rng))
        return rng.choice("-----_.").join(parts)

    def _drawn(self, key: str, rng: random.Random) -> str:
        def filled(match: re.Match[str]) -> str:
            if match[1] == "digit":
                return str(rng.randrange(1, 10))
            if match[1] == "number":
                return str(
                    rng.choice((1, 2, 3, 4, 7, 8, 9, 12, 13, 14, 24, 27, 32, 70, rng.randrange(1, 400)))
                )
            return self._word(rng)

        return re.sub(r"\{(\w+)\}", filled, rng.choice(self._ask[key].split("|")))

    def _word(self, rng: random.Random) -> str:
        """A word of a language, made of syllables or of any letters; sometimes two in one."""
        word = self._piece(rng)
        if rng.random() < 0.2:
            word = word.capitalize() + rng.choice(("", "", "-", "_")) + self._piece(rng).capitalize()
        if rng.random() < 0.12:
            word += str(rng.choice((rng.randrange(10), rng.randrange(100), rng.randrange(1000))))
        style = rng.random()
        return word.capitalize() if style < 0.2 else word.upper() if style < 0.24 else word

    def _piece(self, rng: random.Random) -> str:
        chance = rng.random()
        if chance < 0.08:
            return self._drawn("words", rng)
        if chance < 0.45:
            known: str = rng.choice(self._words)
            return known
        if chance < 0.6:
            cased = string.ascii_lowercase * 3 + string.digits, string.ascii_letters
            return "".join(rng.choices(rng.choice(cased), k=rng.randrange(2, 8)))
        syllables = (self._wording.phrase(self._syllable, rng) for _ in range(rng.choice((1, 2, 2, 3))))
        return "".join(syllables)

    def _size(self, rng: random.Random) -> str:
        size: str = rng.choice(self._ask["sizes"].split("|"))
        drawn = rng.random()
        if drawn < 0.2:
            return f"{rng.randrange(40)}.{rng.randrange(1, 10)}b"
        return size if drawn < 0.7 else f"{rng.randrange(1, 100)}b"


def _base(name: str) -> str:
    return name.partition(":")[0]


def _distance(name: str) -> float:
    """How far the size of a model is from the usual."""
    size = re.match(r"[a-z]*([\d.]+)(m?)", name.partition(":")[2])
    billions = float(size[1]) / (1000 if size[2] else 1) if size else _USUAL
    return abs(math.log(billions / _USUAL))


def _parts(name: str) -> list[str]:
    return re.findall(r"[a-z]+|[\d.]+", name.lower())


def spelled(model: str, rng: random.Random) -> str:
    """A name of the catalog as somebody may write it: qwen3:4b, qwen3 4b, Qwen 3 4B, qwen3-4b."""
    base, _, size = model.partition(":")
    if rng.random() < 0.35:
        return model
    if rng.random() < 0.4:  # qwen 3, llama-3.2
        base = re.sub(r"(?<=[a-z])(?=\d)", rng.choice((" ", " ", "-")), base, count=1)
    if rng.random() < 0.4:
        base = base.replace("-", " ")
    if rng.random() < 0.25:
        base = base.title()
    if not size:
        return base
    return base + rng.choice((" ", " ", " ", ":", "-", " in ")) + _sized(size, rng)


def _sized(size: str, rng: random.Random) -> str:
    """30b-a3b -> 30b; 4b -> 4B."""
    short = size.partition("-a")[0] if rng.random() < 0.5 else size
    short = short.replace("-", rng.choice("- "))
    return short.upper() if rng.random() < 0.2 and short[0].isdigit() else short
