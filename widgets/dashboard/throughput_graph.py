"""The pane of the speed: decode, prefill and modelled bandwidth over the last minute, or the last five."""

from dataclasses import replace

from rich.style import Style
from textual.binding import Binding
from textual.color import Gradient
from textual.content import Content
from textual.events import Leave, MouseMove
from textual.reactive import reactive

from widgets.dashboard.pane import Line, Pane
from widgets.dashboard.throughput_lines import HEAT_STEPS, MARGIN, Throughput, axis, legend, lines, readouts
from widgets.labels import LABELS
from widgets.text import longest_fitting

WINDOWS_S = (60, 300)
KEYS = ("t 1 or 5 minutes  ← → figures of a moment", "t minutes  ← → figures", "t ← →")


class ThroughputGraph(Pane[Throughput]):
    """The border says what the cell of the time axis shows that is under the mouse or, while the pane has the focus,
    that was chosen by keys; else it says what the symbols on the axis mean."""

    BORDER_TITLE = "throughput"
    LABELS = LABELS["throughput"]
    COMPONENT_CLASSES = {"pane--cool", "pane--mild", "pane--warm", "pane--hot"}
    DEFAULT_CSS = """
    ThroughputGraph > .pane--cool { color: $text-primary; }
    ThroughputGraph > .pane--mild { color: $text-success; }
    ThroughputGraph > .pane--warm { color: $text-warning; }
    ThroughputGraph > .pane--hot { color: $text-error; }
    """
    can_focus = True
    BINDINGS = [
        Binding("t", "window", "One or five minutes", show=False),
        Binding("left", "choose(-1)", show=False),
        Binding("right", "choose(1)", show=False),
    ]

    data: reactive[Throughput | None] = reactive(None, repaint=False)
    seconds: reactive[int] = reactive(WINDOWS_S[0])
    hovered: reactive[int | None] = reactive(None)  # a cell of the axis, from the left
    chosen: reactive[int | None] = reactive(None)  # a cell of the axis, from the clock's zero

    def __init__(self) -> None:
        super().__init__()
        self._visible: Throughput | None = None
        self._subtitle = ""
        self._scale: tuple[str, dict[str, Style]] | None = None  # the theme, and its styles

    def draw(self, data: Throughput, width: int, height: int) -> list[Line]:
        return lines(data, width, height, self.seconds, self._cell(data))

    def _cell(self, data: Throughput) -> int | None:
        """The cell whose figures are shown, from the left."""
        if self.hovered is not None:
            return self.hovered
        if self.chosen is None or not self.has_focus:
            return None
        return max(0, self.chosen - axis(data, self.size.width, self.seconds).first)

    # --- what is seen -----------------------------------------------------------------------------------

    def watch_data(self) -> None:
        """Draws again only if what is seen of the data has changed: a cell of an idle engine's axis is over a second
        wide, and with nothing on it, it stands still."""
        visible = self._seen()
        if visible != self._visible:
            self._visible = visible
            self._changed()

    def _seen(self) -> Throughput | None:
        if self.data is None:
            return None
        time = axis(self.data, self.size.width, self.seconds)
        samples = tuple(sample for sample in self.data.samples if time.cell(sample.at_s) >= 0)
        marks = tuple(mark for mark in self.data.marks if time.shows(mark))
        return replace(self.data, samples=samples, marks=marks, now_s=time.first if samples or marks else 0)

    def _changed(self) -> None:
        """The border says what `hovered` or `chosen` shows."""
        data, width = self.data, self.size.width
        if data is None:
            return
        if (cell := self._cell(data)) is not None:
            texts = readouts(data, width, self.seconds, cell)
        else:
            texts = list(KEYS) if self.has_focus else [legend(data, width, self.seconds), ""]
        text = longest_fitting(texts, width - 2)
        if text != self._subtitle:  # else setting it would paint the whole pane
            self._subtitle = text
            self.border_subtitle = Content(text)
        self.redraw()

    watch_seconds = watch_hovered = watch_chosen = on_resize = _changed

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        self._changed()

    # --- styles -----------------------------------------------------------------------------------------

    def styles_by_name(self) -> dict[str, Style]:
        theme = self.app.theme
        if self._scale is None or self._scale[0] != theme:
            self._scale = theme, self._heat()
        return {**super().styles_by_name(), **self._scale[1]}

    def _heat(self) -> dict[str, Style]:
        """The rows of a graph from cool to hot; all of them alike where colours cannot be blended."""
        plain = self.get_component_rich_style("pane--value")
        stops = [self.get_component_styles(f"pane--{name}").color for name in ("cool", "mild", "warm", "hot")]
        has_colors = not self.app.no_color and all(color.ansi is None for color in stops)
        scale = Gradient.from_colors(*stops)
        return {
            f"heat{step}": plain + Style(color=scale.get_color(step / (HEAT_STEPS - 1)).rich_color)
            if has_colors
            else plain
            for step in range(HEAT_STEPS)
        }

    # --- keys and the mouse -----------------------------------------------------------------------------

    def action_window(self) -> None:
        self.chosen = None
        self.seconds = WINDOWS_S[(WINDOWS_S.index(self.seconds) + 1) % len(WINDOWS_S)]

    def action_choose(self, step: int) -> None:
        """Goes to the next cell with something on it; behind the last one, nothing is chosen."""
        if self.data is None:
            return
        time = axis(self.data, self.size.width, self.seconds)
        columns = time.columns(self.data.samples)
        used = {x // 2 for x, sample in enumerate(columns) if sample is not None}
        used |= time.place(self.data.marks).keys()
        current = time.width if self.chosen is None else self.chosen - time.first
        if step < 0:
            nowhere = max(0, min(current, time.width - 1))
            self.chosen = time.first + max((x for x in used if x < current), default=nowhere)
        else:
            following = min((x for x in used if x > current), default=None)
            self.chosen = None if following is None else time.first + following

    def on_mouse_move(self, event: MouseMove) -> None:
        super().on_mouse_move(event)
        content = event.get_content_offset(self)
        cell = content.x - MARGIN if content is not None else -1
        self.hovered = cell if 0 <= cell < self.size.width - 2 * MARGIN else None

    def on_leave(self, event: Leave) -> None:
        self.hovered = None
