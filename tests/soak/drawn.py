"""Inputs that are drawn for a soak: as many as are asked for, and the same again for the same seed."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st


def drawn(
    tries: int, number: int, *inputs: st.SearchStrategy[object]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function of `inputs` one without parameters: it calls it with `tries` of them. `number` is the seed."""

    def decorate(ask: Callable[..., None]) -> Callable[..., None]:
        limits = settings(
            max_examples=tries,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        return seed(number)(limits(given(*inputs)(ask)))

    return decorate
