"""The target of kernels: what tinygrad's renderer knows of the default device. A compiler process opens no device, and
is told of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from tinygrad import Device
from tinygrad.renderer import Renderer

_told: Renderer | None = None


def renderer() -> Renderer:
    """What kernels are made for."""
    return _told or _renderer_of(Device.DEFAULT)


@functools.cache  # tinygrad chooses anew each time, among all that it has
def _renderer_of(device: str) -> Renderer:
    return Device[device].renderer


@contextmanager
def told(target: Renderer) -> Iterator[None]:
    """In its body, kernels are made for this target."""
    global _told
    before, _told = _told, target
    try:
        yield
    finally:
        _told = before
