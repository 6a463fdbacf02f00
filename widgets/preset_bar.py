"""How the engine is set up, and what else there is to choose: backends and the width of the search."""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from widgets.text import one_line


@dataclass(frozen=True)
class BarOption:
    """`label` is short ("CUDA", "2"). `problem` says why this machine cannot have it ("" where it can)."""

    label: str
    is_active: bool = False
    problem: str = ""


@dataclass(frozen=True)
class PresetBarData:
    """`name` of the preset in use ("" for none); `speeds` its last measured speeds, in fewer and fewer words."""

    name: str = ""
    backends: tuple[BarOption, ...] = ()
    beams: tuple[BarOption, ...] = ()
    speeds: tuple[str, ...] = ()


class PresetBar(Widget):
    """Two lines: the preset with its speeds, and what one key each switches."""

    DEFAULT_CSS = """
    PresetBar.-absent { display: none; }
    PresetBar { height: 4; padding: 0 1; border: round $foreground 20%; border-title-color: $text-muted; }
    """
    BORDER_TITLE = "preset"
    ALLOW_SELECT = False

    data: reactive[PresetBarData] = reactive(PresetBarData())

    def __init__(self, backend_key: str, beam_key: str, list_key: str) -> None:
        super().__init__()
        self._keys, self._list_key = (backend_key, beam_key), list_key

    def render(self) -> Content:
        data, width = self.data, self.size.width
        first = Content.styled(one_line(data.name) or "no preset", "bold $text")
        phrasings = [f"  {one_line(said)}" for said in data.speeds]
        fitting = [said for said in phrasings if first.cell_length + len(said) <= width]
        first = first.append(Content.styled(next(iter(fitting or phrasings[-1:]), ""), "$foreground 65%"))
        second = _choices(self._keys[0], data.backends).append(Content("   "))
        second = second.append(_choices(f"{self._keys[1]} BEAM", data.beams))
        problem = next((f"{c.label}: {one_line(c.problem)}" for c in data.backends if c.problem), "")
        room = width - second.cell_length - 3
        for said in (problem, f"{self._list_key} says why"):
            if problem and len(said) <= room:
                second = second.append(Content.styled(f"   {said}", "$foreground 65%"))
                break
        return Content("\n").join(line.truncate(width, ellipsis=True) for line in (first, second))


def _choices(key: str, choices: tuple[BarOption, ...]) -> Content:
    """The one in use between marks, those that cannot be had in grey and struck through."""
    parts: list[Content] = [Content.styled(key, "$foreground 65%")]
    for choice in choices:
        label = one_line(choice.label)
        if choice.is_active:
            parts.append(Content.styled(f"‹{label}›", "bold $text-primary"))
        elif choice.problem:
            parts.append(Content.styled(label, "$foreground 65% strike"))
        else:
            parts.append(Content(label))
    return Content(" ").join(parts)
