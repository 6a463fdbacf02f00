"""Makes text from models, files and networks harmless for the terminal, and numbers readable."""

import re
from collections.abc import Sequence

_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that act on the terminal or disguise text: C0 and C1 controls (ESC starts every control sequence), and
the bidirectional embeddings, overrides and isolates, which show text in another order than it has; also Unicode's own
ends of lines, and lone surrogates, which UTF-8 cannot hold."""


def clean(text: str) -> str:
    """`text` without terminal controls and bidirectional overrides. Newlines and tabs stay.

    Each character is cleaned by itself, so a stream can be cleaned piece by piece.
    """
    return _HARMFUL.sub(_harmless, text)


def _harmless(found: re.Match[str]) -> str:
    char = found[0]
    return "\n" if char in "\u2028\u2029" else "\ufffd" if char >= "\ud800" else ""


def editable(text: str) -> str:
    """`text` cleaned, for a field in which it is edited. Line ends of any kind are newlines: terminals paste CR."""
    return clean(text.replace("\r\n", "\n").replace("\r", "\n"))


def one_line(text: str) -> str:
    """`text` cleaned, its white space folded to single spaces."""
    return " ".join(clean(text).split())


def longest_fitting(texts: Sequence[str], width: int) -> str:
    """The first of `texts`, which get shorter, that has at most `width` characters; the last if none has."""
    return next((text for text in texts if len(text) <= width), texts[-1])


def counted(count: int, noun: str) -> str:
    """1 token, 1,234 tokens."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def as_bytes(count: int) -> str:
    """636 MB, 1.21 GB: three significant digits and decimal units, as on model pages."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def cache_text(n_bytes: int, kv: str) -> str:
    """4.70 GB of KV cache; 2.50 GB of KV cache in q8_0: what a cache takes in the format `kv`. "" for 0 bytes."""
    if not n_bytes:
        return ""
    return f"{as_bytes(n_bytes)} of KV cache{f' in {kv}' if kv not in ('', 'f16') else ''}"


def as_rate(value: float | None) -> str:
    """0.52, 9.1, 84.0, 790, 39,000; "–" if it is not known: tokens or gigabytes a second, wherever they are shown."""
    if value is None:
        return "–"
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 0.995 else 2}f}"


def as_count(count: int) -> str:
    """752M, 8.03B: a count as in the names of models."""
    return _scaled(count, ("", "K", "M", "B", "T")).replace(" ", "")


def _scaled(count: int, units: tuple[str, ...]) -> str:
    power = 0
    while power < len(units) - 1 and count >= 999.5 * 1000**power:
        power += 1
    value = count / 1000**power
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[power]}"


def as_latency(seconds: float) -> str:
    """0.4 ms, 210 ms, 3.2 s."""
    if seconds >= 0.9995:
        return as_duration(seconds)
    return f"{seconds * 1e3:.{1 if seconds < 0.00995 else 0}f} ms"


def as_duration(seconds: float) -> str:
    """0.34 s, 8.1 s, 42 s, 3 min 20 s."""
    if seconds < 59.5:
        digits = 2 if seconds < 0.995 else 1 if seconds < 9.95 else 0
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
