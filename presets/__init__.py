"""Data that is shipped: built-in presets with their loader, tuned schedules, and the built-in model."""

from pathlib import Path

GUIDE = "orin-guide"
"""The name of the built-in model."""


def guide_path() -> Path:
    """The file of the built-in model."""
    return Path(__file__).with_name(f"{GUIDE}.gguf")
