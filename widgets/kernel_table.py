"""A step kernel by kernel: a summary by what they are for, then each with its time and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from textual.binding import Binding
from textual.message import Message
from textual.reactive import reactive

from engine.events import KernelProfile, KernelRole, KernelTime, Step
from widgets.pane import Line, Pane
from widgets.plot import bar
from widgets.text import one_line

GROUPS: dict[str, tuple[KernelRole, ...]] = {
    "dequantize + matmul": (
        "QKV projection", "attention output", "FFN gate+up", "FFN down", "output head",
    ),
    "attention": ("attention",),
    "norm, element-wise": ("norm", "element-wise", "embedding", "copy"),
    "sampling": ("sampling",),
}  # fmt: skip
GAPS = "launch gaps"
Sort = Literal["total", "GB/s", "calls", "role", "name"]
SORTS: tuple[Sort, ...] = ("total", "GB/s", "calls", "role", "name")
KEYS = ("d decode, prefill  s sort  f filter  p hold  m measure again  ⏎ source", "d s f p m ⏎")
CACHEABLE_BYTES = 512 << 20
"""Processors with caches up to this size are sold. What moves more, and faster than a copy, was not faster: the copy
was measured on a busy machine."""


@dataclass(frozen=True)
class KernelProfiles:
    """The profiles there are. `copy_gbps` is the device's measured copy bandwidth (None: not known); `note`
    says what is going on ("measuring", why there is none)."""

    decode: KernelProfile | None = None
    prefill: KernelProfile | None = None
    copy_gbps: float | None = None
    note: str = ""


@dataclass(frozen=True)
class GroupShare:
    name: str
    us: float
    share: float
    gbps: float
    calls: int
    bytes: int = 0


def gbps(kernel: KernelTime) -> float:
    """10^9 bytes a second that it must read and write."""
    return kernel.bytes / kernel.total_us / 1e3 if kernel.total_us > 0 else 0.0


def kernels_us(profile: KernelProfile) -> float:
    return sum(kernel.total_us for kernel in profile.kernels)


def summary(profile: KernelProfile) -> list[GroupShare]:
    """Time by group; shares are of the wall time or, where kernels that are timed one by one take longer than
    that, of their sum."""
    whole = max(profile.wall_us, kernels_us(profile)) or 1.0
    shares = []
    for name, roles in GROUPS.items():
        members = [kernel for kernel in profile.kernels if kernel.role in roles]
        us, moved = sum(k.total_us for k in members), sum(k.bytes for k in members)
        shares.append(
            GroupShare(
                name, us, us / whole, moved / us / 1e3 if us else 0.0, sum(k.calls for k in members), moved
            )
        )
    gap = max(0.0, profile.wall_us - kernels_us(profile))
    return [*shares, GroupShare(GAPS, gap, gap / whole, 0.0, 0)]


def ordered(kernels: Sequence[KernelTime], sort: Sort) -> list[KernelTime]:
    """Largest first; roles and names from A."""
    match sort:
        case "total":
            return sorted(kernels, key=lambda k: -k.total_us)
        case "GB/s":
            return sorted(kernels, key=lambda k: -gbps(k))
        case "calls":
            return sorted(kernels, key=lambda k: (-k.calls, -k.total_us))
        case "role":
            return sorted(kernels, key=lambda k: (k.role, -k.total_us))
        case "name":
            return sorted(kernels, key=lambda k: (k.name, -k.total_us))


class KernelTable(Pane[KernelProfiles]):
    """Keys, while it has the focus: Up and Down choose a kernel, Enter asks for its details, s sorts, f
    filters, d turns from decode to prefill, p holds what is shown, m measures again."""

    BORDER_TITLE = "kernels"
    can_focus = True
    BINDINGS = [  # noqa: RUF012 (declared so by Textual)
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("enter", "detail", "Source and options", show=False),
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

    class SourceRequested(Message):
        """The user wants to see the source of a kernel."""

        def __init__(self, kernel: KernelTime) -> None:
            super().__init__()
            self.kernel = kernel

    class ProfileRequested(Message):
        """The user wants `step` to be measured."""

        def __init__(self, step: Step) -> None:
            super().__init__()
            self.step = step

    def __init__(self) -> None:
        super().__init__()
        self._held: KernelProfiles | None = None

    @property
    def is_paused(self) -> bool:
        return self._held is not None

    @property
    def profile(self) -> KernelProfile | None:
        data = self._held or self.data
        return None if data is None else data.decode if self.step == "decode" else data.prefill

    @property
    def rows(self) -> list[KernelTime]:
        """What is listed, in its order."""
        profile = self.profile
        if profile is None:
            return []
        kernels = [k for k in profile.kernels if not self.group or k.role in GROUPS[self.group]]
        return ordered(kernels, self.sort)

    def draw(self, data: KernelProfiles, width: int, height: int) -> list[Line]:
        data = self._held or data
        profile, rows = self.profile, self.rows
        if profile is None:
            return [[(one_line(data.note) or "measured when the engine is idle", "dim")]]
        head = header(profile, data, width, is_paused=self.is_paused)
        if not rows:
            return [*head, [(f"none for {self.group}" if self.group else "none", "dim")]]
        room = max(0, height - len(head))
        is_part = len(rows) > room >= 3
        room -= is_part
        first = max(0, min(self.chosen - room // 2, len(rows) - room))
        shown = [row(profile, kernel, data.copy_gbps, width) for kernel in rows[first : first + room]]
        if self.has_focus and 0 <= (i := self.chosen - first) < len(shown):
            shown[i] = [("".join(text for text, _ in shown[i]), "selected")]
        seen: list[Line] = [[(f"{first + 1}–{first + room} of {len(rows)}", "dim")]] if is_part else []
        return head + shown + seen

    # --- keys -------------------------------------------------------------------------------------------

    def action_move(self, rows: int) -> None:
        self.chosen = max(0, min(self.chosen + rows, len(self.rows) - 1))

    def action_detail(self) -> None:
        if self.chosen < len(rows := self.rows):
            self.post_message(self.SourceRequested(rows[self.chosen]))

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
        self._held = self.data if self._held is None else None
        self.redraw()

    def action_measure(self) -> None:
        self._held = None
        self.post_message(self.ProfileRequested(self.step))

    def on_mount(self) -> None:
        self._watched()

    def _watched(self) -> None:
        """What is shown and, where they are heard, the keys: in words where there is room."""
        shown = " · ".join(filter(None, (self.step, f"by {self.sort}", self.group)))
        keys = next((k for k in KEYS if len(f"{shown} · {k}") <= self.size.width - 2), KEYS[-1])
        self.border_subtitle = f"{shown} · {keys}" if self.has_focus else shown
        self.redraw()

    watch_sort = watch_group = watch_step = watch_chosen = on_resize = _watched

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        self._watched()


# --- lines ---------------------------------------------------------------------------------------------

_NAME = 19  # of a group
_CALLS, _US, _SHARE, _GBPS, _ROOF = 5, 10, 5, 7, 7
_FIXED = _CALLS + _US + _SHARE + _GBPS
_BAR, _ROLE, _LEAST_NAME = 10, 10, 20
_SHORT: dict[KernelRole, tuple[str, ...]] = {
    "QKV projection": ("QKV",), "attention": ("attn",), "attention output": ("attn output", "attn o"),
    "FFN gate+up": ("gate+up",), "FFN down": ("down",), "output head": ("head",), "element-wise": ("elemw",),
    "embedding": ("embed",), "sampling": ("sample",),
}  # fmt: skip


def header(
    profile: KernelProfile, data: KernelProfiles, width: int, *, is_paused: bool = False
) -> list[Line]:
    """Sum, wall time and what lies between them, the summary, and the titles of the rows."""
    calls, total = sum(k.calls for k in profile.kernels), kernels_us(profile)
    gap, digits = profile.wall_us - total, len(f"{max(profile.wall_us, total):,.0f}")
    state = "  paused" if is_paused else f"  {one_line(data.note)}" if data.note else ""
    room = width - (len(state) if is_paused else 0)
    wall = f"wall {profile.wall_us:,.0f} µs"  # a figure that was cut would be another figure
    summed, counted = f"{calls} kernels · sum {total:,.0f} · {wall}", f"{calls} kernels · {wall}"
    text = next((text for text in (summed, counted) if len(text) <= room), wall)
    tokens = f" · {profile.tokens} tokens" if profile.tokens > 1 else ""
    for more in (tokens, f" · gap {gap:,.0f}" if gap >= 0 else ""):
        text += more if len(text + more) <= room else ""
    *groups, gaps = summary(profile)
    return [
        [(text[:width], "strong"), (state[: max(0, width - len(text))], "warning")],
        *(_summary_line(share, data.copy_gbps, width, digits) for share in groups),
        _summary_line(gaps, None, width, digits) if gap >= 0 else _no_gaps(profile, width),
        [(_titles(width), "strong")],
    ]


def of_roofline(gbps: float, n_bytes: int, copy_gbps: float | None) -> str:
    """The share of the copy bandwidth; above all of it, where caches give what memory cannot, that they do."""
    if not copy_gbps:
        return "–"
    share = gbps / copy_gbps
    return "cached" if share >= 1.005 and n_bytes <= CACHEABLE_BYTES else f"{share:.0%}"


def _summary_line(share: GroupShare, copy_gbps: float | None, width: int, digits: int) -> Line:
    name = f"{share.name:<{_NAME}}"
    figures = f"{share.us:>{max(8, digits + 1)},.0f} {share.share:>4.0%}"
    rest = width - len(name) - len(figures) - 1
    bar_width = min(16, max(0, rest - (18 if rest >= 28 else 0)))
    line: Line = [(name, ""), (figures + " ", ""), (bar(share.share, bar_width), "value")]
    if rest >= 28 and share.gbps:
        roof = f" {of_roofline(share.gbps, share.bytes, copy_gbps):>6}" if copy_gbps else ""
        line.append((f" {share.gbps:>5,.0f} GB/s{roof}", "dim"))
    return line


def _no_gaps(profile: KernelProfile, width: int) -> Line:
    """Where kernels take longer than the step: in it, some begin before the ones before them have ended, or clocks and
    other load were not the same meanwhile. Which, no one can tell, and so neither is said."""
    longer = kernels_us(profile) / (profile.wall_us or 1.0) - 1
    said = (
        f"none: timed one by one, kernels take {longer:.0%} longer than in the step",
        f"none: timed one by one, kernels take {longer:.0%} longer",
        f"none: one by one {longer:.0%} longer",
        f"none: alone +{longer:.0%}",
    )
    fitting = next((text for text in said if _NAME + len(text) <= width), said[-1])
    return [(f"{GAPS:<{_NAME}}", ""), (fitting if longer >= 0.005 else "none", "dim")]


def _cells(width: int) -> tuple[int, int, bool, bool]:
    """Cells for role and name, and whether there is room for bars and for shares of the roofline. The start of a name
    would only repeat the role: where there is no room for more, the role is said in full and the name left out."""
    with_roof, with_bar = width >= _FIXED + _ROLE + _ROOF, width >= 78
    rest = max(0, width - _FIXED - (_ROOF if with_roof else 0) - (_BAR + 1 if with_bar else 0))
    role = 17 if rest >= 36 else _ROLE if rest >= _ROLE + _LEAST_NAME else rest
    return role, rest - role, with_bar, with_roof


def _titles(width: int) -> str:
    role, name, with_bar, with_roof = _cells(width)
    text = "role".ljust(role)[:role] + "kernel".ljust(name)[:name]
    text += f"{'calls':>{_CALLS}}{'µs':>{_US}}{'%':>{_SHARE}}" + (" " * (_BAR + 1) if with_bar else "")
    return text + f"{'GB/s':>{_GBPS}}" + (f"{'roof':>{_ROOF}}" if with_roof else "")


def row(profile: KernelProfile, kernel: KernelTime, copy_gbps: float | None, width: int) -> Line:
    share = kernel.total_us / (max(profile.wall_us, kernels_us(profile)) or 1.0)
    role, name, with_bar, with_roof = _cells(width)
    named = (kernel.role, *_SHORT.get(kernel.role, ()))
    fitting = next((text for text in named if len(text) < role), named[-1])
    line: Line = [(fitting[: max(0, role - 1)].ljust(role), "dim" if name else "")]
    line.append((_shortened(one_line(kernel.name), name - 1).ljust(name), ""))
    decimals = 1 if kernel.total_us < 99_999 else 0
    figures = f"{kernel.calls:>{_CALLS}}{kernel.total_us:>{_US},.{decimals}f}{share:>{_SHARE}.0%}"
    line.append((figures, ""))
    if with_bar:
        line.append((f" {bar(share, _BAR)}", "value"))
    line.append((f"{gbps(kernel):>{_GBPS},.{0 if gbps(kernel) >= 99.95 else 1}f}", ""))
    if with_roof:
        line.append((f"{of_roofline(gbps(kernel), kernel.bytes, copy_gbps):>{_ROOF}}", "dim"))
    return line


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…" if width > 0 else ""
