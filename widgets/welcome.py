"""What an empty conversation shows: who answers here, and the few keys to begin with."""

from __future__ import annotations

from collections.abc import Mapping

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from widgets.engine_status import EngineStatus
from widgets.text import as_count, one_line

KEYS = (
    ("Enter", "sends", "Ctrl+J", "starts a new line"),
    ("Esc", "stops", "Ctrl+O", "opens a past chat"),
    ("F1", "all keys", "Ctrl+P", "all commands"),
)
TWO_COLUMNS = 48


class Welcome(Widget):
    DEFAULT_CSS = "Welcome { height: 1fr; content-align: left middle; }"
    ALLOW_SELECT = False

    status: reactive[EngineStatus] = reactive(EngineStatus())
    remarks: Mapping[str, tuple[str, ...]] = {}
    """Lines that are said of models, by name."""

    def render(self) -> Content:
        status = self.status
        facts = [
            f"{as_count(status.parameters)} parameters" if status.parameters else "",
            one_line(status.quantization),
            f"{status.context_length:,} tokens of context" if status.context_length else "",
        ]
        known = " · ".join(fact for fact in facts if fact)
        where = one_line(" · ".join(part for part in (status.backend, status.device) if part))
        lines = [
            Content.styled(one_line(status.model) or "orin-chat", "bold $text-primary"),
            *(Content.styled(line, "$foreground 60%") for line in (known, where) if line),
            *(Content.styled(line, "$foreground 80%") for line in self.remarks.get(status.model, ())),
            Content(""),
        ]
        width, height = self.size
        for key, does, other, does_too in KEYS:
            line = _key(key, 7, does, 10)
            if width >= TWO_COLUMNS:
                line += _key(other, 8, does_too, 17)
            lines.append(line)
        if width < TWO_COLUMNS:
            lines += [_key(other, 7, does, 10) for _, _, other, does in KEYS]
        lines = [line.truncate(width, ellipsis=True) for line in lines[:height]]
        indents = (" " * max(0, (width - line.cell_length) // 2) for line in lines)
        return Content("\n").join(Content(indent) + line for indent, line in zip(indents, lines, strict=True))


def _key(key: str, key_width: int, does: str, does_width: int) -> Content:
    return Content.assemble((f"{key:>{key_width}}", "bold"), (f"  {does:<{does_width}}", "$foreground 60%"))
