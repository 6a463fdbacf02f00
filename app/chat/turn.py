"""One turn of a conversation, which grows while a reply streams. `widgets.turn` is what a screen sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(eq=False)
class Turn:
    """`content` and `thinking` are as they came from the user or the model; what shows them cleans them.

    `streaming` is True while more of it is on its way; `finished` is False for a reply that did not come to
    its end, for as long as it does not. `thinking_s` is how long the model thought, in seconds
    (None: not measured). `note` is one line about the turn (stopped, failed), never sent to a model.
    `message_id` is its row in the history (None: not saved yet).
    """

    role: Literal["user", "assistant"]
    content: str = ""
    thinking: str = ""
    finished: bool = True
    streaming: bool = False
    thinking_s: float | None = None
    note: str = ""
    message_id: int | None = None
