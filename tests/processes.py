"""Checks that run as processes of their own, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def side_by_side(
    request: pytest.FixtureRequest, run: Callable[..., Any], *names: str
) -> Iterator[dict[tuple[Any, ...], Future[Any]]]:
    """What `run` returns for the values of the parameters `names`: for all that the module's tests ask for, in the
    order in which they do, as many at a time as there are CPUs."""
    params = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    asked = dict.fromkeys(tuple(p[name] for name in names) for p in params if {*names} <= p.keys())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {values: pool.submit(run, *values) for values in asked}
        pool.shutdown(cancel_futures=True)
