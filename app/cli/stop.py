"""`orin-chat stop`: ends engines that were kept warm."""

import sys
from collections.abc import Sequence

from app.chat.settings import Settings
from app.cli import options
from engine.protocol import kept_engines
from widgets.text import counted


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Ends them, says how many there were, and returns the exit code."""
    options.Parser("stop", "End engines that --keep-warm has left running.").parse_args(arguments)
    stopped = kept_engines.stop()
    sys.stdout.write(f"ended {counted(stopped, 'engine')}\n" if stopped else "no engine is kept warm\n")
    return 0
