"""What the driver says when the GPU stops: the channel's error notifier and the multiprocessors' states."""

from __future__ import annotations

from engine.tegra import abi, driver
from engine.tegra.driver import Channel, Nvmap, Tsg
from engine.tegra.errors import DriverError

# Codes of nvgpu's error notifiers (NVGPU_ERR_NOTIFIER_* in its sources).
_CAUSES = {
    8: "the channel was idle for too long",
    13: "a kernel raised an exception",
    24: "a semaphore was waited for too long",
    31: "the GPU touched memory that is not mapped",
    32: "the channel's commands are damaged",
    43: "the channel was reset",
}
# Of a warp's error state, bits 7:0. A collision with a memory window is the third.
_WARP_ERRORS = {
    0x09: "illegal instruction",
    0x0E: "address out of range",
    0x0F: "misaligned address",
    0x10: "invalid address space (a global access inside the window of shared or local memory)",
}


class ErrorNotifier:
    """A page that the driver writes to when the channel stops."""

    def __init__(self, nvmap: Nvmap, channel: Channel) -> None:
        buffer = nvmap.buffer(abi.PAGE, abi.PAGE, zero=True)
        try:
            self._address = buffer.map(abi.PAGE)
            try:
                channel.report_errors_to(buffer)
            except DriverError:
                self.close()
                raise
        finally:
            buffer.close()

    def close(self) -> None:
        driver.unmap(self._address, abi.PAGE)

    def read(self) -> abi.Notification | None:
        """A copy of what was written; None while all is well."""
        note = abi.Notification.from_buffer_copy(abi.Notification.from_address(self._address))
        return note if note.status else None


def report(note: abi.Notification | None, tsg: Tsg, multiprocessors: int) -> str:
    """Why the GPU stopped, in one sentence."""
    if note is None:
        return "The GPU does not answer, and its driver reports no fault: it waits, or a kernel does not end."
    cause = _CAUSES.get(note.info32, f"error {note.info32}")
    return f"The GPU stopped: {cause}{''.join(f'; {text}' for text in _stopped(tsg, multiprocessors))}."


def _stopped(tsg: Tsg, multiprocessors: int) -> list[str]:
    """The multiprocessors with an error, as text. Several usually have the same one."""
    try:
        states = tsg.sm_errors(multiprocessors)
    except DriverError as error:  # a channel that was torn down has no states any more
        return [f"no state of the multiprocessors ({error.message.rstrip('.')})"]
    found: dict[str, list[int]] = {}
    for i, state in enumerate(states):
        if state.warp_esr or state.global_esr:
            code = state.warp_esr & 0xFF
            what = _WARP_ERRORS.get(code, f"warp error {code:#x}")
            found.setdefault(f"{what}, global state {state.global_esr:#x}", []).append(i)
    return [f"{what} on multiprocessor {', '.join(map(str, at))}" for what, at in found.items()]
