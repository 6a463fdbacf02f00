"""Data: built-in presets and what reads them, and the built-in model."""

from pathlib import Path


def guide_path() -> Path:
    """The file of orin-guide, the model that is built in."""
    return Path(__file__).with_name("orin-guide.gguf")
