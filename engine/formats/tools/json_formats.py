"""What llguidance keeps too loosely of JSON schemas, in a form that it keeps: formats of texts as patterns, bounds
beyond the integers that a double has, and integers without bounds, with whose digits a model could go on for ever.

Times and dates are those of RFC 3339, section 5.6. A leap second is one only at some ends of a month, so none is made.
The part of an e-mail address before the @ has at most 64 characters (RFC 5321, section 4.5.3.1).
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from engine.errors import UsageError
from engine.formats.tools.json_subschemas import with_subschemas

_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = rf"{_ATOM}{{1,30}}(\.{_ATOM}{{1,10}}){{0,3}}@({_LABEL}\.){{1,3}}[A-Za-z]{{2,20}}"
PATTERNS = {
    "email": f"^{_EMAIL}$",
    "time": f"^{_TIME}$",
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
}
_EXACT = 2**53
"""llguidance reads numbers as doubles: it rounds integers beyond this."""
_MOST = 2**63 - 1024
"""llguidance takes a bound beyond this for one at 2^63, and refuses a range up to that."""
_MAX_KINDS = 16
"""Kinds of integers that get bounds: the library takes 5 ms for each, and only so many fit into its limits."""
_ENDS = {"minimum": ("exclusiveMinimum", -_MOST), "maximum": ("exclusiveMaximum", _MOST)}
_ANNOTATIONS = ("title", "description", "default", "examples", "example", "deprecated")
_KIND = "bounded-integer-{}"
_DECIDED = ("enum", "const", "multipleOf", "$ref", "anyOf", "allOf", "oneOf")
"""Beside these, an integer is left as it is."""


def with_strict_formats(schema: Any) -> Any:
    """A JSON schema in which texts of `PATTERNS` have a pattern in place of their format, bounds beyond 2^53 are
    rounded inwards, beyond 2^63 to `_MOST`, and integers have bounds. Raises UsageError where nothing within fits, and
    for greater numbers of `const` and `enum`."""
    return _with_bounded_integers(_strict(schema))


def _with_bounded_integers(schema: Any) -> Any:
    """Integers without a bound at one end or both have those of 64 bits. Each kind is a definition, which the library
    compiles once."""
    kinds = dict[str, dict[str, Any]]()

    def bounded(part: Any) -> Any:
        # References would begin there
        if not isinstance(part, Mapping) or ("$id" in part and part is not schema):
            return part
        ends = {end: most for end, (other, most) in _ENDS.items() if end not in part and other not in part}
        if part.get("type") != "integer" or not ends or any(key in part for key in _DECIDED):
            return with_subschemas(part, bounded)
        kind = {key: value for key, value in part.items() if key not in _ANNOTATIONS} | ends
        name = json.dumps(kind, sort_keys=True)
        if name not in kinds and len(kinds) == _MAX_KINDS:
            return part
        kinds.setdefault(name, kind)
        return {"$ref": f"#/$defs/{_KIND.format([*kinds].index(name))}"}

    made = bounded(schema)
    if kinds:
        given = made.get("$defs")
        made["$defs"] = (given if isinstance(given, dict) else {}) | {
            _KIND.format(i): kind for i, kind in enumerate(kinds.values())
        }
    return made


def _strict(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = with_subschemas(schema, _strict)
    _bound(made, 1, ("minimum", "exclusiveMinimum"))
    _bound(made, -1, ("maximum", "exclusiveMaximum"))
    for number in _numbers([schema.get("const"), schema.get("enum")]):
        if abs(number) > _EXACT:
            raise UsageError(
                f"A JSON schema has {number} as a value: numbers beyond 2^53 are not kept exactly.",
                "Make it a text, or give an integer bounds in place of a value.",
            )
    kind, format = schema.get("type"), schema.get("format")
    if kind in ("string", None) and isinstance(format, str) and (pattern := PATTERNS.get(format)):
        del made["format"]
        if "pattern" in schema:
            others = made.get("allOf", [])
            made["allOf"] = [*others, {"pattern": pattern}] if isinstance(others, list) else others
        else:
            made["pattern"] = pattern
    return made


def _bound(schema: dict[str, Any], sign: int, keys: tuple[str, str]) -> None:
    """Makes bounds beyond 2^53 one that llguidance keeps, `sign` times which is the least; the second of `keys` leaves
    its number out."""
    given = {key: schema[key] for key in keys if _is_number(schema.get(key))}
    if all(abs(value) <= _EXACT for value in given.values()):
        return
    least = max(_least(sign * value, key == keys[1]) for key, value in given.items())
    if least > _MOST:
        raise UsageError(
            f"A JSON schema asks for numbers beyond 2^63: {' and '.join(f'{k} {v}' for k, v in given.items())}.",
            "Give bounds within -2^63 and 2^63.",
        )
    for key in given:
        del schema[key]
    schema[keys[0]] = sign * max(least, -_MOST)


def _least(bound: int | float, is_out: bool) -> int | float:
    """The least double that is not below a bound, or above it if that `is_out`; an integer where doubles are."""
    try:
        number = float(bound)
    except OverflowError:
        number = math.inf if bound > 0 else -math.inf
    if number < bound or (is_out and number == bound):
        number = math.nextafter(number, math.inf)
    return int(number) if math.isfinite(number) and number.is_integer() else number


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: object) -> Iterator[int | float]:
    """The numbers in a JSON value."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif _is_number(value):
        yield value
