"""A chat whose program is replaced while it runs, as by an update: what it imports later is gone, or does not fit. It
goes on with what it has."""

from textual.worker import WorkerFailed

from app.cli.replaced import REPLACED, is_replaced
from app.screens.engine_actions import EngineActions


class ReplacedFiles(EngineActions):
    """A part of `ChatApp`."""

    def _handle_exception(self, error: Exception) -> None:
        """Textual calls this for what nobody has caught, and ends."""
        cause = error.error if isinstance(error, WorkerFailed) else error
        if is_replaced(cause):
            self.column.notice(str(REPLACED), warning=True, seconds=60)
        else:
            super()._handle_exception(error)
