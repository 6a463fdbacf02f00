"""The pane of the kernels: the profile of a decode step or of a prefill chunk, with keys that sort and filter it."""

import textwrap
from dataclasses import dataclass

from textual.binding import Binding
from textual.message import Message
from textual.reactive import reactive

from engine.protocol.events import KernelProfile, KernelTime, Step
from widgets.dashboard.kernel_lines import GROUPS, SORTS, KernelProfiles, Sort, header, ordered, row
from widgets.dashboard.kernel_source import KernelScreen
from widgets.dashboard.pane import Line, Pane
from widgets.labels import LABELS
from widgets.text import longest_fitting, one_line

_NOTHING_YET = "which kernels the time of a token goes to: measured one by one as soon as the engine is idle"
KEYS = (
    "d decode, prefill  s sort  f filter  p hold  m measure again  ⏎ source",
    "d step  s sort  f filter  p hold  m again  ⏎ source",
    "d s f p m ⏎",
)


class KernelTable(Pane[KernelProfiles]):
    """The keys work while the table has the focus. While it is paused, new data is not shown."""

    BORDER_TITLE = "kernels"
    LABELS = LABELS["kernels"]
    can_focus = True
    BINDINGS = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("enter", "source", "Source and options", show=False),
        Binding("s", "sort", "Sort", show=False),
        Binding("f", "filter", "Filter", show=False),
        Binding("d", "step", "Decode or prefill", show=False),
        Binding("p", "pause", "Pause", show=False),
        Binding("m", "measure", "Measure again", show=False),
    ]

    sort: reactive[Sort] = reactive("total")
    group: reactive[str] = reactive("")  # of `GROUPS`; "": all
    step: reactive[Step] = reactive("decode")
    chosen: reactive[int] = reactive(0)

    @dataclass
    class ProfileRequested(Message):
        """The user wants a step to be measured."""

        step: Step

    def __init__(self) -> None:
        super().__init__()
        self._paused: KernelProfiles | None = None  # what is shown in place of `data`

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    @property
    def profile(self) -> KernelProfile | None:
        profiles = self._paused or self.data
        return None if profiles is None else profiles.decode if self.step == "decode" else profiles.prefill

    @property
    def kernels(self) -> list[KernelTime]:
        """The kernels of the group, sorted."""
        kernels = self.profile.kernels if self.profile else ()
        return ordered([k for k in kernels if not self.group or k.role in GROUPS[self.group]], self.sort)

    def draw(self, data: KernelProfiles, width: int, height: int) -> list[Line]:
        data = self._paused or data
        profile, kernels = self.profile, self.kernels
        if profile is None:
            note = one_line(data.note) or _NOTHING_YET
            return [[(line, "dim")] for line in textwrap.wrap(note, max(8, width))]
        lines = header(profile, data, width, is_paused=self.is_paused)
        if len(lines) + len(kernels) > height:
            lines = header(profile, data, width, is_paused=self.is_paused, is_brief=True)
        if not kernels:
            return [*lines, [(f"none for {self.group}" if self.group else "none", "dim")]]
        visible = max(0, height - len(lines))
        is_cut = len(kernels) > visible >= 3
        visible -= is_cut
        first = max(0, min(self.chosen - visible // 2, len(kernels) - visible))
        rows = [row(profile, kernel, data.copy_gbps, width) for kernel in kernels[first : first + visible]]
        if self.has_focus and 0 <= (chosen := self.chosen - first) < len(rows):
            rows[chosen] = [("".join(text for text, _ in rows[chosen]), "selected")]
        if is_cut:
            rows.append([(f"{first + 1}–{first + visible} of {len(kernels)}", "dim")])
        return lines + rows

    # --- keys -------------------------------------------------------------------------------------------

    def action_move(self, rows: int) -> None:
        self.chosen = max(0, min(self.chosen + rows, len(self.kernels) - 1))

    def action_source(self) -> None:
        if self.chosen < len(kernels := self.kernels):
            self.app.push_screen(KernelScreen(kernels[self.chosen]))

    def action_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]

    def action_filter(self) -> None:
        names = ["", *GROUPS]
        self.group, self.chosen = names[(names.index(self.group) + 1) % len(names)], 0

    def action_step(self) -> None:
        self.step, self.chosen = "prefill" if self.step == "decode" else "decode", 0
        if self.profile is None:
            self.action_measure()

    def action_pause(self) -> None:
        self._paused = self.data if self._paused is None else None
        self.redraw()

    def action_measure(self) -> None:
        self._paused = None
        self.post_message(self.ProfileRequested(self.step))

    def on_mount(self) -> None:
        self._settings_changed()

    def _settings_changed(self) -> None:
        """The border names the settings and, while the table has the focus, the keys."""
        settings = " · ".join(filter(None, (self.step, f"by {self.sort}", self.group)))
        keys = longest_fitting(KEYS, self.size.width - 2 - len(f"{settings} · "))
        self.border_subtitle = f"{settings} · {keys}" if self.has_focus else settings
        self.redraw()

    watch_sort = watch_group = watch_step = watch_chosen = on_resize = _settings_changed

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        self._settings_changed()
