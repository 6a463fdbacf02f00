"""What the transcript sees of a turn of the conversation. The application owns the turns and changes them."""

from __future__ import annotations

from typing import Literal, Protocol

WARNING = "⚠"
"""What a note begins with where something went wrong."""


class Turn(Protocol):
    """`content` and `thinking` are raw text, which the widgets clean. `streaming`: more text is on its way.
    `finished`: the reply came to its own end. `thinking_s`: how long the model thought, in seconds (None: not
    measured). `note`: one line about the turn."""

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
