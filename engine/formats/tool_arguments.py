"""The arguments of a call, as a model writes them, taken out of streamed text piece by piece, as JSON."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from engine.formats.json_kinds import ANY, TEXT, kinds, read
from engine.formats.thinking import overlap


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


_PARAMETER, _CLOSE, _END = "<parameter=", "</parameter>", "</function>"
_MARKS = (_PARAMETER, _CLOSE, _END)


class TagArguments:
    """Parameters in tags, <parameter=KEY>VALUE</parameter>, up to </function>. A text has no quotation marks; other
    values are JSON, and are handed on once they are complete."""

    def __init__(self, schema: Any) -> None:
        """`schema`: that of the arguments."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._schema, self._properties = schema, properties if isinstance(properties, Mapping) else {}
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
        if stripped.startswith(_END):
            self.is_done = True
            return "}", stripped[len(_END) :], False
        at = stripped.find(_PARAMETER)
        end = stripped.find(">", at) if at >= 0 else -1
        if end < 0:
            return self._until_end(stripped)
        key = stripped[at + len(_PARAMETER) : end].strip()
        self._key, self._at_start, self._value = key, True, ""
        self._kinds = kinds(self._properties.get(key), self._schema)
        self._is_text = self._kinds == TEXT
        comma = "" if self._is_first else ", "
        self._is_first = False
        opened = f"{comma}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._is_text else "")
        return opened, stripped[end + 1 :], True

    def _until_end(self, text: str) -> tuple[str, str, bool]:
        if (at := text.find(_END)) >= 0:
            self.is_done = True
            return "}", text[at + len(_END) :], False
        return "", text, False

    def _within(self, text: str) -> tuple[str, str, bool]:
        if self._at_start:
            if not text:
                return "", text, False
            text, self._at_start = text.removeprefix("\n"), False
        found = [at for mark in _MARKS if (at := text.find(mark)) >= 0]
        if not found:
            held = max(max(overlap(text, f"\n{mark}"), overlap(text, mark)) for mark in _MARKS)
            held = max(held, text.endswith("\n"))
            value, rest = text[: len(text) - held], text[len(text) - held :]
            return self._piece(value), rest, False
        at = min(found)
        value, rest = text[:at].removesuffix("\n"), text[at:].removeprefix(_CLOSE)
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
