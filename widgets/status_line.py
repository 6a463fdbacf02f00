"""The bottom line, always there: model, quantization, backend, speed and how full the context is."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from widgets.context_meter import context_meter
from widgets.engine_status import EngineStatus
from widgets.text import as_duration, one_line

MAX_METER = 48
MIN_METER = 9


class StatusLine(Widget):
    DEFAULT_CSS = """
    StatusLine { height: 1; dock: bottom; padding: 0 2; background: $surface; color: $text-muted; }
    """
    ALLOW_SELECT = False

    status: reactive[EngineStatus] = reactive(EngineStatus())
    warning: reactive[str] = reactive("")
    """A lasting trouble, in two or three words ("not saved")."""

    def render(self) -> Content:
        """Parts are left out from the least to the most wanted until the rest fits."""
        status, width = self.status, self.size.width
        model = one_line(status.model) or "no model yet"
        engine = [part for part in (one_line(status.quantization), one_line(status.backend)) if part]
        device = [one_line(status.device)] if status.device and status.device != status.backend else []
        speed = "– tok/s" if status.tokens_per_s is None else f"{status.tokens_per_s:.1f} tok/s"
        first = [] if status.first_token_s is None else [f"first token {as_duration(status.first_token_s)}"]
        warning = [f"⚠ {self.warning}"] if self.warning else []
        for figures, place in (([speed, *first], device), ([speed, *first], []), ([speed], [])):
            left = " · ".join([*engine, *place])
            right = " · ".join([*warning, *figures])
            room = width - len(model) - len(left) - len(right) - 7
            if room >= MAX_METER - 14:
                break
        if room < MIN_METER:
            model = model[: max(8, len(model) - (MIN_METER - room)) - 1] + "…"
            room = width - len(model) - len(left) - len(right) - 7
        meter = context_meter(status.context_used, status.context_length, min(room, MAX_METER))
        gap = " " * (width - len(model) - len(left) - len(right) - meter.cell_length - 5)
        return Content.assemble(
            (model, "bold $text"),
            "  ",
            left,
            gap,
            (right, "$text-warning" if warning else "$text"),
            "   ",
            meter,
        )
