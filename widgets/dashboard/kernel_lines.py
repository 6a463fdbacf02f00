"""The kernel profile of a step as lines of text: a summary by group, and a row for each kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from engine.protocol.events import KernelProfile, KernelRole, KernelTime
from widgets.dashboard.pane import Line
from widgets.plot import bar
from widgets.text import counted, longest_fitting, one_line

GROUPS: dict[str, tuple[KernelRole, ...]] = {
    "dequantize + matmul": (
        "QKV projection", "attention output", "FFN gate+up", "FFN down", "router", "experts gate+up",
        "experts down", "output head",
    ),
    "attention": ("attention", "delta net"),
    "norm, element-wise": ("norm", "element-wise", "embedding", "copy"),
    "sampling": ("sampling",),
}  # fmt: skip
GAPS = "launch gaps"
SMALL_SHARE = 0.015
"""In a brief header, groups below this share of the step are one."""
EXPLAINED, LONGER = 0.9, 1.05
"""Where a step is less of a token's time in an answer, or more, the header says what may be the reason."""
NOTICED = 0.1
"""What this program took of a core is said from here on."""
Sort = Literal["total", "GB/s", "calls", "role", "name"]
SORTS: tuple[Sort, ...] = ("total", "GB/s", "calls", "role", "name")
CACHEABLE_BYTES = 512 << 20
"""No processor has a larger cache. If a kernel moves more bytes, and faster than a copy, the copy was measured on a
busy machine."""

_GROUP, _CALLS, _US, _SHARE, _GBPS, _ROOF, _BAR, _ROLE, _MIN_NAME = 19, 5, 10, 5, 7, 7, 10, 10, 20  # cells
_SHORT_ROLES: dict[KernelRole, tuple[str, ...]] = {
    "QKV projection": ("QKV",), "attention": ("attn",), "delta net": ("delta",),
    "attention output": ("attn output", "attn o"), "FFN gate+up": ("gate+up",),
    "FFN down": ("down",), "output head": ("head",), "element-wise": ("elemw",),
    "embedding": ("embed",), "sampling": ("sample",), "experts gate+up": ("exp. gate", "experts"),
    "experts down": ("exp. down", "experts"),
}  # fmt: skip


@dataclass(frozen=True)
class KernelProfiles:
    """The last profiles. `copy_gbps` is the measured copy bandwidth of the device, `answer_us` the microseconds a token
    of the last answer (None: not known), `screen_share` how much of a core this program took meanwhile, if the engine
    computes on the same cores. `note` says why there is no profile, or that one is being measured."""

    decode: KernelProfile | None = None
    prefill: KernelProfile | None = None
    copy_gbps: float | None = None
    answer_us: float | None = None
    screen_share: float = 0.0
    note: str = ""

    def with_profile(self, profile: KernelProfile) -> Self:
        if profile.step == "decode":
            return replace(self, note="", decode=profile)
        return replace(self, note="", prefill=profile)


@dataclass(frozen=True)
class GroupTime:
    """The kernels of a group: their time, its share of the step, and the bytes that they read and write."""

    name: str
    total_us: float
    share: float
    calls: int = 0
    bytes: int = 0


def gbps(part: KernelTime | GroupTime) -> float:
    """The bandwidth of a kernel or a group in GB/s, from the bytes that it must read and write."""
    return part.bytes / part.total_us / 1e3 if part.total_us > 0 else 0.0


def kernels_us(profile: KernelProfile) -> float:
    return sum(kernel.total_us for kernel in profile.kernels)


def step_us(profile: KernelProfile) -> float:
    """The wall time of the step or, if kernels timed one by one take longer, their sum."""
    return max(profile.wall_us, kernels_us(profile)) or 1.0


class Unit(NamedTuple):
    """A unit of time: its name, its length in µs, and the decimals of a sum and of a kernel in it."""

    name: str
    us: float
    decimals: int
    kernel_decimals: int

    def text(self, us: float) -> str:
        return f"{us / self.us:,.{self.decimals}f}"


MICROSECONDS, MILLISECONDS = Unit("µs", 1.0, 0, 1), Unit("ms", 1e3, 1, 2)


def unit_of(profile: KernelProfile) -> Unit:
    """The one unit in which all times of a profile are shown: 79,237 µs are 79.2 ms."""
    return MILLISECONDS if step_us(profile) > 20_000 else MICROSECONDS


def summary(profile: KernelProfile) -> list[GroupTime]:
    """The time of each group and of the gaps between kernels. The shares add up to 1."""
    whole, groups = step_us(profile), []
    for name, roles in GROUPS.items():
        kernels = [kernel for kernel in profile.kernels if kernel.role in roles]
        us, calls = sum(k.total_us for k in kernels), sum(k.calls for k in kernels)
        groups.append(GroupTime(name, us, us / whole, calls, sum(k.bytes for k in kernels)))
    gaps_us = max(0.0, profile.wall_us - kernels_us(profile))
    return [*groups, GroupTime(GAPS, gaps_us, gaps_us / whole)]


def without_small(groups: Sequence[GroupTime]) -> list[GroupTime]:
    """Groups below `SMALL_SHARE` become one, "other", which is left out if it is small too."""
    small = [group for group in groups if group.share < SMALL_SHARE]
    us, share = sum(group.total_us for group in small), sum(group.share for group in small)
    calls, n_bytes = sum(group.calls for group in small), sum(group.bytes for group in small)
    other = [GroupTime("other", us, share, calls, n_bytes)] if share >= SMALL_SHARE else []
    return [*(group for group in groups if group not in small), *other]


def ordered(kernels: Sequence[KernelTime], sort: Sort) -> list[KernelTime]:
    """By figures from the largest, or by role or name from A; among equals the slowest first."""
    keys: dict[Sort, Callable[[KernelTime], object]] = {
        "total": lambda kernel: 0,
        "GB/s": lambda kernel: -gbps(kernel),
        "calls": lambda kernel: -kernel.calls,
        "role": lambda kernel: kernel.role,
        "name": lambda kernel: kernel.name,
    }
    return sorted(kernels, key=lambda kernel: (keys[sort](kernel), -kernel.total_us))


def of_roofline(gbps: float, n_bytes: int, copy_gbps: float | None) -> str:
    """The share of the copy bandwidth, or "cached" if only a cache can be that fast."""
    if not copy_gbps:
        return "–"
    share = gbps / copy_gbps
    return "cached" if share >= 1.005 and n_bytes <= CACHEABLE_BYTES else f"{share:.0%}"


# --- the header ----------------------------------------------------------------------------------------


def header(
    profile: KernelProfile,
    data: KernelProfiles,
    width: int,
    *,
    is_paused: bool = False,
    is_brief: bool = False,
) -> list[Line]:
    """The sum and the wall time of the step, its share of a step of the last answer, a line for each group, and the
    titles of the rows. `is_brief`: without groups that hardly count."""
    state = "  paused" if is_paused else f"  {one_line(data.note)}" if data.note else ""
    text = _totals(profile, width - (len(state) if is_paused else 0))
    if len(state) > (room := max(0, width - len(text))):
        state = f"{state[: room - 1]}…" if room > 4 else ""
    unit = unit_of(profile)
    digits = len(unit.text(step_us(profile)))
    groups = summary(profile)
    has_gaps = kernels_us(profile) <= profile.wall_us
    if is_brief:
        groups = without_small(groups)
    elif not has_gaps:
        groups.pop()
    return [
        [(text[:width], "strong"), (state, "warning")],
        *_answer_line(profile, data, width),
        *(_group_line(group, unit, data.copy_gbps, width, digits) for group in groups),
        *([] if has_gaps or is_brief else [_no_gaps_line(profile, width)]),
        [(_titles(width, unit), "strong")],
    ]


def _totals(profile: KernelProfile, width: int) -> str:
    """As many figures as fit; none is cut, since the digits that are left would be another figure."""
    total, calls = kernels_us(profile), sum(kernel.calls for kernel in profile.kernels)
    unit = unit_of(profile)
    wall = f"wall {unit.text(profile.wall_us)} {unit.name}"
    count = counted(calls, "kernel")
    texts: tuple[str, ...] = (f"{count} · sum {unit.text(total)} · {wall}", f"{count} · {wall}", wall)
    if total > LONGER * profile.wall_us:  # in the step they overlap, or the machine was quieter then
        longer = f"one by one {unit.text(total)}"
        texts = (f"{count} · {wall}, sum {longer}", f"{wall}, {longer}", wall)
    text = longest_fitting(texts, width)
    gap = profile.wall_us - total
    for more in (
        f" · {profile.tokens} tokens" if profile.tokens > 1 else "",
        f" · gap {unit.text(gap)}" if gap >= 0 else "",
    ):
        text += more if len(text + more) <= width else ""
    return text


def _answer_line(profile: KernelProfile, data: KernelProfiles, width: int) -> list[Line]:
    """How much of a step of the last answer the profiled step is. The rest is not in the kernels: this screen, other
    programs, the host, other clocks than at the time of the measurement, or a longer context."""
    answer_us = data.answer_us
    if profile.step != "decode" or not answer_us:
        return []
    share, unit = f"{profile.wall_us / answer_us:.0%}", unit_of(profile)
    whole = f"the last answer's {unit.text(answer_us)} {unit.name} a token"
    if profile.wall_us > LONGER * answer_us:
        texts: tuple[str, ...] = (
            f"a step takes {share} of {whole}: guesses were right then, or the machine was quieter",
            f"a step takes {share} of {whole}",
            f"{share} of last answer",
        )
        return [[(longest_fitting(texts, width), "")]]
    rest: tuple[str, ...] = ()
    if profile.wall_us < EXPLAINED * answer_us:
        rest = ("; the rest is the host, other programs or a longer context",)
        if data.screen_share >= NOTICED:
            drawn = f"; this screen took {data.screen_share:.0%} of a core"
            briefly = f"; screen: {data.screen_share:.0%} of a core"
            rest = f"{drawn}, the rest is other programs or the host", drawn, briefly
    texts = (
        *(f"explains {share} of {whole}{why}" for why in rest),
        *(f"explains {share}{why}" for why in rest[1:]),
        f"explains {share} of {whole}",
        f"explains {share} of the last answer's time",
        f"explains {share} of the last answer",
        f"{share} of last answer",
    )
    return [[(longest_fitting(texts, width), "")]]


def _group_line(group: GroupTime, unit: Unit, copy_gbps: float | None, width: int, digits: int) -> Line:
    figures = f"{group.name:<{_GROUP}}{unit.text(group.total_us):>{max(8, digits + 1)}} {group.share:>4.0%} "
    rest = width - len(figures)
    has_bandwidth = rest >= 28
    line: Line = [
        (figures, ""),
        (bar(group.share, min(16, max(0, rest - (18 if has_bandwidth else 0)))), "value"),
    ]
    if has_bandwidth and (bandwidth := gbps(group)):
        share = f" {of_roofline(bandwidth, group.bytes, copy_gbps):>6}" if copy_gbps else ""
        line.append((f" {bandwidth:>5,.0f} GB/s{share}", "dim"))
    return line


def _no_gaps_line(profile: KernelProfile, width: int) -> Line:
    """Kernels that are timed one by one may take longer than the step: in the step some overlap, and clocks and the
    load of the machine change. Which of these it was is not known."""
    longer = step_us(profile) / (profile.wall_us or 1.0) - 1
    texts = (
        f"not known: timed one by one, the kernels take {longer:.0%} longer than the step",
        f"not known: the kernels take {longer:.0%} longer one by one",
        f"not known: {longer:.0%} longer one by one",
        "not known",
    )
    text = longest_fitting(texts, width - _GROUP) if longer >= 0.005 else "none"
    return [(f"{GAPS:<{_GROUP}}", ""), (text, "dim")]


# --- the rows ------------------------------------------------------------------------------------------


def row(profile: KernelProfile, kernel: KernelTime, copy_gbps: float | None, width: int) -> Line:
    """The row of a kernel, in columns that fit into `width` cells. `copy_gbps`: the device's bandwidth, if it is
    known."""
    role_width, name_width, has_bar, has_roof = _columns(width)
    share, bandwidth = kernel.total_us / step_us(profile), gbps(kernel)
    role = longest_fitting((kernel.role, *_SHORT_ROLES.get(kernel.role, ())), role_width - 1)
    name = one_line(kernel.name)
    name = name if len(name) < name_width else name[: name_width - 2] + "…" if name_width > 1 else ""
    unit = unit_of(profile)
    time_decimals = unit.kernel_decimals if kernel.total_us / unit.us < 99_999 else 0
    gbps_decimals = 0 if bandwidth >= 99.95 else 1
    line: Line = [
        (role[: max(0, role_width - 1)].ljust(role_width), "dim" if name_width else ""),
        (name.ljust(name_width), ""),
        (
            f"{kernel.calls:>{_CALLS}}{kernel.total_us / unit.us:>{_US},.{time_decimals}f}{share:>{_SHARE}.0%}",
            "",
        ),
    ]
    if has_bar:
        line.append((f" {bar(share, _BAR)}", "value"))
    line.append((f"{bandwidth:>{_GBPS},.{gbps_decimals}f}", ""))
    if has_roof:
        line.append((f"{of_roofline(bandwidth, kernel.bytes, copy_gbps):>{_ROOF}}", "dim"))
    return line


def _titles(width: int, unit: Unit) -> str:
    role_width, name_width, has_bar, has_roof = _columns(width)
    text = "role".ljust(role_width)[:role_width] + "kernel".ljust(name_width)[:name_width]
    text += f"{'calls':>{_CALLS}}{unit.name:>{_US}}{'%':>{_SHARE}}" + (" " * (_BAR + 1) if has_bar else "")
    return text + f"{'GB/s':>{_GBPS}}" + (f"{'roof':>{_ROOF}}" if has_roof else "")


def _columns(width: int) -> tuple[int, int, bool, bool]:
    """The cells of the role and of the name, and whether there are bars and shares of the roofline. A narrow row has
    no name, because the beginning of a name only repeats the role."""
    figures = _CALLS + _US + _SHARE + _GBPS
    has_bar, has_roof = width >= 78, width >= figures + _ROLE + _ROOF
    rest = max(0, width - figures - (_ROOF if has_roof else 0) - (_BAR + 1 if has_bar else 0))
    role = 17 if rest >= 36 else _ROLE if rest >= _ROLE + _MIN_NAME else rest
    return role, rest - role, has_bar, has_roof
