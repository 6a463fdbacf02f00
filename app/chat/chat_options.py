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


class OpenedChat(ChatOptions):
    """Which chat is opened, None for a new one, and the text in its prompt."""

    chat_id: int | None
    draft: str
