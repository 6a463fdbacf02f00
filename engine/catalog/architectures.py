"""Which architectures the engine runs."""

from __future__ import annotations

from engine.model.architectures import ARCHITECTURES, check_architecture

__all__ = ["check_architecture", "runs"]


def runs(architecture: str) -> bool:
    """Whether the engine runs models of this architecture."""
    return architecture in ARCHITECTURES
