"""What a benchmark found: results in llama-bench's field names, as a table, as Markdown, as JSON, and held
against those of an earlier run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from engine.errors import UsageError
from widgets.text import as_bytes, as_count, one_line

OURS, PEER = "orin-chat", "llama.cpp"
NOISE_SIGMAS = 3.0
NOISE_SHARE = 0.02
"""A mean that is lower by less than these is the same: standard errors of the difference, share of the mean."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One test of one engine. The fields up to `samples_ts` are named as in `llama-bench -o json` (times in
    nanoseconds, `ts` tokens a second, sizes in bytes) and defined alike, but that a prompt's time goes up to
    the first token. `n_gen` tokens are those timed: one more is generated, the first, which belongs to the
    prompt. Latencies are between one token and the next; `bytes_per_token` and what is made of it are modelled
    from the bytes that a step must read."""

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
    # ours
    engine: str = PEER  # what a file of llama-bench does not say
    preset: str = ""
    n_ctx: int = 0
    median_ts: float = 0.0
    first_token_ms: float | None = None
    latency_p50_ms: float | None = None
    latency_p90_ms: float | None = None
    latency_p99_ms: float | None = None
    load_ms: float | None = None
    bytes_per_token: int | None = None
    gbps: float | None = None
    copy_gbps: float | None = None
    roofline_share: float | None = None
    kernels_per_token: int | None = None
    peak_resident_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def test(self) -> str:
        """As llama-bench's tables call it: pp512, tg128 @ d1024."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name

    @property
    def model(self) -> str:
        return Path(self.model_filename).name

    @property
    def setup(self) -> str:
        """What was measured, apart from the test: to be found again in another run."""
        return " ".join(part for part in (self.engine, self.preset or self.backends, self.model) if part)


def in_samples(times_ns: Sequence[int], rates: Sequence[float]) -> dict[str, Any]:
    """The fields of a `Result` that are made of its samples."""
    return {
        "samples_ns": list(times_ns),
        "samples_ts": list(rates),
        "avg_ns": statistics.fmean(times_ns),
        "stddev_ns": statistics.stdev(times_ns) if len(times_ns) > 1 else 0.0,
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "median_ts": statistics.median(rates),
    }


def to_json(results: Sequence[Result]) -> str:
    return msgspec.json.format(msgspec.json.encode(results), indent=2).decode() + "\n"


def read(path: Path) -> list[Result]:
    """The results in a file of `to_json` or `llama-bench -o json`. Raises UsageError."""
    try:
        results = msgspec.json.decode(path.read_bytes(), type=list[Result])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} holds no results of a benchmark: {one_line(str(error))}.",
            "Make one with: orin-chat bench --save FILE",
        ) from None
    return [result for result in results if result.samples_ts]


# --- tables ---------------------------------------------------------------------------------------------

Cells = tuple[str, ...]
TITLES: Cells = ("test", "engine", "tok/s", "median", "first ms", "p50/p90/p99 ms", "GB/s", "of memory")
SPARED = ("median", "of memory")  # in a narrow terminal; JSON and Markdown have everything
WIDE = 104
COMPARED = "ratio"
LEFT = 2  # columns of words
SETUP_TITLES: Cells = ("engine", "build", "load s", "kernels/token", "bytes/token", "resident", "on device")


def rows(results: Sequence[Result]) -> tuple[Cells, list[Cells]]:
    """Titles and lines of the tests of one model and setup; with ratios where two engines were measured."""
    compared = len({result.engine for result in results}) > 1
    lines: list[Cells] = []
    for result in results:
        ratio = ""
        if compared and result.engine == OURS and (other := _same_test(result, results)):
            ratio = f"{result.median_ts / other.median_ts:.2f}x"
        latencies = (result.latency_p50_ms, result.latency_p90_ms, result.latency_p99_ms)
        line = (
            result.test,
            result.engine,
            f"{_number(result.avg_ts)} ± {_number(result.stddev_ts)}",
            _number(result.median_ts),
            "" if result.first_token_ms is None else f"{result.first_token_ms:.1f}",
            "/".join(_number(ms) for ms in latencies if ms is not None),
            "" if result.gbps is None else f"{result.gbps:.1f}",
            "" if result.roofline_share is None else f"{result.roofline_share:.0%}",
        )
        lines.append((*line, ratio) if compared else line)
    return (*TITLES, COMPARED) if compared else TITLES, lines


def setup_rows(results: Sequence[Result]) -> list[Cells]:
    """What holds for all tests of an engine, a line each."""
    lines: list[Cells] = []
    for engine in dict.fromkeys(result.engine for result in results):
        of_engine = [result for result in results if result.engine == engine]
        first, step = of_engine[0], next((r for r in of_engine if r.bytes_per_token), None)
        lines.append(
            (
                first.engine,
                first.build_commit,
                "" if first.load_ms is None else f"{first.load_ms / 1e3:.2f}",
                "" if first.kernels_per_token is None else f"{first.kernels_per_token:,}",
                as_bytes(step.bytes_per_token) if step and step.bytes_per_token else "",
                "" if first.peak_resident_bytes is None else as_bytes(first.peak_resident_bytes),
                as_bytes(first.device_bytes) if first.device_bytes else "",
            )
        )
    return lines


def heading(result: Result) -> str:
    """The model, the machine and how it was set up, in a line."""
    device = result.gpu_info or result.cpu_info
    size = f"{as_bytes(result.model_size)}, {as_count(result.model_n_params)} parameters"
    copy = f" · memory {result.copy_gbps:,.0f} GB/s" if result.copy_gbps else ""
    preset = f"preset {result.preset} · " if result.preset else ""
    return one_line(
        f"{result.model} · {result.model_type} · {size} · {preset}{result.backends} · {device}{copy}"
    )


def groups(results: Iterable[Result]) -> list[list[Result]]:
    """Results of the same model and preset, in the order of the first of each."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        found.setdefault((result.model_filename, result.preset, result.backends), []).append(result)
    return list(found.values())


def to_tables(results: Sequence[Result], width: int = WIDE) -> list[Text | Table]:
    """For a console of rich's, `width` cells wide. Model names and the like are data: never markup."""
    shown: list[Text | Table] = []
    for group in groups(results):
        titles, lines = rows(group)
        shown.append(Text(heading(group[0]), style="bold"))
        spared = SPARED if width < WIDE else ()
        shown.append(_table(titles, lines, spared))
        shown.append(_table(SETUP_TITLES, setup_rows(group)))
    return shown


def _table(titles: Cells, lines: Sequence[Cells], spared: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    used = [i for i, t in enumerate(titles) if t not in spared and any(line[i] for line in lines)]
    for i in used:
        table.add_column(titles[i], justify="left" if i < LEFT else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(one_line(line[i])) for i in used))
    return table


def to_markdown(results: Sequence[Result]) -> str:
    parts = []
    for group in groups(results):
        titles, lines = rows(group)
        parts += [f"**{_cell(heading(group[0]))}**", _markdown(titles, lines)]
        parts.append(_markdown(SETUP_TITLES, setup_rows(group)))
    return "\n\n".join(parts) + "\n"


def _markdown(titles: Cells, lines: Sequence[Cells]) -> str:
    used = [i for i in range(len(titles)) if any(line[i] for line in lines)]
    table = [[titles[i] for i in used], ["---" if i < LEFT else "---:" for i in used]]
    table += [[line[i] for i in used] for line in lines]
    return "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in table)


def _cell(text: str) -> str:
    return one_line(text).replace("|", "\\|")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _same_test(result: Result, results: Sequence[Result]) -> Result | None:
    return next((r for r in results if r.engine == PEER and r.test == result.test and r.median_ts), None)


# --- against an earlier run -----------------------------------------------------------------------------


def matches(result: Result, earlier: Sequence[Result]) -> Result | None:
    """The earlier result of the same test, setup and model; the last one, where there are several."""
    key = (result.setup, result.test)
    return next((other for other in reversed(earlier) if (other.setup, other.test) == key), None)


def against(results: Sequence[Result], earlier: Sequence[Result]) -> tuple[list[str], bool]:
    """Each result beside the earlier one, as a sentence, and whether any is slower beyond the noise.

    That is by more than NOISE_SIGMAS standard errors of the difference of both means (Welch), and by more than
    NOISE_SHARE of the earlier one. Raises UsageError where the earlier ones are of another machine, or nothing
    is the same.
    """
    sentences, slower = [], False
    pairs = [(result, other) for result in results if (other := matches(result, earlier))]
    if not pairs:
        raise UsageError(
            "The earlier run has none of these tests with the same engine, setup and model.",
            f"It has: {', '.join(dict.fromkeys(f'{r.setup} {r.test}' for r in earlier))}.",
        )
    for now, then in pairs:
        for here, there in ((now.gpu_info, then.gpu_info), (now.cpu_info, then.cpu_info)):
            if here and there and here != there:
                raise UsageError(f"The earlier run was on another machine: {there}, not {here}.")
        change = now.avg_ts / then.avg_ts - 1
        noise = max(
            NOISE_SIGMAS * math.hypot(_standard_error(now), _standard_error(then)), NOISE_SHARE * then.avg_ts
        )
        verdict = "within the noise"
        if abs(now.avg_ts - then.avg_ts) > noise:
            verdict = "faster" if change > 0 else "SLOWER"
            slower = slower or change < 0
        figures = f"{_number(then.avg_ts)} -> {_number(now.avg_ts)} tok/s ({change:+.1%}"
        sentences.append(
            one_line(f"{now.test} {now.setup}: {figures}, noise {noise / then.avg_ts:.1%}): {verdict}")
        )
    return sentences, slower


def _standard_error(result: Result) -> float:
    return result.stddev_ts / math.sqrt(len(result.samples_ts))
