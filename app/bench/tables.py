"""Results of a benchmark as tables: for a terminal, and as Markdown."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress

from msgspec.structs import replace
from rich.table import Table
from rich.text import Text

from app.bench.results import OURS, PEER, PLAIN, Result
from widgets.text import as_bytes, as_count, one_line

Row = tuple[str, ...]
WIDE_ONLY = ("median", "of memory", "W")
"""A terminal narrower than WIDE columns does not show these. JSON and Markdown have everything."""
WIDE = 104
WORD_COLUMNS = 2  # the first ones, aligned left


def to_tables(results: Sequence[Result], width: int = WIDE) -> list[Text | Table]:
    """Tables for a console of `rich` that is `width` cells wide. Names of models are never read as markup."""
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


def _known(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _joined(*times_ms: float | None) -> str:
    return "/".join(number(ms) for ms in times_ms if ms is not None)


def _slower(result: Result) -> str:
    """How the 99th percentile while prompts arrive compares with the median without arrivals."""
    quiet_ms, busy_ms = result.quiet_p50_ms, result.latency_p99_ms
    return f"{busy_ms / quiet_ms:.2f}x" if busy_ms and quiet_ms else ""


Columns = Mapping[str, Callable[[Result], str]]
"""The cells of a row by title."""
_TEST: Columns = {"test": lambda r: r.test, "engine": lambda r: r.engine}
_ALONE: Columns = {
    "tok/s": lambda r: f"{number(r.avg_ts)} ± {number(r.stddev_ts)}",
    "median": lambda r: number(r.median_ts),
    "first ms": lambda r: _known(r.first_token_ms, "{:.1f}"),
    "p50/p90/p99 ms": lambda r: _joined(r.latency_p50_ms, r.latency_p90_ms, r.latency_p99_ms),
    "GB/s": lambda r: _known(r.gbps, "{:.1f}"),
    "of memory": lambda r: _known(r.roofline_share, "{:.0%}"),
    "W": lambda r: _known(r.watts, "{:.0f}"),
    "tok/J": lambda r: "" if r.tokens_per_joule is None else number(r.tokens_per_joule),
}
_TOGETHER: Columns = {
    "total tok/s": lambda r: f"{number(r.median_ts)} ± {number(r.stddev_ts)}",
    "each": lambda r: "" if r.stream_ts is None else number(r.stream_ts),
    "first p50/p99 ms": lambda r: _joined(r.first_token_ms, r.first_token_p99_ms),
    "between p50/p99 ms": lambda r: _joined(r.latency_p50_ms, r.latency_p99_ms),
}
_ARRIVALS: Columns = {
    "quiet p50/p99 ms": lambda r: _joined(r.quiet_p50_ms, r.quiet_p99_ms),
    "p50/p99/longest": lambda r: _joined(r.latency_p50_ms, r.latency_p99_ms, r.latency_max_ms),
    "ratio": _slower,
    "first p50/p99": lambda r: _joined(r.first_token_ms, r.first_token_p99_ms),
    "tok/s": lambda r: number(r.median_ts),
}
_ENGINE: Columns = {
    "engine": lambda r: r.engine,
    "build": lambda r: r.build_commit,
    "load s": lambda r: "" if r.load_ms is None else f"{r.load_ms / 1e3:.2f}",
    "kernels/token": lambda r: _known(r.kernels_per_token, "{:,}"),
    "bytes/token": lambda r: as_bytes(r.bytes_per_token) if r.bytes_per_token else "",
    "resident": lambda r: "" if r.peak_resident_bytes is None else as_bytes(r.peak_resident_bytes),
    "on device": lambda r: as_bytes(r.device_bytes) if r.device_bytes else "",
}


def _tables(group: Sequence[Result], hidden: Sequence[str] = ()) -> Iterator[tuple[Row, list[Row]]]:
    """Titles and rows of the tables for one model and setup, without empty columns."""

    def ratio(result: Result, other: str = PEER) -> str:
        """The ratio of our rate to that of the other engine, as "1.23x"; "" unless both were measured."""
        rates = (r.median_ts for r in group if (r.engine, r.test) == (other, result.test) and r.median_ts)
        rate = next(rates, 0.0) if result.engine == OURS else 0.0
        return f"{result.median_ts / rate:.2f}x" if rate else ""

    def gain(result: Result) -> str:
        """The ratio of our rate to that without guesses; "" unless both were measured."""
        return ratio(result, PLAIN)

    alone = [result for result in group if not result.n_parallel]
    together = [result for result in group if result.n_parallel and not result.n_arrival]
    arrivals = [result for result in group if result.n_arrival]
    engines = {result.engine: result for result in reversed(group)}  # the first of each
    bytes_per_token = {r.engine: r.bytes_per_token for r in reversed(group) if r.bytes_per_token}
    of_engines = [
        replace(engines[engine], bytes_per_token=bytes_per_token.get(engine))
        for engine in dict.fromkeys(result.engine for result in group)
    ]
    for columns, results in (
        ({**_TEST, **_ALONE, "gain": gain, "ratio": ratio}, alone),
        ({**_TEST, **_TOGETHER, "gain": gain, "ratio": ratio}, together),
        ({**_TEST, **_ARRIVALS}, arrivals),
        (_ENGINE, of_engines),
    ):
        rows = [[cell(result) for cell in columns.values()] for result in results]
        kept = [title not in hidden and any(cells) for title, *cells in zip(columns, *rows, strict=True)]
        if results:
            yield tuple(compress(columns, kept)), [tuple(compress(row, kept)) for row in rows]


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


def _escaped(text: str) -> str:
    return one_line(text).replace("|", "\\|")
