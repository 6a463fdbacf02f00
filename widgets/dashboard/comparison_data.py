"""Two engines' answers to the same prompt, as immutable data, and their figures in words."""

from dataclasses import dataclass
from typing import NamedTuple

from widgets.text import as_bytes, as_latency, clean, counted, one_line


@dataclass(frozen=True)
class EngineAnswer:
    """One engine and its answer so far. `state` says what the engine does, `problem` why it has no answer. `text` is
    the same as the other engine's up to the character `same`. `prefill` and `decode` are in tokens/s. `gbps` is
    modelled from the bytes that a token must read; `share` is its part of the measured bandwidth. None: not known."""

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
    """The first token, counted from 1, at which the answers differ, and its text in each. `left_odds` are the
    probabilities that the left engine gives to the left and to the right token, `right_odds` those of the right
    engine (None: not asked, or not among its most probable tokens)."""

    position: int
    left: str
    right: str
    left_odds: tuple[float | None, float | None] = (None, None)
    right_odds: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class ComparisonData:
    """`asked` is the prompt. `together`: both answer at the same time. `complete`: both have ended. `remark` is a
    reason to distrust the figures. `same` counts the tokens up to the first difference."""

    left: EngineAnswer
    right: EngineAnswer
    asked: str = ""
    together: bool = False
    complete: bool = False
    remark: str = ""
    same: int = 0
    difference: Difference | None = None


class FigureRow(NamedTuple):
    """One figure of both engines. `ratio` is how many times the left one is better (None: not known)."""

    left: str
    label: str
    ratio: float | None
    right: str


def figure_rows(data: ComparisonData) -> list[FigureRow]:
    """The figures of both engines. They have no ratios while there is a reason to distrust them (`data.remark`)."""
    left, right = data.left, data.right

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a and b and not data.remark else None

    first_token = ratio(right.first_token_s, left.first_token_s)
    return [
        FigureRow(_latency(left.first_token_s), "first token", first_token, _latency(right.first_token_s)),
        FigureRow(_rate(left.prefill), "prefill", ratio(left.prefill, right.prefill), _rate(right.prefill)),
        FigureRow(_rate(left.decode), "decode", ratio(left.decode, right.decode), _rate(right.decode)),
        FigureRow(_bandwidth(left), "modelled GB/s", None, _bandwidth(right)),
        FigureRow(_memory(left), "memory", None, _memory(right)),
    ]


def ratio_text(ratio: float | None) -> str:
    """◀ 2.71× if the left is better, 1.04× ▶ if the right is; "" without a ratio."""
    if not ratio:
        return ""
    return f"◀ {ratio:.2f}×" if ratio >= 1.005 else f"{1 / ratio:.2f}× ▶" if ratio < 0.995 else "alike"


def conditions(data: ComparisonData) -> str:
    """How the engines were asked, after any reason to distrust the figures."""
    how = f"{'together: they share the memory' if data.together else 'in turn'} · greedy"
    return f"⚠ {one_line(data.remark)}: no ratios · {how}" if data.remark else how


def text_comparison(data: ComparisonData) -> str:
    """A sentence on whether the texts are the same, or on what the next prompt will do."""
    left, right = data.left, data.right
    if data.difference is not None:
        return _difference(data.difference, left.name, right.name)
    if data.complete and (left.problem or right.problem or not data.same):
        return "The texts cannot be compared."
    tokens = counted(data.same, "token")
    if data.complete:
        return f"The same {tokens}."
    if left.tokens and right.tokens:
        return f"The same so far: {tokens}."
    if left.tokens or right.tokens or data.asked:
        return ""
    if right.problem:
        return f"The next prompt tries {one_line(right.name)} again; without it, orin-chat answers alone."
    return "The next prompt is answered by both."


def _difference(difference: Difference, *names: str) -> str:
    odds = "".join(
        f" · to {one_line(name)} {' and '.join('–' if p is None else f'{100 * p:.3g}%' for p in pair)}"
        for name, pair in zip(names, (difference.left_odds, difference.right_odds), strict=True)
        if None not in pair
    )
    tokens = f"{_quoted(difference.left)} or {_quoted(difference.right)}"
    return f"They differ from token {difference.position:,} on: {tokens}{odds}"


def _quoted(text: str) -> str:
    """A token's text with visible white space."""
    visible = clean(text).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return f"“{visible}”" if visible else "a token without text"


def _latency(seconds: float | None) -> str:
    return "–" if seconds is None else as_latency(seconds)


def _rate(value: float | None) -> str:
    return "–" if not value else f"{value:,.0f} tok/s" if value >= 1000 else f"{value:.1f} tok/s"


def _bandwidth(answer: EngineAnswer) -> str:
    if not answer.gbps:
        return "–"
    share = f" ({answer.share:.0%} of roofline)" if answer.share else ""
    return f"{answer.gbps:,.1f}{share}"


def _memory(answer: EngineAnswer) -> str:
    return "–" if answer.memory_bytes is None else as_bytes(answer.memory_bytes)
