"""A comparison as the screen sees it. Importing this does not import the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from engine.client import Engine
    from widgets.comparison_data import ComparisonData


@runtime_checkable
class EnginePair(Protocol):
    """Two engines that answer each prompt, as one engine: see `app.comparison.comparison_engine`. `together`: from the
    next prompt on they answer at the same time."""

    together: bool

    @property
    def ours(self) -> Engine:
        """The engine whose answers the conversation keeps."""
        ...

    @property
    def doing(self) -> str:
        """What the two are working on, in words; "" while they are idle."""
        ...

    def view(self) -> ComparisonData: ...

    def forget(self) -> None:
        """Drops the last answers: the conversation is another one."""

    async def release(self) -> Engine:
        """Closes the other engine and returns `ours`."""
        ...


def answered_together(engine: Engine) -> bool:
    """Whether the last answer of `engine` shared the machine with another engine. Its speed says little then."""
    return isinstance(engine, EnginePair) and engine.view().together
