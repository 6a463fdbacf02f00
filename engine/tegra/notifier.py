"""Why the GPU stopped, by its driver: the channel's error notifier and the states of the multiprocessors."""

from engine.tegra import abi, driver
from engine.tegra.driver import Channel, Nvmap, Tsg
from engine.tegra.errors import DriverError

# `Notification.info32`: NVGPU_ERR_NOTIFIER_* in nvgpu's sources.
_CAUSES = {
    8: "the channel was idle for too long",
    13: "a kernel raised an exception",
    24: "a semaphore was waited for too long",
    31: "the GPU touched memory that is not mapped",
    32: "the channel's commands are damaged",
    43: "the channel was reset",
}
# Bits 7:0 of a warp's exception status register (ESR), as in nvgpu's table of them.
_WARP_ERRORS = {
    0x09: "illegal instruction",
    0x0E: "address out of range",
    0x0F: "misaligned address",
    0x10: "invalid address space (a global access inside the window of shared or local memory)",
}


class ErrorNotifier:
    """A page into which the driver writes an `abi.Notification` when the channel stops. Raises DriverError."""

    def __init__(self, nvmap: Nvmap, channel: Channel) -> None:
        buffer = nvmap.buffer(abi.PAGE, abi.PAGE, zero=True)
        try:
            self._address = buffer.map(abi.PAGE)
            try:
                channel.set_error_notifier(buffer)
            except DriverError:
                self.close()
                raise
        finally:
            buffer.close()

    def close(self) -> None:
        driver.unmap(self._address, abi.PAGE)

    def read(self) -> abi.Notification | None:
        """A copy of the notification; None if the channel runs."""
        note = abi.Notification.from_buffer_copy(abi.Notification.from_address(self._address))
        return note if note.status else None


def report(note: abi.Notification | None, tsg: Tsg, multiprocessors: int) -> str:
    """Why the GPU stopped, in one sentence. `note` None: the driver reports no fault."""
    if note is None:
        return "The GPU does not answer, and its driver reports no fault: it waits, or a kernel does not end."
    cause = _CAUSES.get(note.info32, f"error {note.info32}")
    return f"The GPU stopped: {cause}{''.join(f'; {text}' for text in _sm_errors(tsg, multiprocessors))}."


def _sm_errors(tsg: Tsg, multiprocessors: int) -> list[str]:
    """The errors of the multiprocessors, as text. Several usually have the same one, which is said once."""
    try:
        states = tsg.sm_errors(multiprocessors)
    except DriverError as failure:  # the driver has no states of a channel that was closed
        return [f"no state of the multiprocessors ({failure.message.rstrip('.')})"]
    multiprocessors_by_error: dict[str, list[int]] = {}
    for i, state in enumerate(states):
        if state.warp_esr or state.global_esr:
            code = state.warp_esr & 0xFF
            error = f"{_WARP_ERRORS.get(code, f'warp error {code:#x}')}, global state {state.global_esr:#x}"
            multiprocessors_by_error.setdefault(error, []).append(i)
    return [
        f"{error} on multiprocessor {', '.join(map(str, numbers))}"
        for error, numbers in multiprocessors_by_error.items()
    ]
