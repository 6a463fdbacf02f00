"""Data: built-in presets and what reads them, and the built-in model."""

from pathlib import Path

GUIDE = "orin-guide"
"""What the built-in model is called."""
GREETING = (
    f"{GUIDE} answers: a small model that is built in and knows orin-chat alone. "
    "A larger one: orin-chat --model qwen3:0.6b; `orin-chat models` lists what there is."
)


def guide_path() -> Path:
    """The file of the built-in model."""
    return Path(__file__).with_name(f"{GUIDE}.gguf")
