"""`orin-chat board`: measures a Jetson. It runs the doctor and then models on each backend, prints tables beside the
earlier figures, and ends with a file for an issue. A run that has results is not repeated."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.bench.board_file import board_text
from app.bench.board_plan import Board, BoardModel, Lengths, load
from app.bench.board_run import BoardRun, board_runs, hung_backends_last
from app.bench.results import OURS, PEER, Result
from app.chat.model_list import on_this_machine
from app.chat.settings import Settings
from app.cli import doctor, options, values
from app.cli.model_file import model_path
from engine.doctor import Section
from engine.doctor.backend_checks import stress_check
from engine.doctor.host import kernel_log
from engine.errors import BackendError, OrinError, UsageError
from engine.peers.llama_process import find_llama_server
from widgets.text import as_duration, one_line

NOTHING_MEASURED = 1
REPORT = "orin-board.md"
TIMEOUT_S, SEARCH_TIMEOUT_S = 600.0, 1500.0
"""A run that takes longer than this hangs."""
EPILOG = """\
It takes half an hour. The same command goes on with what is left then; with --retry, it also
repeats what failed. It downloads three models first (4 GB); larger ones
are measured if they are here. For figures like the earlier ones:

    sudo nvpmodel -m 0 && sudo jetson_clocks
    orin-chat board --llama-server ~/llama.cpp/build/bin/llama-server

In the end it shows one file, orin-board/orin-board.md, and asks whether to write it:
attach that to an issue. It contains nothing private.

exit codes: 0 something was measured, 1 nothing was
"""


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Returns the exit code. Raises UsageError."""
    args = _parse(arguments)
    present = [entry.name for entry in on_this_machine() if entry.path] if not args.model else []
    board = load(args.model or (), args.setup or (), present)
    lengths = Lengths(args.prompt, args.gen, args.repetitions)
    folder: Path = args.folder
    out = Console(width=None, highlight=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}.", "Name another: --folder."
        ) from None
    report = _with_stress_check(doctor.examine_and_show(settings, out), board, out)
    runs = board_runs(board, folder)
    if args.retry:
        for run in runs:
            run.delete_failure()
    try:
        _measure(runs, board, lengths, report, settings, args, out)
    except KeyboardInterrupt:
        out.print("\nInterrupted: the same command goes on from here.")
    tables = [_table(board, model, runs, lengths) for model in board.models]
    for table in tables:
        out.print()
        out.print(table)
    for sentence in _missing(runs):
        out.print(sentence, markup=False)
    _write(board_text(report, board, runs, kernel_log()), folder / REPORT, out)
    return 0 if any(run.results() for run in runs) else NOTHING_MEASURED


def _parse(arguments: Sequence[str]) -> Any:
    parser = options.Parser(
        "board", "Measure a Jetson as it was measured before, and write a report.", EPILOG
    )
    add, usual = parser.add_argument, Lengths()
    add("--minutes", type=values.positive, default=30, metavar="N", help="no run starts later than that (30)")
    add("--folder", type=Path, default=Path("orin-board"), metavar="DIR", help="for all results (orin-board)")
    add("--retry", action="store_true", help="do again what failed")
    add("--llama-server", metavar="PATH", help="llama.cpp's (the one on PATH, or as LLAMA_SERVER says)")
    add("--as", dest="chip", metavar="CHIP", help="as on another GPU, with the kernels of sm_87, …")
    add("--model", action="append", metavar="NAME", help="another model than the three; again for one more")
    add("--setup", action="append", metavar="NAME", help="these alone: nv-fused, cuda-jitbeam4, cpu …")
    for short, long, default, help in (
        ("-p", "--prompt", usual.prompts, "tokens of prompts (32,128,256,512)"),
        ("-n", "--gen", usual.gen, "tokens of generation (128)"),
    ):
        add(short, long, type=values.counts, metavar="N,…", default=default, help=help)
    repetitions = usual.repetitions
    add("-r", "--repetitions", type=values.positive, metavar="N", default=repetitions, help="times (2)")
    return parser.parse_args(arguments)


def _with_stress_check(report: doctor.Report, board: Board, out: Console) -> doctor.Report:
    """The report, with a stress check of the board's backends that work."""
    findings = []
    for backend in (trial.backend for trial in report.trials if trial.ok):
        if any(setup.backend == backend for setup in board.setups):
            with out.status(f"{backend}: 10,000 kernels, large buffers, an engine that is killed"):
                findings += stress_check(backend)
    if not findings:
        return report
    section = Section(title="Endurance", findings=findings)
    doctor.show(section, out)
    return msgspec.structs.replace(report, sections=[*report.sections, section])


# --- measuring -------------------------------------------------------------------------------------------


def _measure(
    runs: Sequence[BoardRun],
    board: Board,
    lengths: Lengths,
    report: doctor.Report,
    settings: Settings,
    args: Any,
    out: Console,
) -> None:
    """Measures what has no results yet. `BoardRun.not_started` says why a run was left out."""
    paths = _model_paths(board, settings, runs, out)
    llama_server = _llama_server(args.llama_server or settings.llama_server or None, out)
    usable = {trial.backend for trial in report.trials if trial.ok}
    deadline = time.monotonic() + 60 * args.minutes
    compared = {  # llama.cpp is measured once for each model, with the first setup
        model.name: next(
            (run.setup.name for run in runs if run.model == model and run.setup.backend in usable), ""
        )
        for model in board.models
    }
    waiting = [run for run in runs if not run.is_done and not run.not_started]
    total = len(waiting)
    out.print()
    for number, run in enumerate(hung_backends_last(waiting), 1):
        if run.setup.backend not in usable:
            run.not_started = f"{run.setup.backend} does not work here (see above)"
        elif (left_s := deadline - time.monotonic()) <= 0:
            run.not_started = f"the {args.minutes} minutes were over"
        else:
            timeout_s = SEARCH_TIMEOUT_S if run.setup.jitbeam else TIMEOUT_S
            peer = llama_server if compared[run.model.name] == run.setup.name else ""
            began, title = time.monotonic(), one_line(f"{number}/{total} {run.title}")
            with out.status(f"{title}, {as_duration(left_s)} left"):
                run.measure(paths[run.model.name], lengths, peer, timeout_s, args.chip or "")
            duration = as_duration(time.monotonic() - began)
            out.print(f"{title}: {one_line(run.failure) or 'done'} ({duration})", markup=False)


def _model_paths(board: Board, settings: Settings, runs: Sequence[BoardRun], out: Console) -> dict[str, Path]:
    """The models' files by name, downloaded if they are not on this machine. The runs of a model without a file are
    left out."""
    paths = {}
    for model in board.models:
        try:
            paths[model.name] = model_path(model.name, settings)
        except OrinError as error:
            out.print(one_line(f"{model.title}: {error}"), markup=False)
            for run in runs:
                if run.model == model:
                    run.not_started = one_line(error.message)
    return paths


def _llama_server(path: str | None, out: Console) -> str:
    """The path of the program; "" if there is none."""
    try:
        return find_llama_server(path)
    except BackendError as error:
        out.print(f"\nllama.cpp is not measured: {error}", markup=False)
        return ""


# --- results ---------------------------------------------------------------------------------------------


def _table(board: Board, model: BoardModel, runs: Sequence[BoardRun], lengths: Lengths) -> Table:
    """Tokens/s by setup and test, beside the earlier figures."""
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left", title_style="bold")
    before = " (before, at low clocks)" if model.name in board.figures else ""
    table.title = Text(f"{model.title}: tokens a second{before}", no_wrap=True)
    table.add_column("setup")
    for test in lengths.names:
        table.add_column(test, justify="right")
    runs = [run for run in runs if run.model == model]
    for run in runs:
        earlier = board.earlier(model.name, run.setup.name)
        table.add_row(run.setup.title, *_cells(run.results(), OURS, earlier, lengths))
    of_peer = [result for run in runs for result in run.results() if result.engine == PEER]
    earlier = board.earlier(model.name, PEER)
    if of_peer or earlier:
        table.add_row(PEER, *_cells(of_peer, PEER, earlier, lengths))
    return table


def _cells(
    results: Sequence[Result], engine: str, earlier: Mapping[str, float], lengths: Lengths
) -> list[str]:
    rates = {result.test: result.median_ts for result in results if result.engine == engine}
    return [
        (_number(rates[test]) if test in rates else "–")
        + (f" ({_number(earlier[test])})" if test in earlier else "")
        for test in lengths.names
    ]


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _missing(runs: Sequence[BoardRun]) -> list[str]:
    """What the tables lack, and why."""
    reasons = [(run.title, run.failure or run.not_started) for run in runs]
    return [one_line(f"{title}: {reason}") for title, reason in reasons if reason]


def _write(text: str, path: Path, out: Console) -> None:
    """Shows the file and writes it, unless the user says no. Raises UsageError."""
    out.print(f"\n{'─' * 8} {path.name} {'─' * 8}\n{text}{'─' * 30}", markup=False, soft_wrap=True)
    if sys.stdin.isatty() and sys.stdout.isatty():
        answer = input(f"That is all that {path} would hold. Write it? [Y/n] ")
        if answer.strip().lower().startswith("n"):
            out.print("It is not written. The same command shows it again.")
            return
    doctor.write_text(text, path)
    out.print(f"Attach {path} to an issue: it holds what is shown above.", markup=False)
