"""The pane of the slots of a server's engine: what each of its conversations does, and the queue."""

from dataclasses import dataclass

from engine.protocol.events import Slot
from widgets.dashboard.client_graph import client_name
from widgets.dashboard.pane import FittedPane, Line
from widgets.plot import bar, short_number
from widgets.text import counted, longest_fitting

_NUMBER, _BAR, _CLIENT = 3, 10, 15  # cells


@dataclass(frozen=True)
class SlotState:
    """`slots` as in `engine.protocol.events.Slots`. `waiting` requests wait for one, `refused` were refused so far.
    `rows`, `prompt_tokens` and `room` are of the last step, as there."""

    slots: tuple[Slot | None, ...] = ()
    waiting: int = 0
    refused: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    room: int = 0


class SlotTable(FittedPane[SlotState]):
    BORDER_TITLE = "slots"

    def draw(self, data: SlotState, width: int, height: int) -> list[Line]:
        """The queue, what the last step held, and a row for each slot. Where there is no room for all, those at work
        come first, and the last line says how many are left out."""
        queue = f"{data.waiting} waiting · {data.refused} refused"
        step = longest_fitting(_step(data), width - len(queue))
        head: Line = [(queue, "warning" if data.waiting else "dim"), (step, "dim")]
        rows = list(enumerate(data.slots, 1))
        if 1 + len(rows) > height:
            rows.sort(key=lambda row: row[1] is None)
            rows = rows[: max(0, height - 2)]
        table = [
            [(f"{number:>{_NUMBER - 1}} ", "dim"), *_row(slot, width - _NUMBER)] for number, slot in rows
        ]
        left = len(data.slots) - len(rows)
        return [head, *table, *([[(f"{left} more: no room", "dim")]] if left else [])][:height]

    def rows(self, data: SlotState, width: int) -> int:
        return 1 + len(data.slots)


def _step(data: SlotState) -> list[str]:
    """What the last step held, the longest phrase first."""
    replies = [f"{data.rows:,} {'reply' if data.rows == 1 else 'replies'}"] if data.rows else []
    read = f"{data.prompt_tokens:,}"
    phrases = [[*replies, f"{of} prompt tokens"] for of in (f"{read} of {data.room:,}", read)]
    return [f" · step: {', '.join(phrase)}" for phrase in (phrases if data.room else [replies]) if phrase] + [
        ""
    ]


def _row(slot: Slot | None, width: int) -> Line:
    """Narrow rows leave out the bar, then the tokens."""
    if slot is None:
        return [("idle", "dim")]
    client = f"{client_name(slot.client):<{_CLIENT}} "
    if slot.phase == "prefill":
        share = slot.prompt_done / slot.prompt_n if slot.prompt_n else 0.0
        line: Line = [(client, ""), (f"prefill {share:>4.0%}", "hatched")]
        tokens = f" {slot.prompt_done:,} of {counted(slot.prompt_n, 'token')}"
        drawn: Line = [(f" {bar(share, _BAR)}", "hatched")]
    else:
        line = [(client, ""), (f"decode {short_number(slot.rate):>4} tok/s", "value")]
        tokens, drawn = f" {counted(slot.predicted_n, 'token')} after {slot.prompt_n:,}", []
    for more in ([*drawn, (tokens, "dim")], [(tokens, "dim")], []):
        if sum(len(text) for text, _ in (*line, *more)) <= width:
            return [*line, *more]
    return [(client_name(slot.client)[: max(4, width - len(line[1][0]) - 1)] + " ", ""), line[1]]
