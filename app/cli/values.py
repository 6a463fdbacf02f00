"""The values of options, read from their texts."""

from __future__ import annotations

import argparse
import re
from typing import Literal


def count(text: str, minimum: int = 0) -> int:
    """A whole number of `minimum` or more, of 32 bits. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text[:20]) < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number, {minimum} or more, not {text!r}")
    if len(text) > 20 or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be less than {2**31:,}, not {text[:40]!r}")
    return int(text)


def duration(text: str) -> float:
    """Seconds, of 90s, 10m, 2h, or 0. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d{1,6})([smh]?)", text.strip(), re.ASCII)
    if not match or (not match[2] and int(match[1])):
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 10m or 2h, not {text!r}")
    return float(int(match[1]) * {"s": 1, "m": 60, "h": 3600, "": 0}[match[2]])


def positive(text: str) -> int:
    """A whole number of 1 or more. Raises ArgumentTypeError."""
    return count(text, 1)


def context(text: str) -> int | Literal["max"]:
    """Tokens of context, or "max". Raises ArgumentTypeError."""
    try:
        return "max" if text == "max" else count(text, 2)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(str(error).replace(" or more,", " or more, or max,")) from None


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. Raises ArgumentTypeError."""
    return tuple(count(part.strip()) for part in text.split(","))
