"""The rows of the calls of tools in a reply: one line each, and what was sent and returned where that is unfolded."""

from collections.abc import Iterator, Sequence

from textual.content import Content
from textual.style import Style

from widgets.chat.call_text import call_line, pretty, state_of
from widgets.chat.turn import Call
from widgets.markdown.lines import Line, indented, wrapped
from widgets.text import clean, one_line

_MUTED = "$foreground 60%"
_BAR = Content.styled("│ ", "$foreground 20%")
SHOWN_CHARS = 20_000
"""Of a result, so much is shown. The model gets more."""


def call_lines(calls: Sequence[Call], width: int, index: int, *, unfolded: bool) -> Iterator[Line]:
    """`index` is the turn's, which clicks name. A call that waits for the user is shown whole."""
    for call in calls:
        is_open = unfolded or call.state == "asked"
        style = "$text-warning" if call.state in ("asked", "failed") else _MUTED
        head = f"▾ {one_line(call.name)} · {state_of(call)}" if is_open else f"▸ {call_line(call, width - 2)}"
        click = Style.from_meta({"@click": f"toggle_thinking({index})"})
        yield Line(Content(head).truncate(width, ellipsis=True).stylize(style).stylize(click))
        if is_open:
            yield from _indented(pretty(call.arguments), width, "")
            if call.result:
                yield from _indented(_shortened(call.result), width, _MUTED)
    if calls:
        yield Line(Content(""))


def _indented(text: str, width: int, style: str) -> list[Line]:
    return indented(wrapped(Content.styled(clean(text).rstrip(), style), width - 2), _BAR, _BAR)


def _shortened(text: str) -> str:
    left_out = len(text) - SHOWN_CHARS
    return f"{text[:SHOWN_CHARS]}\n… {left_out:,} more characters" if left_out > 0 else text
