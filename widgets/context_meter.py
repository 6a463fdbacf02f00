"""How full the context is: a bar, the number of tokens, and a warning when little is left."""

from __future__ import annotations

from textual.content import Content

from widgets.engine_status import NEARLY_FULL, EngineStatus
from widgets.text import as_bytes

MIN_BAR, MAX_BAR = 4, 16


def context_meter(used: int | None, total: int, width: int) -> Content:
    """The meter in at most `width` cells. `used` and `total` are in tokens; `used` None: not known yet."""
    if total <= 0 or width < 4:
        return Content("")
    share = min(1.0, (used or 0) / total)
    color = "$text-error" if share >= 0.95 else "$text-warning" if share >= NEARLY_FULL else "$foreground 60%"
    percent = "–" if used is None else f"{share:.0%}"
    tokens = f"{'–' if used is None else f'{used:,}'}/{total:,}"
    warning = " full" if share >= 1 else " nearly full" if share >= NEARLY_FULL else ""
    for text in (f"{tokens} tokens {percent}{warning}", f"{tokens} {percent}{warning}", tokens, percent):
        if (bar := min(MAX_BAR, width - len(text) - 1)) >= MIN_BAR:
            break
    else:
        return Content.styled(percent, color)
    half_cells = max(round(share * bar * 2), 1 if used else 0)
    filled = "━" * (half_cells // 2) + "╸" * (half_cells % 2)
    return Content.assemble(
        (filled, color), ("─" * (bar - len(filled)), "$foreground 30%"), (f" {text}", color)
    )


def context_help(status: EngineStatus) -> str:
    """What the meter shows, and how the engine goes back in a chat."""
    text = "Context: the tokens of this chat that the model has read and written, of those for which there is room."
    ready = status.ready
    if not ready.checkpoints:
        return text
    return (
        f"{text}\n\nThis model reads a chat into a state, from which no token can be taken out again. The engine keeps "
        f"up to {ready.checkpoints} checkpoints of it ({as_bytes(ready.states_bytes)}), at the ends of turns and "
        "between them. A regenerated reply or an edited message goes on from the last checkpoint before it."
    )
