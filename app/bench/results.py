"""Results of a benchmark, in llama-bench's field names, and their JSON."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import UsageError
from engine.measure.power import Samples
from engine.system.invocation import call
from widgets.text import one_line

OURS, PEER = "orin-chat", "llama.cpp"
PLAIN = "without guesses"
"""Our engine once more, each token of which has a step."""


class KernelRow(msgspec.Struct, frozen=True):
    """Kernels of a decode step with the same name and part of the model. `us` is the time of all calls."""

    name: str
    role: str
    calls: int
    us: float
    gbps: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One test of one engine.

    `watts` is the mean power while the test ran, `tokens_per_joule` the median rate divided by it, and the clocks are
    medians (`engine.measure.power`). `below_full` says what kept the machine below its full speed, "" if nothing is
    known to. `kernels` of a decode step are there if they were asked for.

    The fields up to `samples_ts` have the names and meanings of `llama-bench -o json`: times in nanoseconds, `ts` in
    tokens a second, sizes in bytes. One meaning differs: a prompt's time ends with the first token. `n_gen` counts
    the tokens that are timed; the token before them belongs to the prompt. A latency is the time from one token to
    the next. `bytes_per_token`, `gbps` and `roofline_share` are modelled: from the bytes that a decode step must read.

    With `n_parallel` above 0, so many conversations were answered at once, each after a prompt of `n_depth` tokens.
    Then `ts` is their total decode rate, and `stream_ts` the median rate of one: both while all of them decode and no
    prompt is read (`app.bench.samples.shared_decode`). The times to the first token (median, and 99th percentile) and
    from token to token are those of prompts that all come at the same moment.

    With `n_arrival`, one conversation fewer is answered, and prompts of so many tokens arrive, one after another. Then
    `ts` is the rate meanwhile, the latencies are of these answers meanwhile, and `quiet_p50_ms` and `quiet_p99_ms` are
    of the same answers before. The times to the first token are those of the prompts that arrive.
    """

    build_commit: str = ""
    cpu_info: str = ""
    gpu_info: str = ""
    backends: str = ""
    model_filename: str = ""
    model_type: str = ""
    model_size: int = 0
    model_n_params: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    test_time: str = ""
    avg_ns: float = 0
    stddev_ns: float = 0
    avg_ts: float = 0.0
    stddev_ts: float = 0.0
    samples_ns: list[int] = []
    samples_ts: list[float] = []
    # fields that llama-bench does not have
    n_parallel: int = 0
    n_arrival: int = 0
    engine: str = PEER
    preset: str = ""
    n_ctx: int = 0
    median_ts: float = 0.0
    stream_ts: float | None = None
    first_token_ms: float | None = None
    first_token_p99_ms: float | None = None
    latency_p50_ms: float | None = None
    latency_p90_ms: float | None = None
    latency_p99_ms: float | None = None
    latency_max_ms: float | None = None
    quiet_p50_ms: float | None = None
    quiet_p99_ms: float | None = None
    load_ms: float | None = None
    bytes_per_token: int | None = None
    gbps: float | None = None
    copy_gbps: float | None = None
    roofline_share: float | None = None
    kernels_per_token: int | None = None
    peak_resident_bytes: int | None = None
    device_bytes: int | None = None
    watts: float | None = None
    tokens_per_joule: float | None = None
    power_mode: str = ""
    jetson_clocks: str = ""
    gpu_mhz: float | None = None
    gpu_max_mhz: float | None = None
    memory_mhz: float | None = None
    memory_max_mhz: float | None = None
    throttled: str = ""
    below_full: str = ""
    kernels: tuple[KernelRow, ...] = ()

    @property
    def test(self) -> str:
        """The name in llama-bench's tables: pp512, tg128 @ d1024. Of several conversations: 8 x tg64 @ d512, and
        7 x tg64 @ d512 + pp2048 while prompts arrive."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        streams = self.n_parallel - bool(self.n_arrival)
        name = f"{streams} x {name}" if self.n_parallel else name
        name = f"{name} @ d{self.n_depth}" if self.n_depth else name
        return f"{name} + pp{self.n_arrival}" if self.n_arrival else name

    @property
    def model(self) -> str:
        return Path(self.model_filename).name

    @property
    def setup(self) -> str:
        """Engine, preset or backend, and model: the same in another run of the same tests."""
        return " ".join(part for part in (self.engine, self.preset or self.backends, self.model) if part)


def sample_fields(times_ms: Sequence[float], rates: Sequence[float]) -> dict[str, Any]:
    """The fields of a `Result` that derive from its samples; `rates` in tokens/s."""
    times_ns = [round(ms * 1e6) for ms in times_ms]
    return {
        "samples_ns": times_ns,
        "samples_ts": list(rates),
        "avg_ns": statistics.fmean(times_ns),
        "stddev_ns": statistics.stdev(times_ns) if len(times_ns) > 1 else 0.0,
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "median_ts": statistics.median(rates),
    }


def power_fields(samples: Samples, rate: float) -> dict[str, Any]:
    """The fields of a `Result` about power and clocks; `rate` in tokens/s."""
    memory = "EMC clock" if samples.value("EMC clock") else "memory clock"
    return {
        "watts": samples.watts,
        "tokens_per_joule": rate / samples.watts if samples.watts else None,
        "power_mode": samples.text("power mode"),
        "jetson_clocks": samples.text("jetson_clocks"),
        "gpu_mhz": samples.value("GPU clock"),
        "gpu_max_mhz": samples.maximum("GPU clock"),
        "memory_mhz": samples.value(memory),
        "memory_max_mhz": samples.maximum(memory),
        "throttled": samples.throttled,
        "below_full": samples.below_full(),
    }


def to_json(results: Sequence[Result]) -> str:
    return msgspec.json.format(msgspec.json.encode(results), indent=2).decode() + "\n"


def read(path: Path) -> list[Result]:
    """Reads a file of `to_json` or `llama-bench -o json`. Raises UsageError."""
    try:
        results = msgspec.json.decode(path.read_bytes(), type=list[Result])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} holds no results of a benchmark: {one_line(str(error))}.",
            f"Make one with: {call('bench --save FILE')}",
        ) from None
    return [result for result in results if result.samples_ts]
