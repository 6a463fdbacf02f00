"""Which kinds of JSON values a schema allows. Models that write calls in tags write texts without quotation marks, so
only the schema tells whether 42 is a number, or a text."""

import ast
import json
from collections.abc import Mapping
from typing import Any

Kinds = frozenset[str]
ANY: Kinds = frozenset()
"""Not known: any kind."""
TEXT: Kinds = frozenset({"string"})
_NESTED: Kinds = frozenset({"array", "object"})
_MAX_DEPTH = 200  # of references and choices within each other


class KindsOf:
    """The kinds that the parts of a schema allow. References lead to the `whole`, and each is followed once."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self._known: dict[str, Kinds] = {}

    def __call__(self, part: Any, depth: int = 0) -> Kinds:
        if not isinstance(part, Mapping) or depth > _MAX_DEPTH:
            return ANY
        match part:
            case {"type": str(one)}:
                return frozenset({one})
            case {"type": list(several)}:
                return frozenset(each for each in several if isinstance(each, str))
            case {"const": value}:
                return frozenset({kind_of(value)})
            case {"enum": list(values)}:
                return frozenset(map(kind_of, values))
            case {"$ref": str(reference)}:
                if reference not in self._known:
                    self._known[reference] = ANY  # if it leads to itself
                    self._known[reference] = self(_found(reference, self.whole), depth + 1)
                return self._known[reference]
            case {"anyOf": list(choices)} | {"oneOf": list(choices)}:
                each = [self(choice, depth + 1) for choice in choices]
                return frozenset().union(*each) if all(each) else ANY
            case {"allOf": list(parts)}:
                return next((found for within in parts if (found := self(within, depth + 1))), ANY)
        return ANY


def kind_of(value: object) -> str:
    """The kind of a JSON value, in the words of schemas."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def read(text: str, allowed: Kinds) -> Any:
    """The value that a model wrote as `text`: JSON, unless it is a text. Where a list or an object is allowed and no
    text, it may be one of Python: so templates show earlier ones (Seed-OSS)."""
    if allowed == TEXT:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _in_python(text) if allowed & _NESTED and "string" not in allowed else text
    kind = kind_of(value)
    fits = kind in allowed - TEXT or (kind == "integer" and "number" in allowed)
    return text if "string" in allowed and not fits else value


def _in_python(text: str) -> Any:
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, list | dict) else text


def _found(reference: str, whole: Any) -> Any:
    """What a reference within the schema leads to (https://www.rfc-editor.org/rfc/rfc6901)."""
    if not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        whole = whole.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(whole, Mapping) else None
    return whole
