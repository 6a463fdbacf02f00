"""How a chat begins."""

from collections.abc import Sequence
from typing import TypedDict

from app.tools.toolbox import Toolbox
from engine.protocol.events import Sampling


class ChatOptions(TypedDict, total=False):
    """A session may change most of these later."""

    sampling: Sampling
    system: str
    max_tokens: int | None
    think: bool
    tools: Toolbox
    allowed: Sequence[str]  # the tools that run without being asked: see `Permissions`
