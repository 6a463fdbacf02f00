"""The page of a kernel: its figures, tinygrad's optimizations of its loops, and its source."""

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from engine.protocol.events import KernelTime
from widgets.dashboard.kernel_lines import gbps
from widgets.page import Frame, Page
from widgets.text import clean, counted, one_line


class KernelScreen(Page[None]):
    DEFAULT_CSS = """
    KernelScreen > Frame { width: 120; height: 90%; }
    KernelScreen .figures { height: auto; margin-bottom: 1; }
    """
    BINDINGS = [Binding("escape,q,enter", "dismiss", "Close", priority=True)]

    def __init__(self, kernel: KernelTime) -> None:
        super().__init__()
        self.kernel = kernel

    def compose(self) -> ComposeResult:
        kernel = self.kernel
        each_us = kernel.total_us / max(1, kernel.calls)
        figures = (
            f"{kernel.role} · {counted(kernel.calls, 'call')} a step · "
            f"{kernel.total_us:,.1f} µs, {each_us:,.1f} µs each\n"
            f"{kernel.bytes:,} bytes · {gbps(kernel):,.1f} GB/s\n"
            f"options: {one_line(' · '.join(kernel.options)) or 'none'}"
        )
        with Frame(one_line(kernel.name), "Esc closes"):
            yield Static(Content(figures), classes="figures")
            with VerticalScroll():
                yield Static(Content(clean(kernel.source) or "The source is not known."))
