"""The line above the prompt: what is going on, or what has just happened."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from widgets.engine_status import EngineStatus, Phase
from widgets.text import as_bytes, as_duration, one_line

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPIN_S = 0.1


def describe(status: EngineStatus) -> str:
    """What the engine is doing, in words and numbers."""
    done, total = status.done, status.total
    share = f"{done / total:.0%}" if total else ""
    left = f"{as_duration(status.seconds_left)} left" if status.seconds_left is not None else ""
    match status.phase:
        case Phase.STARTING:
            parts = ["starting the engine"]
        case Phase.LOADING:
            parts = [
                "loading",
                f"{as_bytes(done)} of {as_bytes(total)}" if total else as_bytes(done),
                share,
                left,
            ]
        case Phase.WARMING:
            doing, what = ("searching", " products") if status.searching else ("preparing kernels", "")
            counted = f"{done} of {total}{what}" if total else f"{done}{what}"
            known = f"{status.cached} from the cache" if status.cached else ""
            parts = [doing, one_line(status.searching), counted, known, left]
        case Phase.PREFILLING:
            parts = ["reading the prompt", f"{done:,} of {total:,} tokens" if total else "", share, left]
        case Phase.GENERATING:
            parts = ["answering", f"{status.tokens:,} tokens", as_duration(status.elapsed_s)]
        case Phase.STOPPING:
            parts = ["stopping"]
        case Phase.GONE:
            parts = ["the engine has stopped; the next prompt starts it again"]
        case Phase.READY:
            parts = ["ready"]
    return " · ".join(part for part in parts if part)


_STARTS = (Phase.STARTING, Phase.LOADING, Phase.WARMING)


class ActivityLine(Widget):
    """A notice while there is one, in as many lines as it takes, else the state of the engine; both while that
    starts, which may take minutes. At the right what a key would do now."""

    DEFAULT_CSS = """
    ActivityLine { height: auto; max-height: 4; padding: 0 2; color: $text-muted; }
    """
    ALLOW_SELECT = False

    status: reactive[EngineStatus] = reactive(EngineStatus())
    doing: reactive[str] = reactive("")  # by whoever knows better than `status` what is waited for
    notice: reactive[str] = reactive("", layout=True)
    is_warning: reactive[bool] = reactive(False)
    hint: reactive[str] = reactive("")

    def watch_is_warning(self, is_warning: bool) -> None:
        self.set_class(is_warning, "-warning")

    def watch_status(self, before: EngineStatus, now: EngineStatus) -> None:
        if (before.phase in _STARTS) != (now.phase in _STARTS):
            self.refresh(layout=True)

    @property
    def text(self) -> str:
        """What is going on."""
        return self.doing or describe(self.status)

    def render(self) -> Content:
        if not self.notice:
            return self._state()
        mark, style = ("⚠", "$text-warning") if self.is_warning else ("·", "$text")
        notice = Content.styled(f"{mark} {one_line(self.notice)}", style)
        return self._state().append("\n").append(notice) if self.status.phase in _STARTS else notice

    def _state(self) -> Content:
        width = self.size.width
        busy = self.status.phase not in (Phase.READY, Phase.GONE)
        mark = (
            SPINNER[int(self.status.elapsed_s / SPIN_S) % len(SPINNER)]
            if busy
            else "⚠"
            if self.status.phase is Phase.GONE
            else "·"
        )
        left = Content.assemble((mark, "$text-accent" if busy else ""), f" {self.text}")
        gap = width - left.cell_length - len(self.hint)
        if gap < 2:
            return left.truncate(width, ellipsis=True)
        return left.append(" " * gap).append(Content.styled(self.hint, "$foreground 65%"))
