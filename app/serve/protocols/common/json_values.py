"""The JSON of requests as types. null is the same as a field that is absent, and unknown fields are ignored."""

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeVar

import msgspec

from app.serve.errors import ApiError, wrong
from engine.formats.tokens.half_characters import without_half_characters

MAX_DEPTH = 64  # of JSON in JSON
MAX_VALUES = 1 << 18  # in it
MAX_NAMES = 2048  # of an object in it: compiling a schema takes as long as their square, 0.2 s for these
MAX_PATTERNS = 64  # of an object's names in a schema: this takes as long as their cube, 10 ms for these
MAX_TEXT = 1 << 13
"""Characters of a name, or of a text or pattern that an answer keeps to. Each token of such an answer takes as long as
the text is, and 100,000 characters take 50 to 100 MB."""
T = TypeVar("T")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


def decoded(data: bytes | bytearray, kind: type[T]) -> T:
    """The JSON object `data`. Raises ApiError, which names the field that has a wrong type."""
    text = memoryview(data)[len(_BYTE_ORDER_MARK) :] if data.startswith(_BYTE_ORDER_MARK) else data
    try:
        return _decoded(text, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The request is not valid JSON: {error}.") from None
    except RecursionError:
        raise ApiError(400, "The request is nested too deeply.") from None


def _decoded(data: memoryview | bytes | bytearray, kind: type[T]) -> T:
    """Whole numbers may be written with a fraction (100.0), as some clients do, and a character may be a half one.
    Raises msgspec's errors."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if "`int" not in str(error) or "got `float`" not in str(error):
            raise
    except msgspec.DecodeError:
        if (whole := without_half_characters(data)) == data:
            raise
        return _decoded(whole, kind)
    value = msgspec.json.decode(data)
    if isinstance(value, dict):
        value = _with_whole_numbers(value)
        if isinstance(options := value.get("options"), dict):  # Ollama's
            value["options"] = _with_whole_numbers(options)
    return msgspec.convert(value, kind)


def _with_whole_numbers(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in fields.items()
    }


def converted(value: Any, kind: type[T], param: str) -> T:
    """A field of a request as a type. Raises ApiError, which names the part that has a wrong one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, param) from None


def _wrong_type(error: msgspec.ValidationError, within: str = "") -> ApiError:
    """`within`: the field that was converted."""
    message = str(error)
    place, missing = _PLACE.search(message), re.search(r"missing required field `(\w+)`", message)
    names = [f"{within}{place[1] if place else ''}", missing[1] if missing else ""]
    param, what = ".".join(filter(None, names)), _PLACE.sub("", message)
    return ApiError(400, f"{param}: {what}." if param else f"{what}.", param=param or None)


def check_size(value: dict[str, Any] | list[Any], param: str) -> None:
    """Raises ApiError for JSON that is nested more deeply, or has more values, than anything that is meant: nobody else
    is answered while it is gone through."""
    containers, count = [value], 0
    for _ in range(MAX_DEPTH + 1):
        count += sum(map(len, containers))
        objects = [each for each in containers if isinstance(each, dict)]
        patterns = [each.get("patternProperties") for each in objects]
        if (
            count > MAX_VALUES
            or max(map(len, objects), default=0) > MAX_NAMES
            or any(isinstance(each, dict) and len(each) > MAX_PATTERNS for each in patterns)
        ):
            raise wrong(f"{param} has too many parts.", param)
        check_texts(chain.from_iterable(map(_texts, containers)), param)
        items = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in containers)
        containers = [item for item in items if isinstance(item, dict | list)]
    if containers:
        raise wrong(f"{param} is nested too deeply.", param)


def check_texts(texts: Iterable[Any], param: str) -> None:
    """Raises ApiError if one of `texts` that an answer is to keep to is too long."""
    if any(isinstance(text, str) and len(text) > MAX_TEXT for text in texts):
        raise wrong(f"{param} has texts of more than {MAX_TEXT:,} characters to keep to.", param)


def _texts(part: dict[str, Any] | list[Any]) -> Iterable[Any]:
    """The values in a part of a schema that bind an answer, without those that only describe it."""
    return (*part, part.get("const"), part.get("pattern")) if isinstance(part, dict) else part
