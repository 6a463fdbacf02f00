"""A turn of the conversation, as the transcript reads it. The application owns the turns and changes them."""

from __future__ import annotations

from typing import Literal, Protocol

WARNING = "⚠"
"""The first character of a note about something that went wrong."""


class Turn(Protocol):
    """`content` and `thinking` are raw text, which the widgets clean. `streaming`: more text is to come. `finished`:
    the reply is complete. `thinking_s` is how long the model thought, in seconds (None: not measured). `note` is one
    line about the turn, "" if there is none."""

    @property
    def role(self) -> Literal["user", "assistant"]: ...
    @property
    def content(self) -> str: ...
    @property
    def thinking(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    @property
    def streaming(self) -> bool: ...
    @property
    def thinking_s(self) -> float | None: ...
    @property
    def note(self) -> str: ...
