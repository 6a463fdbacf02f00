"""One kernel: its figures, how its loops were cut, and the source that was compiled."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from engine.events import KernelTime
from widgets.kernel_table import gbps
from widgets.text import clean, one_line


class KernelScreen(ModalScreen[None]):
    DEFAULT_CSS = """
    KernelScreen { align: center middle; background: $background 60%; }
    KernelScreen > Vertical {
        width: 90%; max-width: 120; height: 90%; padding: 0 1; background: $surface; border: round $primary 60%;
        border-title-color: $text; border-subtitle-color: $text-muted;
    }
    KernelScreen .figures { height: auto; margin-bottom: 1; }
    """
    BINDINGS = [("escape,q,enter", "dismiss", "Close")]  # noqa: RUF012 (declared so by Textual)

    def __init__(self, kernel: KernelTime) -> None:
        super().__init__()
        self.kernel = kernel

    def compose(self) -> ComposeResult:
        kernel = self.kernel
        each = kernel.total_us / max(1, kernel.calls)
        figures = (
            f"{kernel.role} · {kernel.calls} calls a step · {kernel.total_us:,.1f} µs, {each:,.1f} µs each\n"
            f"{kernel.bytes:,} bytes · {gbps(kernel):,.1f} GB/s\n"
            f"options: {one_line(' · '.join(kernel.options)) or 'none: its loops are written as they run'}"
        )
        box = Vertical()
        box.border_title, box.border_subtitle = one_line(kernel.name), "Esc closes"
        with box:
            yield Static(Content(figures), classes="figures")
            with VerticalScroll():
                yield Static(Content(clean(kernel.source) or "The source is not known."))
