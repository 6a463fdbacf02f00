"""`orin-chat board`: everything that one run on a Jetson settles. The doctor, then tables of models by backends and
searches beside the figures measured before, and a report to attach to an issue. What was done is not done again."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.bench import command
from app.bench.board_plan import Board, BoardModel, Lengths, Run, figures, in_turn, load, runs
from app.bench.report import OURS, PEER, Result
from app.chat.settings import Settings
from app.cli import doctor, options
from app.cli.model_file import model_path
from engine.doctor import Section
from engine.doctor.backend_checks import stress_check
from engine.doctor.host import kernel_log
from engine.errors import BackendError, OrinError, UsageError
from engine.peers.llama_process import find_llama_server
from widgets.text import as_duration, one_line

NOTHING_MEASURED = 1
LONGEST_S, LONGEST_SEARCH_S = 600.0, 1500.0  # of a run, before it counts as hung
WIDE = 110
EPILOG = """\
It takes half an hour; what is left then is done when the same command is run again, and what
failed with --retry. Models are downloaded first (4 GB). For figures like those before:

    sudo nvpmodel -m 0 && sudo jetson_clocks
    orin-chat board --llama-server ~/llama.cpp/build/bin/llama-server

Then attach orin-board/report.json to an issue: it holds nothing private.

exit codes: 0 something was measured, 1 nothing was
"""


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Returns the exit code. Raises UsageError."""
    given = _parse(arguments)
    board = load(given.model or (), given.setup or ())
    tests = Lengths(given.prompt, given.gen, given.repetitions)
    folder: Path = given.folder
    out = Console(width=None, highlight=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}.", "Name another: --folder."
        ) from None
    report = _endurance(doctor.shown(settings, out), board, out)
    planned = runs(board, folder)
    if given.retry:
        for one in planned:
            one.forget_failure()
    try:
        _measure(planned, board, tests, report, settings, given, out)
    except KeyboardInterrupt:
        out.print("\nInterrupted: the same command goes on from here.")
    tables = [_table(board, model, planned, tests) for model in board.models]
    for table in tables:
        out.print()
        out.print(table)
    for sentence in _left(planned):
        out.print(sentence, markup=False)
    _write(report, board, planned, tables, folder)
    out.print(f"\nThe report is in {folder / 'report.json'} (and report.txt).", markup=False)
    return 0 if any(one.results() for one in planned) else NOTHING_MEASURED


def _parse(arguments: Sequence[str]) -> Any:
    parser = options.Parser(
        prog="orin-chat board",
        description="Measure a Jetson as it was measured before, and write a report.",
        epilog=EPILOG,
    )
    add, usual = parser.add_argument, Lengths()
    counts = command.counts
    add(
        "--minutes", type=options.positive, default=30, metavar="N", help="no run starts later than that (30)"
    )
    add("--folder", type=Path, default=Path("orin-board"), metavar="DIR", help="for all results (orin-board)")
    add("--retry", action="store_true", help="do again what failed")
    add("--llama-server", metavar="PATH", help="llama.cpp's (the one on PATH, or as LLAMA_SERVER says)")
    add("--model", action="append", metavar="NAME", help="another model than the three; again for one more")
    add("--setup", action="append", metavar="NAME", help="these alone: nv-fused, cuda-jitbeam4, cpu …")
    add("-p", "--prompt", type=counts, metavar="N,…", default=usual.prompts, help="(32,128,256,512)")
    add("-n", "--gen", type=counts, metavar="N,…", default=usual.gen, help="(128)")
    add("-r", "--repetitions", type=options.positive, metavar="N", default=usual.repetitions, help="(2)")
    return parser.parse_args(arguments)


def _endurance(report: doctor.Report, board: Board, out: Console) -> doctor.Report:
    """The report, with what came of working the backends of the board hard."""
    usable = [trial.backend for trial in report.trials if trial.ok]
    wanted = [name for name in usable if any(setup.backend == name for setup in board.setups)]
    findings = []
    for backend in wanted:
        with out.status(f"{backend}: 10,000 kernels, large buffers, an engine that is killed"):
            findings += stress_check(backend)
    if not findings:
        return report
    section = Section(title="Endurance", findings=findings)
    doctor.show(section, out)
    return msgspec.structs.replace(report, sections=[*report.sections, section])


# --- measuring -------------------------------------------------------------------------------------------


def _measure(
    planned: list[Run],
    board: Board,
    tests: Lengths,
    report: doctor.Report,
    settings: Settings,
    given: Any,
    out: Console,
) -> None:
    """Does the runs that are not done. Why one was not started is in it."""
    paths = _models(board, settings, planned, out)
    llama_server = _llama_server(given.llama_server or settings.llama_server or None, out)
    usable = {trial.backend for trial in report.trials if trial.ok}
    ends = time.monotonic() + 60 * given.minutes
    compared = {  # llama.cpp is measured once for each model, beside the first setup that is
        model.name: next(
            (r.setup.name for r in planned if r.model == model and r.setup.backend in usable), ""
        )
        for model in board.models
    }
    waiting = [one for one in planned if not one.is_done and not one.left_out]
    total = len(waiting)
    out.print()
    for number, one in enumerate(in_turn(waiting), 1):
        if one.setup.backend not in usable:
            one.left_out = f"{one.setup.backend} does not work here (see above)"
        elif (left_s := ends - time.monotonic()) <= 0:
            one.left_out = f"the {given.minutes} minutes were over"
        else:
            longest_s = LONGEST_SEARCH_S if one.setup.jitbeam else LONGEST_S
            beside = llama_server if compared[one.model.name] == one.setup.name else ""
            began, words = time.monotonic(), one_line(f"{number}/{total} {one.title}")
            with out.status(f"{words}, {as_duration(left_s)} left"):
                one.do(paths[one.model.name], tests, beside, longest_s)
            took = as_duration(time.monotonic() - began)
            out.print(f"{words}: {one_line(one.failed) or 'done'} ({took})", markup=False)


def _models(board: Board, settings: Settings, planned: list[Run], out: Console) -> dict[str, Path]:
    """The models' files, downloaded where they are not here; without one, its runs are left out."""
    paths = {}
    for model in board.models:
        try:
            paths[model.name] = model_path(model.name, settings)
        except OrinError as error:
            out.print(one_line(f"{model.title}: {error}"), markup=False)
            for one in planned:
                if one.model == model:
                    one.left_out = one_line(error.message)
    return paths


def _llama_server(given: str | None, out: Console) -> str:
    try:
        return find_llama_server(given)
    except BackendError as error:
        out.print(f"\nllama.cpp is not measured: {error}", markup=False)
        return ""


# --- what came of it -------------------------------------------------------------------------------------


def _table(board: Board, model: BoardModel, planned: Sequence[Run], tests: Lengths) -> Table:
    """Tokens a second, and what they were before where that is known."""
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left", title_style="bold")
    known = " (before)" if model.name in board.figures else ""
    table.title = Text(f"{model.title}: tokens a second{known}", no_wrap=True)
    table.add_column("setup")
    for test in tests.names:
        table.add_column(test, justify="right")
    of_model = [one for one in planned if one.model == model]
    for one in of_model:
        table.add_row(one.setup.title, *_cells(one.results(), OURS, figures(board, one), tests))
    peers = [result for one in of_model for result in one.results() if result.engine == PEER]
    before = board.figures.get(model.name, {}).get(PEER, {})
    if peers or before:
        table.add_row(PEER, *_cells(peers, PEER, before, tests))
    return table


def _cells(results: Sequence[Result], engine: str, before: Any, tests: Lengths) -> list[str]:
    now = {result.test: result.median_ts for result in results if result.engine == engine}
    return [
        " ".join(
            [
                _number(now[test]) if test in now else "–",
                *([f"({_number(before[test])})"] if test in before else []),
            ]
        )
        for test in tests.names
    ]


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _left(planned: Sequence[Run]) -> list[str]:
    """What is missing in the tables, and why."""
    missing = [(one.title, one.failed or one.left_out) for one in planned]
    return [one_line(f"{title}: {why}") for title, why in missing if why]


def _write(
    report: doctor.Report, board: Board, planned: Sequence[Run], tables: Sequence[Table], folder: Path
) -> None:
    found = [
        {
            "model": one.model.title,
            "setup": one.setup.name,
            "failed": one.failed or one.left_out,
            "before": dict(figures(board, one)),
            "results": one.results(),
        }
        for one in planned
    ]
    log = kernel_log()
    doctor.write(
        msgspec.structs.replace(report, board={"runs": found, "kernel_log": log}), folder / "report.json"
    )
    text = io.StringIO()
    console = Console(file=text, width=WIDE)
    for table in tables:
        console.print(table)
        console.print()
    rest = [*_left(planned), "", *log]
    path = folder / "report.txt"
    doctor.write_text(f"{doctor.as_plain_text(report)}\n{text.getvalue()}" + "\n".join(rest) + "\n", path)
