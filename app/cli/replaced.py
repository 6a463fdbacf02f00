"""The files of a program that were replaced while it ran, so that modules that it has not imported yet are gone or do
not fit those that it has; and kept bytecode that was cut."""

from engine.errors import OrinError

REPLACED = OrinError("orin-chat's own files have changed since it was started.", "Start it again.")
CUT = OrinError(
    "Bytecode that was kept for later starts was cut, as by a full disk; it is deleted.", "Start it again."
)
_OURS = {"app", "engine", "presets", "widgets"}


def is_replaced(error: BaseException) -> bool:
    return isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _OURS
