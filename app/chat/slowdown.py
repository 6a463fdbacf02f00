"""In one sentence, why an engine is slower than it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.events import Counter

NOTICEABLE = 0.85
"""Of the speed there should be: what is above that is no reason to say anything."""
_CLOCKS = ("GPU clock", "EMC clock", "memory clock", "CPU clock")
_HOT_C = 92
_OTHERS_PERCENT = 25


def verdict(
    rate: float | None, best: float | None, slowdown: float, position: int, counters: Sequence[Counter]
) -> str:
    """`rate` and `best` in tok/s; `slowdown` is what the grown context alone explains: bytes that a token had to
    read when it was best, by those that it must read now at `position`. "" while there is nothing to say."""
    if not rate or not best or rate >= NOTICEABLE * best:
        return ""
    below = f"{1 - rate / best:.0%} below the best"
    if rate >= NOTICEABLE * best * slowdown:
        return f"{below}: each token reads a KV cache of {position:,} tokens"
    return f"{below}: {_cause({counter.name: counter for counter in counters})}"


def other_programs(counters: Iterable[Counter]) -> str:
    """That others work on this machine too; "" where they do little."""
    load = next((counter.value for counter in counters if counter.name == "other load"), None)
    return f"other programs take {load:.0f} % of the CPU" if load and load >= _OTHERS_PERCENT else ""


def _cause(counters: dict[str, Counter]) -> str:
    if (throttled := counters.get("throttled")) and throttled.parts:
        return f"the GPU is held back, {', '.join(throttled.parts)}"
    if others := other_programs(counters.values()):
        return others
    for name in _CLOCKS:
        clock = counters.get(name)
        if clock and clock.value and clock.most and clock.value < NOTICEABLE * clock.most:
            mode = counters.get("power mode")
            under = f" in power mode {mode.text}" if mode and mode.text else ""
            return f"the {name} is {clock.value:,.0f} of {clock.most:,.0f} {clock.unit}{under}"
    heat = counters.get("temperature")
    if heat and heat.value is not None and heat.value >= _HOT_C:
        return f"it is hot, {heat.value:.0f} °C"
    return "no counter shows why"
