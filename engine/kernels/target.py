"""The target of kernels: what tinygrad's renderer knows of the default device. A compiler process opens no device, and
is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinygrad import Device
from tinygrad.renderer import Renderer

_told: Renderer | None = None


def renderer() -> Renderer:
    """What kernels are made for."""
    return _told or Device[Device.DEFAULT].renderer


@contextmanager
def told(target: Renderer) -> Iterator[None]:
    """In its body, kernels are made for this target."""
    global _told
    before, _told = _told, target
    try:
        yield
    finally:
        _told = before
