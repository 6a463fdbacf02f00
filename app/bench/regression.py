"""Results of a benchmark beside those of an earlier run: faster, slower, or within the noise."""

import math
from collections.abc import Sequence

from app.bench.results import Result
from app.bench.tables import number
from engine.errors import UsageError
from widgets.text import one_line

NOISE_SIGMAS = 3.0
NOISE_SHARE = 0.02
"""Two means are the same if they differ by less than this: standard errors of their difference, or this share."""


def compare(results: Sequence[Result], earlier: Sequence[Result]) -> tuple[list[str], bool]:
    """One sentence for each result that has an earlier one, and whether any is slower beyond the noise.

    The noise is NOISE_SIGMAS standard errors of the difference of both means (Welch), and at least NOISE_SHARE of the
    earlier mean. Raises UsageError if the earlier run was on another machine, or has none of these tests.
    """
    pairs = [(result, before) for result in results if (before := _earlier(result, earlier))]
    if not pairs:
        raise UsageError(
            "The earlier run has none of these tests with the same engine, setup and model.",
            f"It has: {', '.join(dict.fromkeys(f'{r.setup} {r.test}' for r in earlier))}.",
        )
    sentences, any_slower = [], False
    for now, before in pairs:
        for device, device_before in ((now.gpu_info, before.gpu_info), (now.cpu_info, before.cpu_info)):
            if device and device_before and device != device_before:
                raise UsageError(f"The earlier run was on another machine: {device_before}, not {device}.")
        change = now.avg_ts / before.avg_ts - 1
        sigma = math.hypot(_standard_error(now), _standard_error(before))
        noise = max(NOISE_SIGMAS * sigma, NOISE_SHARE * before.avg_ts)
        verdict = "within the noise"
        if abs(now.avg_ts - before.avg_ts) > noise:
            verdict = "faster" if change > 0 else "SLOWER"
            any_slower = any_slower or change < 0
        figures = f"{number(before.avg_ts)} -> {number(now.avg_ts)} tok/s ({change:+.1%}"
        sentences.append(
            one_line(f"{now.test} {now.setup}: {figures}, noise {noise / before.avg_ts:.1%}): {verdict}")
        )
    return sentences, any_slower


def _earlier(result: Result, earlier: Sequence[Result]) -> Result | None:
    """The last earlier result of the same test, setup and model."""
    key = (result.setup, result.test)
    return next((before for before in reversed(earlier) if (before.setup, before.test) == key), None)


def _standard_error(result: Result) -> float:
    return result.stddev_ts / math.sqrt(len(result.samples_ts))
