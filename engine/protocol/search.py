"""What is said of a search for faster kernels: a command and events of the engine's process."""

from engine.protocol.conversation import Record as _Record


class Tune(_Record, frozen=True, kw_only=True):
    """Search for faster schedules of the kernels in use, for `seconds` at most. Waits for earlier requests; a later
    one, and a `Cancel`, stop it."""

    request_id: int
    seconds: float


class Search(_Record, frozen=True, kw_only=True):
    """The search for the fastest kernel of a product; `what` names the product. Of about `total` candidates `tried`
    were timed, and `refused` of these failed or gave other results. A decode step took `before_us` at first and takes
    `after_us` with the best candidate, which is `choice`. `found`: the result is from an earlier run. `outdated`:
    the schedule at first was measured with other kernels than these. `left_s` is the time left for all products."""

    what: str
    choice: str
    tried: int
    total: int
    refused: int
    before_us: float
    after_us: float
    left_s: float
    found: bool = False
    outdated: bool = False


class Tuned(_Record, frozen=True, kw_only=True):
    """The answer to `Tune`. A decode step took `before_us` and takes `after_us` (both 0: nothing was timed). `left`
    products are still to be searched."""

    request_id: int
    before_us: float
    after_us: float
    left: int
