"""The line above the prompt: what the engine is doing, or a notice."""

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from widgets.engine_status import EngineStatus, Phase
from widgets.plot import IS_CONSOLE
from widgets.text import as_bytes, as_duration, cache_text, counted, one_line

SPINNER = "|/-\\" if IS_CONSOLE else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINNER_S = 0.1
_START = (Phase.STARTING, Phase.LOADING, Phase.WARMING)


def status_text(status: EngineStatus) -> str:
    """What the engine is doing, with its progress."""
    done, total = status.done, status.total
    share = f"{done / total:.0%}" if total else ""
    left = f"{as_duration(status.seconds_left)} left" if status.seconds_left is not None else ""
    match status.phase:
        case Phase.STARTING:
            parts = ["starting the engine"]
        case Phase.LOADING:
            of_total = f" of {as_bytes(total)}" if total else ""
            parts = ["loading", as_bytes(done) + of_total, share, left, context_cost(status)]
        case Phase.WARMING:
            task = "searching" if status.searching else "preparing kernels"
            cached = f"{status.cached} from the cache" if status.cached else ""
            count = counted(total or done, "product") if status.searching else str(total or done)
            count = f"{done} of {count}" if total else count
            # A search may end before its time is over.
            left = f"at most {left}" if status.searching and left else left
            parts = [task, one_line(status.searching), count, cached, left]
        case Phase.PREFILLING if status.looking_at:
            parts = [status.looking_at, share, left]
        case Phase.PREFILLING:
            parts = [
                "reading the prompt",
                f"{done:,} of {counted(total, 'token')}" if total else "",
                share,
                left,
            ]
        case Phase.GENERATING:
            parts = ["answering", counted(status.tokens, "token"), as_duration(status.elapsed_s)]
        case Phase.GONE:
            parts = ["the engine does not answer; the next prompt tries again"]
        case Phase.READY | Phase.STOPPING:
            parts = [status.phase.value]
    return " · ".join(part for part in parts if part)


def context_cost(status: EngineStatus) -> str:
    """What the context takes in memory: context of 40,960 tokens: 4.7 GB of KV cache. "" if that is not known."""
    if not status.cache_bytes:
        return ""
    cache = cache_text(status.cache_bytes, status.kv)
    return f"context of {counted(status.context_length, 'token')}: {cache}"


class ActivityLine(Widget):
    """Shows a notice, on as many lines as it needs, or else the state of the engine with a hint at the right. While
    the engine starts, which may take minutes, it shows both."""

    DEFAULT_CSS = """
    ActivityLine { height: auto; max-height: 4; padding: 0 2; color: $text-muted; }
    """
    ALLOW_SELECT = False

    status: reactive[EngineStatus] = reactive(EngineStatus())
    activity: reactive[str] = reactive("")
    """Replaces the text of `status` where the caller knows better what the user waits for."""
    notice: reactive[str] = reactive("", layout=True)
    is_warning: reactive[bool] = reactive(False)
    hint: reactive[str] = reactive("")

    def watch_is_warning(self, is_warning: bool) -> None:
        self.set_class(is_warning, "-warning")

    def watch_status(self, before: EngineStatus, after: EngineStatus) -> None:
        if (before.phase in _START) != (after.phase in _START):
            self.refresh(layout=True)

    @property
    def text(self) -> str:
        return self.activity or status_text(self.status)

    def render(self) -> Content:
        if not self.notice:
            return self._state()
        mark, style = ("⚠", "$text-warning") if self.is_warning else ("·", "$text")
        notice = Content.styled(f"{mark} {one_line(self.notice)}", style)
        return Content("\n").join((self._state(), notice)) if self.status.phase in _START else notice

    def _state(self) -> Content:
        mark, style = SPINNER[int(self.status.elapsed_s / SPINNER_S) % len(SPINNER)], "$text-accent"
        if self.status.phase in (Phase.READY, Phase.GONE):
            mark, style = "·" if self.status.phase is Phase.READY else "⚠", ""
        left = Content.assemble((mark, style), f" {self.text}")
        gap = self.size.width - left.cell_length - len(self.hint)
        if gap < 2:
            return left.truncate(self.size.width, ellipsis=True)
        return left + " " * gap + Content.styled(self.hint, "$foreground 65%")
