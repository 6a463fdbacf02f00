"""How far tinygrad has come with compiling kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tinygrad.engine.realize


@contextmanager
def kernels_reported(report: Callable[[int, int], None]) -> Iterator[None]:
    """Within it, `report(done, total)` is called before the first and after each kernel that is compiled;
    `total` grows when more become known. tinygrad tells its progress bar alone, so this stands in for it."""
    counts = {"done": 0, "total": 0}

    class Bar:
        def __init__(self, *_: Any, total: int = 0, **__: Any) -> None:
            counts["total"] += total
            report(counts["done"], counts["total"])

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def set_description(self, _: str) -> None:
            pass

        def update(self, n: int) -> None:
            counts["done"] += n
            report(counts["done"], counts["total"])

    bar: Any = tinygrad.engine.realize
    before, bar.tqdm = bar.tqdm, Bar
    try:
        yield
    finally:
        bar.tqdm = before
