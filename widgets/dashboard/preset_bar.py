"""The bar of the preset: its speeds, and the backends and search widths that a key switches to."""

from dataclasses import dataclass

from textual.content import Content
from textual.events import MouseMove
from textual.reactive import reactive
from textual.widget import Widget

from widgets.labels import LABELS, label_at
from widgets.text import longest_fitting, one_line

BACKEND_KEY, BEAM_KEY, LIST_KEY = "F6", "F7", "F8"
_DIM = "$foreground 65%"


@dataclass(frozen=True)
class BarOption:
    """`label` is short ("CUDA", "2"). `problem` says why it does not work on this machine, "" if it does."""

    label: str
    is_active: bool = False
    problem: str = ""


@dataclass(frozen=True)
class PresetBarData:
    """`name` is the preset in use ("": none). `speeds` are its last speeds, in ever fewer words."""

    name: str = ""
    backends: tuple[BarOption, ...] = ()
    beams: tuple[BarOption, ...] = ()
    speeds: tuple[str, ...] = ()


class PresetBar(Widget):
    DEFAULT_CSS = """
    PresetBar.-absent { display: none; }
    PresetBar { height: 4; padding: 0 1; border: round $foreground 20%; border-title-color: $text-muted; }
    """
    BORDER_TITLE = "preset"
    ALLOW_SELECT = False

    data: reactive[PresetBarData] = reactive(PresetBarData())

    def on_mouse_move(self, event: MouseMove) -> None:
        at, rows = event.get_content_offset(self), self.render().plain.split("\n")
        row = rows[at.y] if at is not None and at.y < len(rows) else ""
        self.tooltip = (label_at(row, at.x, LABELS["preset"]) if at is not None else "") or None

    def render(self) -> Content:
        data, width = self.data, self.size.width
        name = Content.styled(one_line(data.name) or "no preset", "bold $text")
        speeds = longest_fitting(
            [f"  {one_line(text)}" for text in data.speeds] or [""], width - name.cell_length
        )
        options = Content("   ").join(
            (_options(BACKEND_KEY, data.backends), _options(f"{BEAM_KEY} BEAM", data.beams))
        )
        problem = next((f"   {b.label}: {one_line(b.problem)}" for b in data.backends if b.problem), "")
        problems = (problem, f"   {LIST_KEY} says why", "") if problem else ("",)
        reason = longest_fitting(problems, width - options.cell_length)
        lines = name + Content.styled(speeds, _DIM), options + Content.styled(reason, _DIM)
        return Content("\n").join(line.truncate(width, ellipsis=True) for line in lines)


def _options(key: str, options: tuple[BarOption, ...]) -> Content:
    """The key and its options: the active one in brackets, those with a problem struck through."""
    parts = [Content.styled(key, _DIM)]
    for option in options:
        label = one_line(option.label)
        if option.is_active:
            parts.append(Content.styled(f"‹{label}›", "bold $text-primary"))
        else:
            parts.append(Content.styled(label, f"{_DIM} strike" if option.problem else ""))
    return Content(" ").join(parts)
