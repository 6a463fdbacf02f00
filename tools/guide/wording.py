"""Writes a question in many ways: expands patterns at random, and adds the noise of real typing."""

import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.guide.signs import signed

_INNERMOST = re.compile(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]")
_GROUP = re.compile(r"\$([a-z_]+)")
_SLOT = re.compile(r"\{([a-z_]+)\}")
_WORD = re.compile(r"[A-Za-z]+")
_NEIGHBOURS = {
    "a": "sqw", "b": "vgn", "c": "xdv", "d": "sfe", "e": "wrd", "f": "dgr", "g": "fht", "h": "gjy", "i": "uok",
    "j": "hku", "k": "jli", "l": "kop", "m": "nj", "n": "bmh", "o": "ipl", "p": "ol", "q": "wa", "r": "etf",
    "s": "adw", "t": "ryg", "u": "yij", "v": "cbf", "w": "qes", "x": "zcs", "y": "tuh", "z": "xa",
}  # fmt: skip
SIGNED = 0.1
"""The share of questions with signs that do not change what is asked."""
_CONTRACTED = ("what", "how", "where", "that", "who")
_DOUBLED = {
    "stop", "quit", "get", "cut", "put", "set", "let", "run", "begin", "shut", "drop", "sum", "cap", "log",
}  # fmt: skip


@dataclass(frozen=True)
class Wording:
    """The grammar in grammar.toml: `groups` of words that a pattern names as $group, the `noise` of typing, and
    `rewrites`: for a question that matches a pattern, other ways to ask it."""

    groups: Mapping[str, str]
    noise: Mapping[str, Any]
    rewrites: Sequence[tuple[re.Pattern[str], Sequence[str]]] = ()

    def phrase(
        self, pattern: str, rng: random.Random, slots: Mapping[str, Sequence[str]] | None = None
    ) -> str:
        """A random text that matches `pattern`. `slots` holds the choices for each {slot}; a choice may be a pattern
        itself. Raises KeyError for an unknown group or slot."""
        text = self._choose(pattern, rng)
        if rng.random() < 0.5:
            text = self._synonyms(text, rng)

        def fill(match: re.Match[str]) -> str:
            name = match[1]
            if name == "number":
                return str(rng.choice([rng.randrange(2, end) for end in (20, 1000, 100_000)]))
            if name == "doing":
                return gerund(self.phrase(rng.choice((slots or {})["do"]), rng, slots))
            return self.phrase(rng.choice((slots or {})[name]), rng, slots)

        return _tidy(_SLOT.sub(fill, text))

    def _choose(self, pattern: str, rng: random.Random) -> str:
        text = _GROUP.sub(lambda match: f"({self.groups[match[1]]})", pattern)
        while True:
            text, count = _INNERMOST.subn(
                lambda match: (
                    rng.choice(match[1].split("|"))
                    if match[1] is not None
                    else rng.choice(match[2].split("|")) * (rng.random() < 0.4)
                ),
                text,
            )
            if not count:
                return text

    def _synonyms(self, text: str, rng: random.Random) -> str:
        synonyms = self.noise["synonyms"]

        def synonym(match: re.Match[str]) -> str:
            word = match[0]
            return rng.choice(synonyms[word]) if word in synonyms and rng.random() < 0.35 else word

        # Slots, names, options and commands stay as they are, and so do names of presets ("the preset safe").
        return re.sub(r"(?<![\w{/<-])(?<!\bpreset )[a-z]+(?![\w}-]| preset\b)", synonym, text)

    def reworded(self, question: str, rng: random.Random) -> str:
        """The same question, perhaps asked in another way."""
        for pattern, replacements in self.rewrites:
            if match := pattern.fullmatch(question):
                return re.sub(r"\$(\d)", lambda ref: match[int(ref[1])], rng.choice(replacements))
        return question

    def typed(self, question: str, rng: random.Random, *, plain: bool = False) -> str:
        """`question` as somebody may type it: with or without capitals, punctuation, fillers and typing errors.
        `plain` leaves the words as they are."""
        text = question
        if not plain:
            if rng.random() < 0.35:
                text = self.reworded(text, rng)
            style = rng.random()
            if style < 0.14:
                text = self._keywords(text, rng)
            elif style < 0.75:
                text = self._fillers(text, rng)
            if rng.random() < 0.13:
                text = typo(text, rng)
        if rng.random() < 0.2:
            for word in _CONTRACTED:
                text = text.replace(f"{word} is", f"{word}'s")
        if rng.random() < 0.2:
            text = text.replace("'", "")
        text = _capitals_and_mark(text, rng)
        return signed(text, rng) if rng.random() < SIGNED else text

    def _keywords(self, text: str, rng: random.Random) -> str:
        """As for a search engine: without stop words, sometimes out of order."""
        dropped = set(self.noise["dropped"])
        words = [
            word for word in text.split() if word.strip(",.?!:").lower() not in dropped or rng.random() < 0.2
        ]
        if len(words) > 3 and rng.random() < 0.4:
            words.pop(rng.randrange(len(words)))
        if rng.random() < 0.4:
            rng.shuffle(words)
        return " ".join(words) if len(words) > 1 else text

    def _fillers(self, text: str, rng: random.Random) -> str:
        for kind, chance in (("after", 0.15), ("before", 0.2)):
            if rng.random() < chance:
                text = rng.choice(self.noise[kind]).replace("{q}", text)
        if rng.random() < 0.07:
            words = text.split(" ")
            words.insert(rng.randrange(len(words) + 1), rng.choice(self.noise["adverbs"]))
            text = " ".join(words)
        return text


def gerund(phrase: str) -> str:
    """`stop the reply` -> `stopping the reply`."""
    verb, _, rest = phrase.partition(" ")
    if verb.endswith("e") and not verb.endswith(("ee", "oe", "ye")):
        stem = verb[:-1]
    elif verb in _DOUBLED:
        stem = verb + verb[-1]
    else:
        stem = verb
    return f"{stem}ing {rest}".strip()


def normalized(question: str) -> str:
    """The letters and digits of a question. Two questions are the same if these are equal."""
    return " ".join(re.findall(r"[^\W_]+", question.lower()))


def gist(question: str, stop_words: Collection[str]) -> str:
    """The words of a question, sorted, without the `stop_words`. Two questions are nearly the same if these are equal.
    "" if fewer than three words are left, because many questions share so few."""
    words = sorted(set(normalized(question).split()) - set(stop_words))
    return " ".join(words) if len(words) > 2 else ""


def _tidy(text: str) -> str:
    text = re.sub(r"\b(?:the|a|an|my) (it|that|this)\b", r"\1", text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r" ([,.?!:])", r"\1", text).removesuffix(",")


def typo(text: str, rng: random.Random) -> str:
    """One or two typing errors, in words of at least four letters."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        words = [match for match in _WORD.finditer(text) if len(match[0]) >= 4]
        if not words:
            return text
        word = rng.choice(words)
        at = rng.randrange(word.start(), word.end() - 1)
        kind = rng.randrange(4)
        near = _NEIGHBOURS.get(text[at].lower(), text[at])
        typos = (
            text[at + 1] + text[at],  # swapped
            text[at + 1],  # omitted
            text[at] + text[at] + text[at + 1],  # doubled
            rng.choice(near) + text[at + 1],  # a neighbouring key
        )
        text = text[:at] + typos[kind] + text[at + 2 :]
    return text


def _capitals_and_mark(text: str, rng: random.Random) -> str:
    """Capitals, and the punctuation at the end."""
    style = rng.random()
    if style < 0.42:
        text = re.sub(r"\bi\b", "I", text)
        text = text[:1].upper() + text[1:]
    elif style < 0.72:
        text = text.lower()
    elif style < 0.74:
        text = text.upper()
    if text[-1:] not in "?.!":
        text += rng.choice(("?", "?", "?", "?", "", "", "", ".", " ?", "??", "!"))
    return text
