"""Results of a benchmark as tables: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from app.bench.results import OURS, PEER, Result
from widgets.text import as_bytes, as_count, one_line

Row = tuple[str, ...]
TITLES: Row = (
    "test",
    "engine",
    "tok/s",
    "median",
    "first ms",
    "p50/p90/p99 ms",
    "GB/s",
    "of memory",
    "ratio",
)
WIDE_ONLY = ("median", "of memory")
"""A terminal narrower than WIDE columns does not show these. JSON and Markdown have everything."""
WIDE = 104
TITLES_TOGETHER: Row = (
    "test",
    "engine",
    "total tok/s",
    "each",
    "first p50/p99 ms",
    "between p50/p99 ms",
    "ratio",
)
TITLES_ARRIVALS: Row = (
    "test",
    "engine",
    "quiet p50/p99 ms",
    "p50/p99/longest",
    "ratio",
    "first p50/p99",
    "tok/s",
)
SETUP_TITLES: Row = ("engine", "build", "load s", "kernels/token", "bytes/token", "resident", "on device")
WORD_COLUMNS = 2  # the first ones, aligned left


def to_tables(results: Sequence[Result], width: int = WIDE) -> list[Text | Table]:
    """For a console of `rich` that is `width` cells wide. Names of models are never read as markup."""
    parts: list[Text | Table] = []
    for group in _groups(results):
        parts.append(Text(_heading(group[0]), style="bold"))
        for titles, rows in _tables(group, () if width >= WIDE else WIDE_ONLY):
            table = Table(box=None, pad_edge=False, header_style="dim")
            for i, title in enumerate(titles):
                table.add_column(title, justify="left" if i < WORD_COLUMNS else "right", no_wrap=True)
            for row in rows:
                table.add_row(*(Text(one_line(cell)) for cell in row))
            parts.append(table)
    return parts


def to_markdown(results: Sequence[Result]) -> str:
    parts = []
    for group in _groups(results):
        parts.append(f"**{_escaped(_heading(group[0]))}**")
        for titles, rows in _tables(group):
            dashes = tuple("---" if i < WORD_COLUMNS else "---:" for i in range(len(titles)))
            lines = (f"| {' | '.join(map(_escaped, cells))} |" for cells in (titles, dashes, *rows))
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _tables(group: Sequence[Result], hidden: Sequence[str] = ()) -> Iterator[tuple[Row, list[Row]]]:
    """Titles and rows of the tables for one model and setup."""
    alone = [result for result in group if not result.n_parallel]
    together = [result for result in group if result.n_parallel and not result.n_arrival]
    arrivals = [result for result in group if result.n_arrival]
    if alone:
        yield _tests(alone, hidden)
    if together:
        yield _tests_together(together)
    if arrivals:
        yield _tests_with_arrivals(arrivals)
    yield _engines(group)


def _tests(results: Sequence[Result], hidden: Sequence[str] = ()) -> tuple[Row, list[Row]]:
    """Titles and rows for the tests of one model and setup; a ratio if both engines were measured."""
    rows = []
    for result in results:
        latencies = (result.latency_p50_ms, result.latency_p90_ms, result.latency_p99_ms)
        rows.append(
            (
                result.test,
                result.engine,
                f"{number(result.avg_ts)} ± {number(result.stddev_ts)}",
                number(result.median_ts),
                "" if result.first_token_ms is None else f"{result.first_token_ms:.1f}",
                "/".join(number(ms) for ms in latencies if ms is not None),
                "" if result.gbps is None else f"{result.gbps:.1f}",
                "" if result.roofline_share is None else f"{result.roofline_share:.0%}",
                _ratio(result, results),
            )
        )
    return _without_empty_columns(TITLES, rows, hidden)


def _tests_together(results: Sequence[Result]) -> tuple[Row, list[Row]]:
    """The same for tests of several conversations at once."""
    rows = [
        (
            result.test,
            result.engine,
            f"{number(result.median_ts)} ± {number(result.stddev_ts)}",
            "" if result.stream_ts is None else number(result.stream_ts),
            _joined(result.first_token_ms, result.first_token_p99_ms),
            _joined(result.latency_p50_ms, result.latency_p99_ms),
            _ratio(result, results),
        )
        for result in results
    ]
    return _without_empty_columns(TITLES_TOGETHER, rows)


def _tests_with_arrivals(results: Sequence[Result]) -> tuple[Row, list[Row]]:
    """The same for tests while prompts arrive. The ratio is that of the 99th percentile to the median without
    arrivals."""
    rows = [
        (
            result.test,
            result.engine,
            _joined(result.quiet_p50_ms, result.quiet_p99_ms),
            _joined(result.latency_p50_ms, result.latency_p99_ms, result.latency_max_ms),
            f"{result.latency_p99_ms / result.quiet_p50_ms:.2f}x"
            if result.latency_p99_ms and result.quiet_p50_ms
            else "",
            _joined(result.first_token_ms, result.first_token_p99_ms),
            number(result.median_ts),
        )
        for result in results
    ]
    return _without_empty_columns(TITLES_ARRIVALS, rows)


def _joined(*times_ms: float | None) -> str:
    return "/".join(number(ms) for ms in times_ms if ms is not None)


def _ratio(result: Result, results: Sequence[Result]) -> str:
    """Of our rate to that of the other engine, if both were measured."""
    peer = _same_test_of_peer(result, results) if result.engine == OURS else None
    return f"{result.median_ts / peer.median_ts:.2f}x" if peer else ""


def _engines(results: Sequence[Result]) -> tuple[Row, list[Row]]:
    """Titles, and a row for each engine: what holds for all of its tests."""
    rows = []
    for engine in dict.fromkeys(result.engine for result in results):
        of_engine = [result for result in results if result.engine == engine]
        first, bytes_per_token = (
            of_engine[0],
            next((r.bytes_per_token for r in of_engine if r.bytes_per_token), None),
        )
        rows.append(
            (
                first.engine,
                first.build_commit,
                "" if first.load_ms is None else f"{first.load_ms / 1e3:.2f}",
                "" if first.kernels_per_token is None else f"{first.kernels_per_token:,}",
                as_bytes(bytes_per_token) if bytes_per_token else "",
                "" if first.peak_resident_bytes is None else as_bytes(first.peak_resident_bytes),
                as_bytes(first.device_bytes) if first.device_bytes else "",
            )
        )
    return _without_empty_columns(SETUP_TITLES, rows)


def _without_empty_columns(
    titles: Row, rows: Sequence[Row], hidden: Sequence[str] = ()
) -> tuple[Row, list[Row]]:
    shown = [i for i, title in enumerate(titles) if title not in hidden and any(row[i] for row in rows)]
    return tuple(titles[i] for i in shown), [tuple(row[i] for i in shown) for row in rows]


def _heading(result: Result) -> str:
    """The model, the preset and the machine on one line."""
    device = result.gpu_info or result.cpu_info
    size = f"{as_bytes(result.model_size)}, {as_count(result.model_n_params)} parameters"
    copy = f" · memory {result.copy_gbps:,.0f} GB/s" if result.copy_gbps else ""
    preset = f"preset {result.preset} · " if result.preset else ""
    return one_line(
        f"{result.model} · {result.model_type} · {size} · {preset}{result.backends} · {device}{copy}"
    )


def _groups(results: Iterable[Result]) -> list[list[Result]]:
    """Results by model, preset and backend, in the order in which these come first."""
    by_setup: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        by_setup.setdefault((result.model_filename, result.preset, result.backends), []).append(result)
    return list(by_setup.values())


def _same_test_of_peer(result: Result, results: Sequence[Result]) -> Result | None:
    return next((r for r in results if r.engine == PEER and r.test == result.test and r.median_ts), None)


def _escaped(text: str) -> str:
    return one_line(text).replace("|", "\\|")
