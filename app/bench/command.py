"""`orin-chat bench`: what is to be measured, and what becomes of the results."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.bench import report
from app.bench.report import OURS, PEER, Result
from app.bench.runner import Bench, Case
from app.chat.configuration import configure
from app.chat.settings import Settings
from app.chat.speed_history import MIN_TOKENS, record_run
from app.cli import options
from app.cli.model_file import model_path
from app.cli.signals import run_until_signal
from engine.errors import UsageError
from engine.events import EngineOptions, Failed
from engine.formats.gguf import GGUF, StringArray
from engine.peers.llama_process import find_llama_server
from engine.peers.llama_server import LlamaServer
from widgets.text import one_line

REGRESSION = 1
BUSY_SHARE = 0.3  # of all cores
CONTEXT_STEP = 256  # llama.cpp rounds contexts up to it
EPILOG = """\
pp512 is a prompt of 512 tokens: tokens a second up to the first token. tg128 is the
generation of 128 tokens after the first. Both are measured at each depth: after so
many tokens of context. The tokens are random, the same for all engines.

exit codes: 0 done, 1 slower than --against beyond the noise, others as of orin-chat
"""


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Measures as `arguments` say, writes the results to standard output, and returns the exit code. Raises
    OrinError for what cannot be."""
    given = _parse(arguments)
    earlier = report.read(given.against) if given.against else []
    llama_server = find_llama_server(given.llama_server or settings.llama_server) if given.compare else ""
    out = Console(width=None if sys.stdout.isatty() else report.WIDE)
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    results: list[Result] = []
    failures: list[Failed] = []
    try:
        for preset, engine_options in _setups(given, settings):
            failures += _measure(given, preset, engine_options, llama_server, earlier, messages, results)
    finally:
        if results:
            _write(results, given, out)
    for failure in failures:
        messages.print(one_line(f"orin-chat: {failure.message} {failure.hint}"), markup=False)
    if not results:
        return failures[0].exit_code if failures else 0
    if earlier:
        sentences, slower = report.against(results, earlier)
        for sentence in sentences:
            messages.print(sentence, markup=False)
        if slower:
            return REGRESSION
    return failures[0].exit_code if failures else 0


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = options.Parser(
        prog="orin-chat bench", description="Measure engines on this machine.", epilog=EPILOG
    )
    add = parser.add_argument_group("what is measured").add_argument
    add("--model", metavar="NAME", action="append", help="a model, as in orin-chat; again for another one")
    add("--preset", metavar="NAME", action="append", help="a preset; again for another one")
    options.add_backend(add, "the device")
    add("--beam", type=options.count, metavar="N", help="width of the search for faster kernels")
    add("-p", "--prompt", type=counts, metavar="N,…", default=(32, 128, 256, 512), help="(32,128,256,512)")
    add("-n", "--gen", type=counts, metavar="N,…", default=(128,), help="tokens of generation (128)")
    add("-d", "--depth", type=counts, metavar="N,…", default=(0, 1024, 4096), help="(0,1024,4096)")
    add("-r", "--repetitions", type=options.count, metavar="N", default=5, help="after a warm-up (5)")
    add("--compare", choices=(PEER,), help="measure llama.cpp's llama-server in between")
    add("--llama-server", metavar="PATH", help="the program (the one on PATH, or as LLAMA_SERVER says)")

    add = parser.add_argument_group("what becomes of it").add_argument
    add("-o", "--output", choices=("table", "md", "json"), default="table", help="on standard output (table)")
    add("--save", type=Path, metavar="FILE", help="also write JSON, with llama-bench's names, to FILE")
    add("--against", type=Path, metavar="FILE", help="compare with an earlier run")
    given = parser.parse_args(arguments)
    if not given.repetitions:
        raise UsageError("At least one repetition is needed.", "Five or more say something about the noise.")
    if given.llama_server and not given.compare:
        raise UsageError("--llama-server is for --compare llama.cpp.")
    if not any((*given.prompt, *given.gen)):
        raise UsageError("There is nothing to measure.", "Give lengths with --prompt or --gen.")
    return given


def _setups(given: Namespace, settings: Settings) -> Iterator[tuple[str, EngineOptions]]:
    """Each model with each preset, and what the preset is called in the results."""
    from presets.loader import find

    for name in given.model or [None]:
        path = str(model_path(name, settings))
        for preset in given.preset or [""]:
            searched = "" if given.beam is None else f"beam{given.beam}"
            command_line = {"backend": given.backend, "search_width": given.beam}
            chosen = configure(path, preset=find(preset) if preset else None, command_line=command_line)
            yield f"{preset} {searched}".strip(), chosen.engine


def _measure(
    given: Namespace,
    preset: str,
    chosen: EngineOptions,
    llama_server: str,
    earlier: Sequence[Result],
    messages: Console,
    results: list[Result],
) -> list[Failed]:
    """Adds the results of one setup to `results`; returns why engines could not be measured (any further)."""
    with GGUF(chosen.model_path) as file:
        vocab_size = len(file.get("tokenizer.ggml.tokens", StringArray))
        architecture = file.get("general.architecture", str)
        trained_context = file.get(f"{architecture}.context_length", int)
    wanted = [
        Case(n_prompt, n_gen, depth)
        for depth in given.depth
        for n_prompt, n_gen in (*((p, 0) for p in given.prompt if p), *((0, g) for g in given.gen if g))
    ]
    tests = [test for test in wanted if test.context <= trained_context]
    if left_out := [test.name for test in wanted if test not in tests]:
        what = f"{Path(chosen.model_path).name} has a context of {trained_context} tokens"
        messages.print(
            one_line(f"orin-chat: {what}, so these are left out: {', '.join(left_out)}."), markup=False
        )
    if not tests:
        raise UsageError("There is nothing to measure.", "Choose shorter prompts and depths.")
    if earlier and not any(_is_known(test, chosen.model_path, earlier) for test in tests):
        raise UsageError(f"{given.against} has none of these tests of {Path(chosen.model_path).name}.")
    if busy := _busy():
        messages.print(one_line(f"orin-chat: {busy}"), markup=False)
    needed = max(test.context for test in tests)
    context = min(-(-needed // CONTEXT_STEP) * CONTEXT_STEP, trained_context)
    chosen = replace(chosen, context_length=context)
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    )
    task = progress.add_task("", total=None)

    def step(words: str, done: int) -> None:
        progress.update(task, description=one_line(words), completed=done)

    bench = Bench(
        chosen,
        tests,
        vocab_size=vocab_size,
        repetitions=given.repetitions,
        preset=preset,
        peer=(lambda options: LlamaServer(options, llama_server)) if llama_server else None,
        on_step=step,
    )
    progress.update(task, total=bench.steps)
    try:
        with progress:
            code = asyncio.run(run_until_signal(bench.run(), signal.SIGTERM))
    finally:  # keeps what was measured before an interruption, too
        found = bench.results()
        results += found
        if preset in (given.preset or ()):
            _record_speeds(found)
    if code:
        sys.exit(code)
    return [subject.failed for subject in bench.subjects if subject.failed]


def _busy() -> str:
    """A sentence, where other programs use this machine's processors."""
    used, cores = os.getloadavg()[0], os.cpu_count() or 1
    if used < BUSY_SHARE * cores:
        return ""
    return (
        f"Other programs have kept {used:.1f} of {cores} cores busy in the last minute: all figures will be low, "
        "and those of engines whose threads wait for each other by turning in circles, as llama.cpp's do, lowest."
    )


def _record_speeds(results: Sequence[Result]) -> None:
    """Keeps what a preset reached, for where presets are chosen."""
    ours = [r for r in results if r.engine == OURS and not r.n_depth]
    decode = max((r for r in ours if r.n_gen >= MIN_TOKENS), key=lambda r: r.n_gen, default=None)
    prefill = max((r for r in ours if r.n_prompt >= MIN_TOKENS), key=lambda r: r.n_prompt, default=None)
    for tg, pp in zip_longest(decode.samples_ts if decode else (), prefill.samples_ts if prefill else ()):
        record_run(Path(ours[0].model_filename), ours[0].preset, decode=tg, prefill=pp)


def _is_known(test: Case, model_path: str, earlier: Sequence[Result]) -> bool:
    return any(r.test == test.name and r.model == Path(model_path).name for r in earlier)


def _write(results: Sequence[Result], given: Namespace, out: Console) -> None:
    """Raises UsageError where the file cannot be written, after all else."""
    match given.output:
        case "json":
            sys.stdout.write(report.to_json(results))
        case "md":
            sys.stdout.write(report.to_markdown(results))
        case _:
            for part in report.to_tables(results, out.width):
                out.print(part)
    sys.stdout.flush()
    if given.save:
        try:
            given.save.write_text(report.to_json(results), "utf-8")
        except OSError as error:
            raise UsageError(f"{given.save} cannot be written: {error.strerror}.") from None


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. Raises ArgumentTypeError."""
    return tuple(options.count(part.strip()) for part in text.split(","))
