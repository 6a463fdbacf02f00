"""What a worker serves, as it sees it: a model, and what answers requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from engine.protocol.events import (
    Event,
    Finished,
    Generate,
    KernelProfile,
    Measure,
    Measured,
    Profile,
    Ready,
    Tune,
    Tuned,
)

if TYPE_CHECKING:
    from engine.runtime.answer import Answer

Report = Callable[[Event], None]


class Answering(Protocol):
    """What answers requests, several at a time (`engine.runtime.scheduler`)."""

    @property
    def busy(self) -> bool:
        """Whether a request is answered or waits."""
        ...

    def add(
        self,
        answer: Answer,
        cancelled: Callable[[], bool],
        end: Callable[[Finished | Exception], None],
        came_s: float,
    ) -> None:
        """Answers a request in later steps that came at `came_s` (`time.perf_counter`). It reports `Prefilling`,
        `Token` and `Thinking`; `end` gets `Finished`, or why it failed. Once `cancelled` returns True, the answer ends
        as "cancelled"."""
        ...

    def step(self) -> None:
        """Works for a short while."""
        ...


class Model(Protocol):
    """What a worker serves. `ready` describes it; the worker fills in `load_ms`, and the `at_ms` of each token."""

    ready: Ready

    @property
    def scheduler(self) -> Answering: ...

    def read_pictures(self, request: Generate) -> Iterator[object | None]:
        """Reads the pictures of a request, one after the other, and gives None before one that takes long. `begin`
        finds those that are kept until then, and reads the others. Raises PictureError."""
        ...

    def begin(self, request: Generate, report: Report) -> Answer:
        """What `scheduler` takes. Called by several threads, none of which is the main one. Raises ContextFullError,
        TemplateError and UsageError."""
        ...

    def warm_up(self, interrupted: Callable[[], bool]) -> None:
        """Prepares for later answers while no request waits. Calls `interrupted` often, and returns once it is
        True."""
        ...

    def check_device(self) -> None:
        """Raises if the device works no longer."""
        ...

    def measure(self, request: Measure) -> Measured: ...

    def profile(self, request: Profile, interrupted: Callable[[], bool]) -> KernelProfile:
        """Calls `interrupted` between kernels. Raises PreemptedError once it returns True."""
        ...

    def tune(self, request: Tune, interrupted: Callable[[], bool]) -> Tuned:
        """Calls `interrupted` between candidates, and returns soon once it is True."""
        ...
