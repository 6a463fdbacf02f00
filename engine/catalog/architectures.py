"""Which architectures the engine runs."""

from __future__ import annotations

from engine.errors import ModelFileError
from engine.model.architectures import check_architecture

__all__ = ["check_architecture", "runs"]


def runs(architecture: str) -> bool:
    """Whether the engine runs models of this architecture."""
    try:
        check_architecture(architecture, "")
    except ModelFileError:
        return False
    return True
