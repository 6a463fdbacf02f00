"""The bottom line: model, quantization, backend, speed and how full the context is."""

from textual.content import Content
from textual.events import MouseMove
from textual.reactive import reactive
from textual.widget import Widget

from widgets.chat.turn import WARNING
from widgets.engine_status import NEARLY_FULL, EngineStatus
from widgets.labels import LABELS, label_at
from widgets.text import as_bytes, as_latency, as_rate, one_line

MIN_METER, GOOD_METER, MAX_METER = 4, 32, 48
MIN_BAR, MAX_BAR = 4, 16
COMPACT_WIDTH = 56
GAPS = 5
"""Cells between the parts: two after the model, at least one before the speed and two after it."""


class StatusLine(Widget):
    DEFAULT_CSS = """
    StatusLine { height: 1; dock: bottom; padding: 0 2; background: $surface; color: $text-muted; }
    """
    ALLOW_SELECT = False

    status: reactive[EngineStatus] = reactive(EngineStatus())
    warning: reactive[str] = reactive("")
    """A lasting problem, in two or three words ("not saved")."""

    def on_mouse_move(self, event: MouseMove) -> None:
        """The tooltip is that of the label under the mouse; else it is about the context."""
        at = event.get_content_offset(self)
        help = label_at(self.render().plain, at.x, LABELS["status line"]) if at is not None else ""
        self._show_help(context_help(self.status) if help.startswith("tokens:") or not help else help)

    def watch_status(self, status: EngineStatus) -> None:
        self._show_help(context_help(status))

    def _show_help(self, help: str) -> None:
        if self.tooltip != (text := Content(help)):
            self.tooltip = text

    def render(self) -> Content:
        """A narrow line leaves out the device, then the time to the first token, then the end of the model's name."""
        status, width, compact = self.status, self.size.width, self.size.width < COMPACT_WIDTH
        ready, info = status.ready, status.ready.model
        model = one_line(status.model_name) or "no model yet"
        engine = [part for part in (one_line(info.quantization), one_line(ready.backend)) if part]
        device = [one_line(ready.device_name)] if ready.device_name not in ("", ready.backend) else []
        warm = [f"stays warm {ready.keep_warm_s / 60:.3g} min"] if ready.keep_warm_s else []
        speed = [f"{_rate(status.tokens_per_s, compact)} tok/s"]
        if self.warning:
            speed.insert(0, WARNING if compact else f"{WARNING} {self.warning}")
        first = [] if status.first_token_s is None else [f"first token {as_latency(status.first_token_s)}"]
        for left_parts, right_parts in (
            (engine + device + warm, speed + first),
            (engine + warm, speed + first),
            (engine, speed + first),
            (engine, speed),
        ):
            left, right = (((" " if compact else " · ").join(parts)) for parts in (left_parts, right_parts))
            meter_width = width - len(model) - len(left) - len(right) - GAPS
            if meter_width >= GOOD_METER:
                break
        if (missing := MIN_METER - meter_width) > 0:
            model = model[: max(1, len(model) - missing - 1)].rstrip() + "…"
            meter_width = width - len(model) - len(left) - len(right) - GAPS
        meter = context_meter(status.context_used, status.context_length, min(meter_width, MAX_METER))
        gap = " " * max(1, meter_width - meter.cell_length + 1)
        return Content.assemble(
            (model, "bold $text"),
            (f"  {left}", "$foreground 70%"),
            gap,
            (right, "$text-warning" if self.warning else "$text"),
            "  ",
            meter,
        )


def tiny_status(status: EngineStatus, width: int, warning: str) -> Content:
    """Speed and context in the border of the prompt, where there is no room for the line."""
    rate = status.tokens_per_s
    speed = "" if rate is None else f"{_rate(rate, True)} tok/s"
    parts = [(f"{WARNING} {warning}" if width >= COMPACT_WIDTH / 2 else WARNING) if warning else "", speed]
    text = " ".join(filter(None, parts))
    rest = width - len(text) - (1 if text else 0)
    meter = context_meter(status.context_used, status.context_length, rest)
    styled = Content.styled(text, "$text-warning" if warning else "")
    return Content(" ").join(part for part in (styled, meter) if part)


def _rate(tokens_per_s: float | None, compact: bool) -> str:
    return f"{tokens_per_s:.0f}" if compact and tokens_per_s is not None else as_rate(tokens_per_s)


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
    text = LABELS["status line"]["tokens"]
    ready = status.ready
    if not ready.checkpoints:
        return text
    return (
        f"{text}\n\nThis model reads a chat into a state, from which no token can be taken out again. The engine keeps "
        f"up to {ready.checkpoints} checkpoints of it ({as_bytes(ready.states_bytes)}), at the ends of turns and "
        "between them. A regenerated reply or an edited message goes on from the last checkpoint before it."
    )
