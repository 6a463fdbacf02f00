"""Data that is shipped: built-in presets with their loader, tuned schedules, and the built-in model."""

from pathlib import Path

GUIDE = "orin-guide"
"""The name of the built-in model."""
GREETING = (
    f"{GUIDE} answers: a small built-in model that knows only orin-chat. "
    "For a larger model: orin-chat --model qwen3:0.6b. `orin-chat models` lists more."
)


def guide_path() -> Path:
    """The file of the built-in model."""
    return Path(__file__).with_name(f"{GUIDE}.gguf")
