"""The bottom line, always there: model, quantization, backend, speed and how full the context is."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from widgets.context_meter import context_meter
from widgets.engine_status import EngineStatus
from widgets.text import as_duration, one_line
from widgets.turn import WARNING

MAX_METER = 48
FULL_METER = 32
MIN_METER = 4
GAPS = 5
"""Cells between the parts: two after the model, at least one before the speed and two after it."""
COMPACT = 56


class StatusLine(Widget):
    DEFAULT_CSS = """
    StatusLine { height: 1; dock: bottom; padding: 0 2; background: $surface; color: $text-muted; }
    """
    ALLOW_SELECT = False

    status: reactive[EngineStatus] = reactive(EngineStatus())
    warning: reactive[str] = reactive("")
    """A lasting trouble, in two or three words ("not saved")."""

    def render(self) -> Content:
        """What is least wanted is left out until the rest fits: first the device, then the time to the first
        token, then the end of the model's name."""
        status, width = self.status, self.size.width
        compact = width < COMPACT
        model = one_line(status.model) or "no model yet"
        engine = [part for part in (one_line(status.quantization), one_line(status.backend)) if part]
        device = [one_line(status.device)] if status.device and status.device != status.backend else []
        speed_now = status.tokens_per_s
        if speed_now is None:
            rate = "–"
        elif compact:
            rate = f"{speed_now:.0f}"
        else:
            rate = f"{speed_now:,.{0 if speed_now >= 1000 else 1}f}"
        warning = ([WARNING] if compact else [f"{WARNING} {self.warning}"]) if self.warning else []
        speed = [*warning, f"{rate} tok/s"]
        first = [] if status.first_token_s is None else [f"first token {as_duration(status.first_token_s)}"]
        for left_parts, right_parts in (
            (engine + device, speed + first),
            (engine, speed + first),
            (engine, speed),
        ):
            left = (" " if compact else " · ").join(left_parts)
            right = (" " if compact else " · ").join(right_parts)
            room = width - len(model) - len(left) - len(right) - GAPS
            if room >= FULL_METER:
                break
        if (missing := MIN_METER - room) > 0:
            model = model[: max(1, len(model) - missing - 1)].rstrip() + "…"
            room = width - len(model) - len(left) - len(right) - GAPS
        meter = context_meter(status.context_used, status.context_length, min(room, MAX_METER))
        gap = " " * max(1, width - len(model) - len(left) - len(right) - meter.cell_length - GAPS + 1)
        return Content.assemble(
            (model, "bold $text"),
            (f"  {left}", "$foreground 70%"),
            gap,
            (right, "$text-warning" if self.warning else "$text"),
            "  ",
            meter,
        )
