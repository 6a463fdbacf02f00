"""The sampling options that a preset may set, and the values that any source of them may give."""

import math

import msgspec

from engine.protocol.events import Effort

_INT_MAX = 2**31 - 1
RANGES: dict[str, tuple[float, float]] = {  # both ends are allowed, but no infinity
    "temperature": (0, math.inf),
    "top_k": (0, _INT_MAX),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (0.01, 100),
    "repeat_last_n": (0, _INT_MAX),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**32 - 1),
}


class PresetSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Sampling`; None leaves an option to the settings and the command line."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    effort: Effort | None = None


def out_of_range(sampling: msgspec.Struct) -> str:
    """Names the first option whose value sampling cannot work with, and its range; "" if there is none. `sampling` is
    a `Sampling` or a `PresetSampling`."""
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name, None)  # presets have no such penalties
        if value is not None and (not low <= value <= high or value == math.inf):  # a NaN is in no range
            allowed = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:.10g}"
            return f"{name.replace('_', '-')} must be {allowed}, not {value}"
    return ""
