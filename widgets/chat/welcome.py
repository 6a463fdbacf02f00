"""What an empty conversation shows: the model that answers, and the keys to begin with."""

from collections.abc import Mapping

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from widgets.engine_status import EngineStatus
from widgets.text import as_bytes, as_count, cache_text, one_line

KEYS = (
    (("Enter", "sends"), ("Ctrl+J", "starts a new line")),
    (("Esc", "stops"), ("Ctrl+O", "opens a past chat")),
    (("F1", "all keys"), ("Ctrl+P", "all commands")),
)
TWO_COLUMNS_WIDTH = 48


class Welcome(Widget):
    DEFAULT_CSS = "Welcome { height: 1fr; content-align: left middle; }"
    ALLOW_SELECT = False

    status: reactive[EngineStatus] = reactive(EngineStatus())
    remarks: Mapping[str, tuple[str, ...]] = {}
    """Lines to show below a model, by its name."""

    def render(self) -> Content:
        status, (width, height) = self.status, self.size
        ready, model = status.ready, status.ready.model
        facts = (
            f"{as_count(model.parameters)} parameters" if model.parameters else "",
            model.quantization,
            f"{status.context_length:,} tokens of context" if status.context_length else "",
        )
        lines = [Content.styled(one_line(status.model_name) or "orin-chat", "bold $text-primary")]
        cache = cache_text(status.cache_bytes, status.kv)
        states = f"{as_bytes(ready.states_bytes)} of states" if ready.states_bytes else ""
        for parts in (facts, (ready.backend, ready.device_name, cache, states)):
            if text := " · ".join(filter(None, parts)):
                lines.append(Content.styled(one_line(text), "$foreground 60%"))
        lines += [Content.styled(line, "$foreground 80%") for line in self.remarks.get(model.name, ())]
        lines.append(Content(""))
        if width >= TWO_COLUMNS_WIDTH:
            lines += [_key(*left, 7, 10) + _key(*right, 8, 17) for left, right in KEYS]
        else:
            lines += [_key(*pair[column], 7, 10) for column in (0, 1) for pair in KEYS]
        lines = [line.truncate(width, ellipsis=True) for line in lines[:height]]
        indents = (" " * max(0, (width - line.cell_length) // 2) for line in lines)
        return Content("\n").join(Content(indent) + line for indent, line in zip(indents, lines, strict=True))


def _key(key: str, meaning: str, key_width: int, meaning_width: int) -> Content:
    return Content.assemble(
        (f"{key:>{key_width}}", "bold"), (f"  {meaning:<{meaning_width}}", "$foreground 60%")
    )
