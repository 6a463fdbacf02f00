"""Says in one sentence why an engine decodes more slowly than it did at its best."""

from collections.abc import Iterable, Sequence

from engine.protocol.events import Counter

TOLERANCE = 0.85
"""A speed above this share of the expected one needs no explanation."""
_CLOCKS = ("GPU clock", "EMC clock", "memory clock", "CPU clock")
_HOT_C = 92
_BUSY_PERCENT = 25
_QUIET_PERCENT = 10


def explain_slowdown(
    tokens_per_s: float | None,
    best_tokens_per_s: float | None,
    context_factor: float,
    position: int,
    counters: Sequence[Counter],
) -> str:
    """Why the decode speed is below the best one; "" if it is not, or if either is unknown.

    `context_factor` is the speed, relative to the best, that the longer context alone explains: bytes read for a
    token at the best speed / bytes read for a token now, at `position` (tokens in the context).
    """
    if not tokens_per_s or not best_tokens_per_s or tokens_per_s >= TOLERANCE * best_tokens_per_s:
        return ""
    loss = f"{1 - tokens_per_s / best_tokens_per_s:.0%} below the best"
    if tokens_per_s >= TOLERANCE * best_tokens_per_s * context_factor:
        return f"{loss}: each token reads a KV cache of {position:,} tokens"
    return f"{loss}: {_cause({counter.name: counter for counter in counters})}"


def other_programs(counters: Iterable[Counter]) -> str:
    """A phrase about the CPU load of other programs; "" if it is low or unknown."""
    load = _other_load(counters)
    return f"other programs take {load:.0f} % of the CPU" if load and load >= _BUSY_PERCENT else ""


def is_quiet(counters: Iterable[Counter]) -> bool:
    """Whether other programs are known to leave the CPU to this one."""
    load = _other_load(counters)
    return load is not None and load < _QUIET_PERCENT


def _other_load(counters: Iterable[Counter]) -> float | None:
    return next((counter.value for counter in counters if counter.name == "other load"), None)


def _cause(counters: dict[str, Counter]) -> str:
    if (throttled := counters.get("throttled")) and throttled.parts:
        return f"the GPU is throttled, {', '.join(throttled.parts)}"
    if others := other_programs(counters.values()):
        return others
    for name in _CLOCKS:
        clock = counters.get(name)
        if clock and clock.value and clock.maximum and clock.value < TOLERANCE * clock.maximum:
            mode = counters.get("power mode")
            power_mode = f" in power mode {mode.text}" if mode and mode.text else ""
            return f"the {name} is {clock.value:,.0f} of {clock.maximum:,.0f} {clock.unit}{power_mode}"
    temperature = counters.get("temperature")
    if temperature and temperature.value is not None and temperature.value >= _HOT_C:
        return f"the temperature is {temperature.value:.0f} °C"
    return "no counter shows why"
