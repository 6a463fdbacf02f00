"""What is said of two engines' answers to the same prompt: one immutable data, and its figures in words."""

from __future__ import annotations

from dataclasses import dataclass

from widgets.text import as_bytes, as_duration, clean, one_line


@dataclass(frozen=True)
class EngineAnswer:
    """One engine and its answer so far. `state` is what it does, in words; `problem` what went wrong, in
    sentences, in the place of figures. `text` agrees with the other column's up to the character `same`.
    Rates in tokens a second, `gbps` in 10^9 bytes a second as modelled from the bytes that a token must read,
    `share` of the measured bandwidth. None: not known (yet)."""

    name: str
    about: str = ""
    state: str = ""
    text: str = ""
    same: int = 0
    problem: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    first_token_s: float | None = None
    prefill: float | None = None
    decode: float | None = None
    gbps: float | None = None
    share: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Difference:
    """The first token, counted from 1, at which two answers differ. `left` and `right` are the texts of both
    candidates; `left_odds` and `right_odds` what the left and the right engine make of them: the probability
    of the left candidate, then of the right one (None: not asked, or not among its most probable)."""

    position: int
    left: str
    right: str
    left_odds: tuple[float | None, float | None] = (None, None)
    right_odds: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class ComparisonData:
    """What the pane shows. `asked` is the prompt; `same` counts the tokens that are alike so far; `complete`:
    both have ended; `remark` is on what makes the figures worse than they could be."""

    left: EngineAnswer
    right: EngineAnswer
    asked: str = ""
    together: bool = False
    complete: bool = False
    remark: str = ""
    same: int = 0
    difference: Difference | None = None


Row = tuple[str, str, float | None, str]
"""The left figure, what it is, how many times the left is better (None: no ratio), the right figure."""


def rows(data: ComparisonData) -> list[Row]:
    """The figures of both, line by line."""
    left, right = data.left, data.right

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    return [
        (
            _seconds(left.first_token_s),
            "first token",
            ratio(right.first_token_s, left.first_token_s),
            _seconds(right.first_token_s),
        ),
        (_rate(left.prefill), "prefill", ratio(left.prefill, right.prefill), _rate(right.prefill)),
        (_rate(left.decode), "decode", ratio(left.decode, right.decode), _rate(right.decode)),
        (_bandwidth(left), "modelled GB/s", None, _bandwidth(right)),
        (_memory(left), "memory", None, _memory(right)),
    ]


def times(ratio: float | None) -> str:
    """◀ 2.71× where the left is better, 1.04× ▶ where the right is; "" without a ratio."""
    if not ratio:
        return ""
    return f"◀ {ratio:.2f}×" if ratio >= 1.005 else f"{1 / ratio:.2f}× ▶" if ratio < 0.995 else "alike"


def mode(data: ComparisonData) -> str:
    """How the two were asked, and what there is to say against their figures."""
    how = f"{'together: they share the memory' if data.together else 'in turn'} · greedy"
    return f"⚠ {one_line(data.remark)} · {how}" if data.remark else how


def verdict(data: ComparisonData) -> str:
    """What there is to say of the texts."""
    different = data.difference
    if different is None:
        if not (data.complete or data.left.tokens or data.right.tokens):
            return "" if data.asked else _before_it(data.right)
        counted = f"{data.same:,} token{'' if data.same == 1 else 's'}"
        if data.complete and (data.left.problem or data.right.problem or not data.same):
            return "The texts cannot be compared."
        if data.complete:
            return f"The same {counted}."
        return f"The same so far: {counted}." if data.left.tokens and data.right.tokens else ""
    odds = ""
    if None not in different.left_odds:
        odds = f" · to {one_line(data.left.name)} {_odds(different.left_odds)}"
    if None not in different.right_odds:
        odds += f" · to {one_line(data.right.name)} {_odds(different.right_odds)}"
    candidates = f"{_quoted(different.left)} or {_quoted(different.right)}"
    return f"They differ from token {different.position:,} on: {candidates}{odds}"


def _before_it(right: EngineAnswer) -> str:
    """What the next prompt will bring."""
    if right.problem:
        return f"The next prompt tries {one_line(right.name)} again; without it, orin-chat answers alone."
    return "The next prompt is answered by both."


def _odds(odds: tuple[float | None, float | None]) -> str:
    return " and ".join("–" if p is None else f"{100 * p:.3g}%" for p in odds)


def _quoted(text: str) -> str:
    """A token's text, its white space visible."""
    shown = clean(text).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return f"“{shown}”" if shown else "a token without text"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.0f} ms" if value < 0.995 else as_duration(value)


def _rate(value: float | None) -> str:
    return "–" if not value else f"{value:,.0f} tok/s" if value >= 1000 else f"{value:.1f} tok/s"


def _bandwidth(column: EngineAnswer) -> str:
    if not column.gbps:
        return "–"
    share = f" ({column.share:.0%} of roofline)" if column.share else ""
    return f"{column.gbps:,.1f}{share}"


def _memory(column: EngineAnswer) -> str:
    return "–" if column.memory_bytes is None else as_bytes(column.memory_bytes)
