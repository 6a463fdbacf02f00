"""Where a JSON schema has others within: names of properties may be those of keywords, so a search of all of its parts
would change more than schemas."""

from collections.abc import Callable, Mapping
from typing import Any

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


def with_subschemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a schema in which `change` has made those right within it."""
    made = dict(schema)
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: change(each) for name, each in value.items()}
        elif (key in _LISTED or key == "items") and isinstance(value, list):
            made[key] = [change(each) for each in value]
        elif key in _ONE:
            made[key] = change(value)
    return made
