"""Text from models, files and networks, made harmless and readable before it reaches the terminal."""

from __future__ import annotations

# What could act on the terminal or disguise text: C0 and C1 controls (ESC starts every control sequence), and
# the bidirectional embeddings, overrides and isolates, which show text in another order than it is in.
_HARMFUL = {
    **{code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"},
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A))),
    **dict.fromkeys((0x2028, 0x2029), "\n"),
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),  # lone surrogates, which UTF-8 cannot hold
}


def clean(text: str) -> str:
    """`text` without terminal control characters and bidirectional overrides; newlines and tabs stay.

    Works character by character, so that cleaning the parts of a stream cleans the stream.
    """
    return text.translate(_HARMFUL)


def one_line(text: str) -> str:
    """`text` cleaned, its white space folded to single spaces."""
    return " ".join(clean(text).split())


def as_bytes(count: int) -> str:
    """636 MB, 1.21 GB: decimal units, three significant digits, as model pages have them."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def as_count(count: int) -> str:
    """752M, 8.03B: a large count in short, as models are named."""
    return _scaled(count, ("", "K", "M", "B", "T")).replace(" ", "")


def _scaled(count: int, units: tuple[str, ...]) -> str:
    power = 0
    while power < len(units) - 1 and count >= 999.5 * 1000**power:
        power += 1
    value = count / 1000**power
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[power]}"


def as_duration(seconds: float) -> str:
    """0.34 s, 8.1 s, 42 s, 3 min 20 s."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
