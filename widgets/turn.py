"""A turn of the conversation. The application owns the turns and changes them; the transcript reads them."""

from dataclasses import dataclass
from typing import Literal

from engine.protocol.events import Message

WARNING = "⚠"
"""The first character of a note about something that went wrong."""


@dataclass(eq=False)
class Turn:
    """`content` and `thinking` are raw text from the user or the model; the widgets clean it. `streaming`: more text is
    to come. `finished` is False for a reply that is not complete, or was not when the program ended. `thinking_s` is
    in seconds (None: not measured). `note` is one line about the turn (stopped, failed), which no model sees.
    `message_id` is its row in the history (None: not saved yet)."""

    role: Literal["user", "assistant"]
    content: str = ""
    thinking: str = ""
    finished: bool = True
    streaming: bool = False
    thinking_s: float | None = None
    note: str = ""
    message_id: int | None = None

    @property
    def message(self) -> Message:
        """What a model is sent."""
        return Message(role=self.role, content=self.content, thinking=self.thinking)
