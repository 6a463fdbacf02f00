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
_MAX_REFERENCES = 64


def kinds(schema: Any, whole: Any) -> Kinds:
    """The kinds that a `schema` allows. It is a part of the `whole`, to which its references lead."""
    return _kinds(schema, whole, {})


def _kinds(schema: Any, whole: Any, known: dict[str, Kinds]) -> Kinds:
    """`known`: those of references, each of which is followed once."""
    if not isinstance(schema, Mapping):
        return ANY
    match schema:
        case {"type": str(one)}:
            return frozenset({one})
        case {"type": list(several)}:
            return frozenset(each for each in several if isinstance(each, str))
        case {"const": value}:
            return frozenset({kind_of(value)})
        case {"enum": list(values)}:
            return frozenset(map(kind_of, values))
        case {"$ref": str(reference)}:
            if len(known) > _MAX_REFERENCES:
                return ANY
            if reference not in known:
                known[reference] = ANY  # if it leads to itself
                known[reference] = _kinds(_found(reference, whole), whole, known)
            return known[reference]
        case {"anyOf": list(choices)} | {"oneOf": list(choices)}:
            each = [_kinds(choice, whole, known) for choice in choices]
            return frozenset().union(*each) if all(each) else ANY
        case {"allOf": list(parts)}:
            return next((found for part in parts if (found := _kinds(part, whole, known))), ANY)
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
