"""Says in words what is wrong with a key in a file of settings, and what it takes instead."""

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import inspect

_info = functools.cache(inspect.type_info)
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`")
_WRONG = re.compile(r"(?:Expected `|Invalid enum value )")
_PLACE = re.compile(r" - at `\$([^`]*)`$")
_WORDS: dict[type[inspect.Type], str] = {
    inspect.IntType: "a whole number", inspect.FloatType: "a number", inspect.StrType: "a text in quotation marks",
    inspect.BoolType: "true or false", inspect.VarTupleType: "a list of texts", inspect.DictType: "a table",
    inspect.StructType: "a table",
}  # fmt: skip
_ELSEWHERE = {"theme": "Ctrl+P in the chat chooses the theme, and it is kept"}


def flaw(reason: str, names: Sequence[str], settings: type[Any]) -> str:
    """What is wrong with a key of the struct `settings`; `names` are those of its table and its own. `reason` is what
    msgspec says of it, or a sentence, which stays as it is."""
    place = _PLACE.search(reason)
    inner = place[1].removeprefix("." + names[0]).replace("[...]", "." + names[-1]) if place else ""
    path = [names[0], *(part for part in inner.split(".") if part)]  # msgspec names the innermost table
    if unknown := _UNKNOWN.match(reason):
        table = _type(path if place else [], settings)
        keys = {name: name for name in _keys(table)}
        for name in keys.copy() if not place else ():  # keys of a table that stand above it
            keys |= {
                key: f"{key} under [{name}]" for key in _keys(_type([name], settings)) if key not in keys
            }
        near = [keys[name] for name in difflib.get_close_matches(unknown[1], keys, 1, 0.7)]
        is_table = not place and unknown[1] == names[0] != names[-1]
        said = "there is no such key" if unknown[1] == names[-1] else f"it has no key {unknown[1]}"
        said = f"there is no table [{unknown[1]}]" if is_table else said
        if unknown[1] in _ELSEWHERE and not place:
            return f"{said}; {_ELSEWHERE[unknown[1]]}"
        return f"{said}; is {near[0]} meant?" if near else said
    if _WRONG.match(reason) and (takes := [*dict.fromkeys(_takes(_type(path, settings)))]):
        subject = "it" if path[-1] == names[-1] else path[-1]
        return f"{subject} takes {', '.join(takes[:-1])}{' or ' if takes[1:] else ''}{takes[-1]}"
    text = _PLACE.sub("", reason)
    return text[:1].lower() + text[1:]


def _keys(table: inspect.Type | None) -> list[str]:
    return [field.encode_name for field in table.fields] if isinstance(table, inspect.StructType) else []


def _type(path: Sequence[str], settings: type[Any]) -> inspect.Type | None:
    kind: inspect.Type | None = _info(settings)  # type: ignore[arg-type]  # classes can be hashed
    for name in path:
        match kind:
            case inspect.StructType():
                kind = next((field.type for field in kind.fields if field.encode_name == name), None)
            case inspect.DictType():
                kind = kind.value_type
            case _:
                return None
    return kind


def _takes(kind: inspect.Type | None) -> Iterator[str]:
    """The values that a type has, or what they are in words."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _takes(one)
        case inspect.LiteralType():
            yield from (f'"{value}"' for value in kind.values)
        case inspect.EnumType():
            yield from (f'"{member.value}"' for member in kind.cls)
        case inspect.IntType(ge=int(least), le=int(most)) | inspect.FloatType(ge=least, le=most) if (
            least is not None
        ):
            yield f"{_WORDS[type(kind)]} from {least:,} to {most:,.0f}"
        case inspect.Type() if word := _WORDS.get(type(kind)):
            yield word
