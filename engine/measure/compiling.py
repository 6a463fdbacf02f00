"""The progress of tinygrad's kernel compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tinygrad.engine.realize


@contextmanager
def kernels_reported(report: Callable[[int, int], None]) -> Iterator[None]:
    """In its body, calls `report(done, total)` before the first kernel is compiled and after each one. `total` grows as
    more kernels become known. tinygrad shows its progress only in a progress bar, so this replaces the bar."""
    done = total = 0

    class ProgressBar:
        """The part of `tinygrad.helpers.tqdm` that tinygrad uses here."""

        def __init__(self, *_: Any, total: int = 0, **__: Any) -> None:
            add(0, total)

        def __enter__(self) -> ProgressBar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def set_description(self, _: str) -> None:
            pass

        def update(self, n: int) -> None:
            add(n, 0)

    def add(new_done: int, new_total: int) -> None:
        nonlocal done, total
        done, total = done + new_done, total + new_total
        report(done, total)

    realize: Any = tinygrad.engine.realize
    stock, realize.tqdm = realize.tqdm, ProgressBar
    try:
        yield
    finally:
        realize.tqdm = stock
