"""An engine that starts while another one is in use."""

from collections.abc import Callable
from dataclasses import dataclass, field

from app.chat.failures import events_of
from app.chat.status import StatusObserver
from engine.protocol.client import Engine
from engine.protocol.events import Failed, Ready


@dataclass
class Candidate:
    """The user knows it as `name`."""

    engine: Engine
    name: str
    clock: Callable[[], float]
    status: StatusObserver = field(init=False)

    def __post_init__(self) -> None:
        self.status = StatusObserver(self.clock)

    async def start(self) -> Ready | Failed:
        """Starts it, once more if it has been closed since."""
        self.status = StatusObserver(self.clock)
        async for event in events_of(self.engine.start()):
            self.status.observe(event)
            if isinstance(event, Ready | Failed):
                return event
        return Failed(kind="internal", message="Its start ended without an event that says how.")
