"""How full the context is: a bar, the numbers, and a word when little is left."""

from __future__ import annotations

from textual.content import Content

NEARLY_FULL = 0.8
MAX_BAR = 16


def context_meter(used: int | None, total: int, width: int) -> Content:
    """The meter in at most `width` cells; the numbers shorten where there is little room.

    `used` and `total` in tokens. `used` None: not known, for a conversation that no engine has read yet.
    """
    if total <= 0 or width < 4:
        return Content("")
    share = min(1.0, (used or 0) / total)
    color = "$text-error" if share >= 0.95 else "$text-warning" if share >= NEARLY_FULL else "$foreground 60%"
    percent = "–" if used is None else f"{share:.0%}"
    exact = f"{'–' if used is None else f'{used:,}'}/{total:,}"
    warning = " full" if share >= 1 else " nearly full" if share >= NEARLY_FULL else ""
    for numbers in (f"{exact} tokens {percent}{warning}", f"{exact} {percent}{warning}", exact, percent):
        if (bar := min(MAX_BAR, width - len(numbers) - 1)) >= 4:
            break
    else:
        return Content.styled(percent, color)
    half_cells = max(round(share * bar * 2), 1 if used else 0)
    filled = "━" * (half_cells // 2) + "╸" * (half_cells % 2)
    return Content.assemble(
        (filled, color), ("─" * (bar - len(filled)), "$foreground 30%"), (f" {numbers}", color)
    )
