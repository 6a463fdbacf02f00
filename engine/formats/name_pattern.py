"""A pattern that finds any of many names in a text, in time that grows with the text and not with the names."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby


def any_name(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern with one group that matches any of `names`, the longest that begins at a place; nothing if there are
    none. What names have in common stands once in it: <|1|> to <|9|> are <\\|[123456789]\\|>. So a text is compared
    with a beginning once, and not with each of the names that have it."""
    known = sorted({*names} - {""})
    try:
        return re.compile(f"({_rest(known, 0) if known else '(?!)'})")
    except RecursionError:  # hundreds of names, each of which is the beginning of the next
        return re.compile(f"({'|'.join(map(re.escape, sorted(known, key=len, reverse=True)))})")


def _rest(names: Sequence[str], start: int) -> str:
    """A pattern of what sorted names, which are the same until `start`, have from there on."""
    first, last = names[0], names[-1]  # what these share, all do
    length = next(
        (i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first)
    )
    beginning, one_ends = re.escape(first[start:length]), length == len(first)
    longer = names[1:] if one_ends else names
    if not longer:
        return beginning
    characters: dict[str, str] = {}  # by the rest that they lead to
    for character, group in groupby(longer, lambda name: name[length]):
        rest = _rest([*group], length + 1)
        characters[rest] = characters.get(rest, "") + character
    branches = [
        (re.escape(some) if len(some) == 1 else f"[{re.escape(some)}]") + rest
        for rest, some in characters.items()
    ]
    if len(branches) == 1 and not one_ends:
        return beginning + branches[0]
    return f"{beginning}(?:{'|'.join(branches)}){'?' if one_ends else ''}"
