"""The arguments of a call, as a model writes them, taken out of streamed text piece by piece, as JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from engine.formats.thinking import overlap
from engine.formats.tools.forms import Tags
from engine.formats.tools.json_kinds import ANY, TEXT, KindsOf, read


class Arguments(Protocol):
    """Reads the arguments of one call. `is_done`: they are complete."""

    is_done: bool

    def feed(self, text: str) -> tuple[str, str]:
        """(the next piece of JSON, the end of `text` that was not read: it comes again, or follows the arguments)."""
        ...

    def flush(self, text: str) -> str:
        """What is still to come when the reply has ended; `text` was not read."""
        ...


class JsonArguments:
    """A JSON object, which is handed on as it is."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth, self._in_text, self._escaped = 0, False, False

    def feed(self, text: str) -> tuple[str, str]:
        for i, character in enumerate(text):
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_text = False
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_done = True
                    return text[: i + 1], text[i + 1 :]
        return text, ""

    def flush(self, text: str) -> str:
        return text


class TagArguments:
    """Parameters in tags, up to the end of the call. A text has no quotation marks; other values are JSON, and are
    handed on once they are complete."""

    def __init__(self, tags: Tags, schema: Any) -> None:
        """`schema`: that of the arguments."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._kinds_of, self._properties = (
            KindsOf(schema),
            properties if isinstance(properties, Mapping) else {},
        )
        before, after = tags.key
        spaced = r"\s*".join(map(re.escape, after.split()))
        self._before_value = re.compile(f"{re.escape(before)}(.*?){spaced}", re.DOTALL)
        self._close = tags.value_end.strip()
        self._tags = tags
        self._unquoted: tuple[str, ...] = (before, self._close, tags.end)
        self._marks: tuple[str, ...] = self._unquoted  # what ends the value that is being read
        self.is_done = self._begun = False
        self._is_first = True  # no parameter has come yet
        self._key: str | None = None  # of the parameter that is being read
        self._is_text = self._at_start = False
        self._kinds = ANY
        self._value = ""  # of one that is no text

    def feed(self, text: str) -> tuple[str, str]:
        made, self._begun = "" if self._begun else "{", True
        while not self.is_done:
            more, text, goes_on = self._between(text) if self._key is None else self._within(text)
            made += more
            if not goes_on:
                break
        return made, text

    def flush(self, text: str) -> str:
        """A value that was cut off is not closed: nobody should act on it."""
        return self._piece(text) if self._key is not None else "}"

    def _between(self, text: str) -> tuple[str, str, bool]:
        """(JSON, the text that was not read, whether more of it can be)."""
        stripped = text.lstrip()
        if stripped.startswith(self._tags.end):
            return self._until_end(stripped)
        found = self._before_value.search(stripped)
        if not found:
            return self._until_end(stripped)
        key = found[1].strip()
        self._key, self._at_start, self._value = key, self._tags.has_breaks or self._tags.quotes[0] != "", ""
        self._marks = self._unquoted
        self._kinds = self._kinds_of(self._properties.get(key))
        self._is_text = self._kinds == TEXT
        comma = "" if self._is_first else ", "
        self._is_first = False
        opened = f"{comma}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._is_text else "")
        return opened, stripped[found.end() :], True

    def _until_end(self, text: str) -> tuple[str, str, bool]:
        if (at := text.find(self._tags.end)) >= 0:
            self.is_done = True
            return "}", text[at if self._tags.ends_call else at + len(self._tags.end) :], False
        return "", text, False

    def _within(self, text: str) -> tuple[str, str, bool]:
        breaks = "\n" if self._tags.has_breaks else ""
        if self._at_start:
            quote, unquote = self._tags.quotes
            if not text or (quote != text and quote.startswith(text)):
                return "", text, False
            text, self._at_start = text.removeprefix(breaks), False
            if quote and text.startswith(quote):
                text, self._marks = text[len(quote) :], (unquote + self._close,)
        found = [at for mark in self._marks if (at := text.find(mark)) >= 0]
        if not found:
            held = max(max(overlap(text, breaks + mark), overlap(text, mark)) for mark in self._marks)
            held = max(held, bool(breaks) and text.endswith(breaks))
            value, rest = text[: len(text) - held], text[len(text) - held :]
            return self._piece(value), rest, False
        at = min(found)
        close = self._close if self._marks is self._unquoted else self._marks[0]
        value, rest = text[:at].removesuffix(breaks), text[at:].removeprefix(close)
        self._key = None
        return self._piece(value) + self._ended(), rest, True

    def _piece(self, value: str) -> str:
        if self._is_text:
            return json.dumps(value, ensure_ascii=False)[1:-1]
        self._value += value
        return ""

    def _ended(self) -> str:
        if self._is_text:
            return '"'
        return json.dumps(read(self._value, self._kinds), ensure_ascii=False)


_QUOTE = '<|"|>'  # one token, which no text can spell
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LITERAL = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


class GemmaArguments:
    """An object as Gemma 4 writes it, {key:<|"|>a text<|"|>,number:1,list:[true]}."""

    def __init__(self) -> None:
        self.is_done = False
        self._open: list[str] = []  # the brackets that are open
        self._in_text = self._is_key = False
        self._word = ""  # of a key, or of a value that is no text

    def feed(self, text: str) -> tuple[str, str]:
        made = ""
        while text and not self.is_done:
            if self._in_text:
                value, quote, text = text.partition(_QUOTE)
                held = 0 if quote else overlap(value, _QUOTE)
                made += json.dumps(value[: len(value) - held], ensure_ascii=False)[1:-1]
                if not quote:
                    return made, value[len(value) - held :]
                self._in_text, made = False, f'{made}"'
            elif text.startswith(_QUOTE):
                self._in_text, made, text = True, f'{made}"', text[len(_QUOTE) :]
            elif _QUOTE.startswith(text):
                break
            else:
                made, text = made + self._outside(text[0]), text[1:]
        return made, text

    def flush(self, text: str) -> str:
        """A value that was cut off is not closed: nobody should act on it."""
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._in_text else ""

    def _outside(self, character: str) -> str:
        """The JSON that a character outside of texts completes."""
        if self._word.startswith('"') and not self._is_closed:
            self._word += character
        elif character == ":" and self._is_key:
            self._is_key = False
            return f"{self._taken()}: "
        elif character in "{[":
            self._open.append(character)
            self._is_key = character == "{"
            return character
        elif character in ",}]":
            word = self._taken()
            if character != ",":
                self._open = self._open[:-1]
                self.is_done = not self._open
                return word + character
            self._is_key = self._open[-1:] == ["{"]
            return f"{word}, "
        elif self._word or not character.isspace():
            self._word += character
        return ""

    @property
    def _is_closed(self) -> bool:
        """Whether the word is a text as JSON has it, up to its end."""
        return len(self._word) > 1 and self._word[-1] == '"' and bool(_JSON_TEXT.fullmatch(self._word))

    def _taken(self) -> str:
        word, self._word = self._word.rstrip(), ""
        known = _JSON_TEXT.fullmatch(word) or (not self._is_key and _LITERAL.fullmatch(word))
        return word if known or not word else json.dumps(word, ensure_ascii=False)
