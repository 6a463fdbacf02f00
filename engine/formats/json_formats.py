"""Formats of texts in JSON schemas that llguidance keeps too loosely: as patterns, it keeps them.

Times and dates are those of RFC 3339, section 5.6. A leap second is one only at some ends of a month, so none is made.
The part of an e-mail address before the @ has at most 64 characters (RFC 5321, section 4.5.3.1).
"""

from collections.abc import Mapping
from typing import Any

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
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


def with_strict_formats(schema: Any) -> Any:
    """A JSON schema in which texts of `PATTERNS` have a pattern in place of their format."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: with_strict_formats(each) for name, each in value.items()}
        elif key in _LISTED and isinstance(value, list):
            made[key] = [with_strict_formats(each) for each in value]
        elif key in _ONE:
            made[key] = with_strict_formats(value)
    kind, format = schema.get("type"), schema.get("format")
    if kind in ("string", None) and isinstance(format, str) and (pattern := PATTERNS.get(format)):
        del made["format"]
        if "pattern" in schema:
            made["allOf"] = [*made.get("allOf", ()), {"pattern": pattern}]
        else:
            made["pattern"] = pattern
    return made
