"""The one file of `orin-chat board`, in Markdown, to be attached to an issue.

It holds no names of people, machines or folders, no paths of theirs, no prompts, and of a user's own model only what it
is. It is shown before it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from app.bench.board_plan import Board
from app.bench.board_run import BoardRun
from app.bench.results import OURS, PEER, Result, to_json
from app.bench.tables import number
from app.cli import doctor
from widgets.text import clean, one_line

# Of the doctor's findings: they are about the user's folders.
_PRIVATE_TOPICS = {"llama.cpp", "models", "cache"}
_PUBLIC_FOLDERS = "/dev/", "/etc/", "/proc/", "/sys/", "/usr/"
_PATH = re.compile(r"(?<![\w/:.])[~.]?(?:/[\w.+@~-]+){2,}/?")
_SIGNS = {"good": "✓", "note": "·", "fair": "!", "bad": "✗"}
MAX_KERNELS = 40


def board_text(
    report: doctor.Report, board: Board, runs: Sequence[BoardRun], kernel_log: Sequence[str]
) -> str:
    """The file's text: what `runs` of a plan have measured, with the doctor's findings and the lines of `kernel_log`
    that are about the GPU. Names and folders of the user are taken out."""
    parts = [f"# orin-chat board\n\norin-chat {report.orin_chat}, {report.at}", *_findings(report)]
    done = [run for run in runs if run.results()]
    parts += ["## Speeds", *(part for run in done for part in _speeds(board, run))]
    parts += ["## Power and clocks", *_power(done)]
    parts += ["## Beside published figures", *_published(board, done)]
    parts += ["## Kernels", *(part for run in done for part in _kernels(run))]
    missing = [f"{name_of(run)}, {run.setup.title}: {run.failure or run.not_started}" for run in runs]
    if lacking := [f"- {one_line(text)}" for text in missing if not text.endswith(": ")]:
        parts += ["## Not measured", "\n".join(lacking)]
    if kernel_log:
        parts += ["## The GPU drivers' part of the kernel's log", _fenced("\n".join(kernel_log))]
    parts += ["## The same as data", _fenced(to_json([*_data(done)]), "json")]
    text = clean("\n\n".join(parts))
    for name in {Path(run.model.name).name for run in runs if _is_own(run)}:
        text = text.replace(name, "MODEL")
    return without_paths(doctor.without_names(text)) + "\n"


def _is_own(run: BoardRun) -> bool:
    """Whether a model is a file that the user named."""
    return Path(run.model.name).suffix == ".gguf"


def name_of(run: BoardRun) -> str:
    """A model of the list has a name. Of another one, what its file says of its kind."""
    if not _is_own(run):
        return run.model.title
    results = run.results()
    return f"a model of the user's own ({results[0].model_type})" if results else "a model of the user's own"


def without_paths(text: str) -> str:
    """Paths that are not the system's keep only their last part."""

    def shown(found: re.Match[str]) -> str:
        path = found[0]
        return path if path.startswith(_PUBLIC_FOLDERS) else path.rstrip("/").rpartition("/")[2]

    return _PATH.sub(shown, text)


def _findings(report: doctor.Report) -> Iterator[str]:
    for section in report.sections:
        findings = [f for f in section.findings if f.topic not in _PRIVATE_TOPICS]
        lines = [f"- {_SIGNS[f.state]} {one_line(f.topic)}: {one_line(f.text)}" for f in findings]
        if lines:
            yield f"## {section.title}\n\n" + "\n".join(lines)


def _speeds(board: Board, run: BoardRun) -> Iterator[str]:
    results = run.results()
    peers = {result.test: result for result in results if result.engine == PEER}
    earlier = board.earlier(run.model.name, run.setup.name)
    rows = []
    for result in (r for r in results if r.engine == OURS):
        peer = peers.get(result.test)
        before = earlier.get(result.test)
        cells = (
            result.test,
            number(result.median_ts),
            number(before) if before else "",
            number(peer.median_ts) if peer else "",
            f"{result.median_ts / peer.median_ts:.2f}x" if peer and peer.median_ts else "",
            number(result.first_token_ms) if result.first_token_ms else "",
            number(result.gbps) if result.gbps else "",
            f"{result.roofline_share:.0%}" if result.roofline_share else "",
            number(result.watts) if result.watts else "",
            number(result.tokens_per_joule) if result.tokens_per_joule else "",
        )
        rows.append(cells)
    titles = "test", "tok/s", "before", PEER, "ratio", "first ms", "GB/s", "of a copy", "W", "tok/J"
    if rows:
        first = next(r for r in results if r.engine == OURS)
        about = f"{first.backends} on {first.gpu_info or first.cpu_info}, {first.model_type}"
        yield f"### {one_line(name_of(run))}, {run.setup.title}\n\n{one_line(about)}\n\n{_table(titles, rows)}"


def _power(runs: Sequence[BoardRun]) -> Iterator[str]:
    results = [result for run in runs for result in run.results()]
    modes = {
        _state(result): None for result in results if result.watts or result.power_mode or result.gpu_mhz
    }
    if not modes:
        yield "Neither power nor clocks could be read."
        return
    yield "\n".join(f"- {mode}" for mode in modes)
    if warnings := {result.below_full: None for result in results if result.below_full}:
        yield "\n".join(f"- ! {one_line(warning)}" for warning in warnings)


def _state(result: Result) -> str:
    """Rounded, so that runs in the same state are one line."""
    clocks = [
        f"{name} {now / 1000:.1f}" + (f" of {most / 1000:.1f} GHz" if most else " GHz")
        for name, now, most in (
            ("GPU", result.gpu_mhz, result.gpu_max_mhz),
            ("memory", result.memory_mhz, result.memory_max_mhz),
        )
        if now
    ]
    mode = [f"power mode {result.power_mode}"] * bool(result.power_mode)
    jetson_clocks = [f"jetson_clocks {result.jetson_clocks}"] * bool(result.jetson_clocks)
    return ", ".join([*mode, *jetson_clocks, *clocks]) or "clocks are not known"


def _published(board: Board, runs: Sequence[BoardRun]) -> Iterator[str]:
    """A sentence for each published figure of a model that was measured."""
    ours = [
        (run, result)
        for run in runs
        for result in run.results()
        if result.engine == OURS and result.n_gen and not result.n_depth and not result.n_parallel
    ]
    lines = []
    for figure in board.published:
        fitting = [(result.median_ts, run, result) for run, result in ours if figure.fits(result)]
        if fitting:
            rate, run, result = max(fitting, key=lambda each: each[0])
            lines.append(
                f"- {figure.title}: {figure.tokens_per_s:g} tokens a second are published for an AGX Orin "
                f"({figure.engine}); here {number(rate)} ({result.model_type}, {run.setup.title}), "
                f"{rate / figure.tokens_per_s:.2f}x."
            )
    yield "\n".join(lines) or "No model that was measured has one."


def _kernels(run: BoardRun) -> Iterator[str]:
    for result in run.results():
        if not result.kernels:
            continue
        total = sum(kernel.us for kernel in result.kernels)
        rows = [
            (
                kernel.name,
                kernel.role,
                str(kernel.calls),
                number(kernel.us),
                f"{kernel.us / total:.1%}",
                number(kernel.gbps) if kernel.gbps else "",
            )
            for kernel in result.kernels[:MAX_KERNELS]
        ]
        titles = "kernel", "part", "calls", "µs", "share", "GB/s"
        yield (
            f"### {one_line(name_of(run))}, {run.setup.title}: a token of {number(total)} µs\n\n"
            f"{_table(titles, rows)}"
        )


def _data(runs: Sequence[BoardRun]) -> Iterator[Result]:
    for run in runs:
        for result in run.results():
            yield replace(result, model_filename=name_of(run), preset=run.setup.name, kernels=())


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, without columns that are empty."""
    kept = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    dashes = ["---" if i == 0 else "---:" for i in range(len(titles))]
    lines = [[row[i].replace("|", "\\|") for i in kept] for row in (titles, dashes, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.replace('```', '')}\n```"
