"""`orin-chat bench`: which tests it runs, and where the results go."""

import asyncio
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product, zip_longest
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.bench import regression, results, tables
from app.bench.benchmark import Benchmark, Case
from app.bench.results import OURS, PEER, Result
from app.chat.configuration import configure
from app.chat.settings import Settings
from app.chat.speed_history import record_run
from app.cli import options, values
from app.cli.model_file import model_path
from app.cli.progress import say
from app.cli.signals import run_until_signal
from engine.devices.power_modes import kept_mode, power_modes, set_mode
from engine.errors import UsageError
from engine.formats.gguf import GGUF
from engine.formats.string_array import StringArray
from engine.peers.llama_process import find_llama_server
from engine.peers.llama_server import LlamaServer
from engine.protocol.events import MIN_TOKENS, EngineOptions, Failed
from presets.loader import find_preset
from widgets.text import one_line

REGRESSION = 1
BUSY_SHARE = 0.3  # of all cores
CONTEXT_STEP = 256  # llama.cpp rounds contexts up to it
EPILOG = """\
pp512 is a prompt of 512 tokens: tokens a second up to the first token. tg128 is the
generation of 128 tokens after the first. Both are measured at each depth: after so
many tokens of context. The tokens are random, the same for all engines.

8 x tg64 @ d512 (--parallel 8): eight prompts of 512 tokens come at once; the times to
the first token and between tokens are of this. Then the same prompts come again. They
are in the KV cache now, and the total rate is of 64 tokens each, while all decode.

7 x tg256 @ d512 + pp2048 (--parallel 8 --arrivals): seven conversations decode, first
alone ("quiet"), then while prompts of 2,048 tokens arrive, one after another. The
times are from token to token, and to the first token of the prompts that arrive. The
ratio is that of p99 to the quiet p50.

exit codes: 0 done, 1 slower than --against beyond the noise, others as of orin-chat
"""


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Measures, writes the results to standard output, and returns the exit code. Raises OrinError."""
    args = _parse(arguments)
    if args.save and not (folder := args.save.absolute().parent).is_dir():
        raise UsageError(f"There is no folder {folder}.", "Make it, or save elsewhere: --save FILE.")
    earlier = results.read(args.against) if args.against else []
    llama_server = find_llama_server(args.llama_server or settings.llama_server) if args.compare else ""
    measured: list[Result] = []
    failures: list[Failed] = []
    try:
        with (
            kept_mode(args.power_modes, os.geteuid() == 0) if args.power_modes is not None else nullcontext()
        ):
            for mode in args.power_modes or [None]:
                if mode and (why := set_mode(mode.id)):
                    say(sys.stderr, f"The power mode {mode.name} is left out: {why}.")
                    continue
                for preset, engine_options in _setups(args, settings):
                    label = f"{preset} in {mode.name}".strip() if mode else preset
                    failures += _measure(args, label, engine_options, llama_server, earlier, measured)
    finally:
        if measured:
            _write(measured, args)
    for failure in failures:
        say(sys.stderr, f"{failure.message} {failure.hint}")
    if measured and earlier:
        sentences, any_slower = regression.compare(measured, earlier)
        for sentence in sentences:
            print(sentence, file=sys.stderr)
        if any_slower:
            return REGRESSION
    return failures[0].exit_code if failures else 0


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = options.Parser("bench", "Measure engines on this machine.", EPILOG)
    add = parser.add_argument_group("what is measured").add_argument
    add("--model", metavar="NAME", action="append", help="a model, as in orin-chat; again for another one")
    add("--preset", metavar="NAME", action="append", help="a preset; again for another one")
    options.add_backend(add, "the device")
    add("--as", dest="chip", metavar="CHIP", help="as on another GPU, with the kernels of sm_87, …")
    options.add_kv(add)
    options.add_speculate(add, "off")
    add("--beam", type=values.count, metavar="N", help="width of the search for faster kernels")
    add("-p", "--prompt", type=values.counts, metavar="N,…", help="tokens of prompts (32,128,256,512)")
    add("-n", "--gen", type=values.counts, metavar="N,…", help="tokens of generation (128)")
    add("-d", "--depth", type=values.counts, metavar="N,…", help="tokens of context before (0,1024,4096)")
    add(
        "--parallel",
        type=values.counts,
        metavar="N,…",
        help="so many conversations at once (with -p 512 -n 64)",
    )
    add(
        "--arrivals",
        type=values.positive,
        nargs="?",
        const=2048,
        metavar="TOKENS",
        help="with --parallel: while prompts of so many tokens arrive (2048; with -n 256)",
    )
    add("-r", "--repetitions", type=values.count, metavar="N", default=5, help="times, after a warm-up (5)")
    add(
        "--power-modes",
        action="store_const",
        const=power_modes(),
        help="on a Jetson, as root: in each power mode, with the highest clocks of each",
    )
    add("--kernels", action="store_true", help="also save the time of each kernel of a token")
    add("--compare", choices=(PEER,), help="measure llama.cpp's llama-server in between")
    add("--llama-server", metavar="PATH", help="the program (the one on PATH, or as LLAMA_SERVER says)")

    add = parser.add_argument_group("what becomes of it").add_argument
    add("-o", "--output", choices=("table", "md", "json"), default="table", help="on standard output (table)")
    add("--save", type=Path, metavar="FILE", help="also write JSON, with llama-bench's names, to FILE")
    add("--against", type=Path, metavar="FILE", help="compare with an earlier run")
    args = parser.parse_args(arguments)
    if not args.repetitions:
        raise UsageError("At least one repetition is needed.", "Five or more say something about the noise.")
    if args.llama_server and not args.compare:
        raise UsageError("--llama-server is for --compare llama.cpp.")
    if args.parallel and args.depth:
        raise UsageError("--parallel has no --depth.", "Its conversations are as long as --prompt says.")
    if args.arrivals and min(args.parallel or (1,)) < 2:
        raise UsageError(
            "--arrivals needs --parallel with numbers from 2 on.", "One of them is for the arrivals."
        )
    args.prompt = args.prompt or ((512,) if args.parallel else (32, 128, 256, 512))
    args.gen = args.gen or ((256,) if args.arrivals else (64,) if args.parallel else (128,))
    args.depth = args.depth or (0, 1024, 4096)
    if args.parallel and not all((*args.parallel, *args.prompt, *args.gen)):
        raise UsageError("With --parallel, all numbers are 1 or more.")
    if not any((*args.prompt, *args.gen)):
        raise UsageError("There is nothing to measure.", "Give lengths with --prompt or --gen.")
    return args


def _setups(args: Namespace, settings: Settings) -> Iterator[tuple[str, EngineOptions]]:
    """Each model with each preset, after the name of that setup in the results."""
    for name in args.model or [None]:
        path = str(model_path(name, settings))
        for preset in args.preset or [""]:
            searched = "" if args.beam is None else f"beam{args.beam}"
            command_line = {
                "backend": args.backend,
                "kv": args.kv,
                "speculate": args.speculate or "off",
                "search_width": args.beam,
                "chip": args.chip,
            }
            chosen = configure(
                path,
                Settings(prefix_cache_gb=0),
                preset=find_preset(preset) if preset else None,
                command_line=command_line,
            )
            guesses = args.speculate and f"speculate {args.speculate}"
            as_chip = args.chip and f"as {args.chip}"
            yield " ".join(filter(None, (preset, searched, args.kv, guesses, as_chip))), chosen.engine


def _measure(
    args: Namespace,
    preset: str,
    engine_options: EngineOptions,
    llama_server: str,
    earlier: Sequence[Result],
    measured: list[Result],
) -> list[Failed]:
    """Adds the results of one setup to `measured`, also those before an interruption. Returns the engines' failures."""
    cases, context, vocab_size = _cases(args, Path(engine_options.model_path), earlier)
    if busy := _busy():
        say(sys.stderr, busy)
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
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
    parallel = max(1, *(case.n_parallel for case in cases))
    benchmark = Benchmark(
        replace(engine_options, context_length=context, parallel=parallel),
        cases,
        vocab_size=vocab_size,
        repetitions=args.repetitions,
        preset=preset,
        with_kernels=args.kernels,
        make_peer=(lambda options: LlamaServer(options, llama_server)) if llama_server else None,
        on_step=lambda words, done: progress.update(task, description=one_line(words), completed=done),
    )
    progress.update(task, total=benchmark.steps)
    try:
        with progress:
            code = asyncio.run(run_until_signal(benchmark.run(), signal.SIGTERM))
    finally:
        measured += benchmark.results()
        if preset in (args.preset or ()):
            _record_speeds(benchmark.results())
    below_full = dict.fromkeys(r.below_full for r in benchmark.results() if r.below_full)
    for sentence in (*benchmark.left_out, *list(below_full)[-1:]):
        say(sys.stderr, sentence)
    if code:
        sys.exit(code)
    return [engine.failed for engine in benchmark.engines if engine.failed]


def _cases(args: Namespace, model: Path, earlier: Sequence[Result]) -> tuple[list[Case], int, int]:
    """The cases that the model's context holds, the context that they need, and the size of the vocabulary. Raises
    UsageError if there are none, or if the earlier run has none of them."""
    with GGUF(model) as file:
        vocab_size = len(file.get("tokenizer.ggml.tokens", StringArray))
        architecture = file.get("general.architecture", str)
        trained_context = file.get(f"{architecture}.context_length", int)
    wanted = [
        Case(n_prompt, n_gen, depth)
        for depth in args.depth
        for n_prompt, n_gen in (*((p, 0) for p in args.prompt if p), *((0, g) for g in args.gen if g))
    ]
    if args.parallel:
        lengths = product(args.gen, args.prompt, args.parallel)
        wanted = [Case(0, *each, args.arrivals or 0) for each in lengths]
    cases = [case for case in wanted if case.context <= trained_context]
    if too_long := [case.name for case in wanted if case not in cases]:
        context = f"{model.name} has a context of {trained_context:,} tokens"
        say(sys.stderr, f"{context}, so these are left out: {', '.join(too_long)}.")
    if not cases:
        raise UsageError("There is nothing to measure.", "Choose shorter prompts and depths.")
    names = {case.name for case in cases}
    if earlier and not any(result.test in names and result.model == model.name for result in earlier):
        raise UsageError(f"{args.against} has none of these tests of {model.name}.")
    needed = max(case.context for case in cases)
    return cases, min(-(-needed // CONTEXT_STEP) * CONTEXT_STEP, trained_context), vocab_size


def _busy() -> str:
    """A warning if other programs use this machine's processors; else ""."""
    used, cores = os.getloadavg()[0], os.cpu_count() or 1
    if used < BUSY_SHARE * cores:
        return ""
    return (
        f"In the last minute, other programs had work for {used:.1f} of the {cores} cores. All figures will be low, "
        "and lowest for engines whose threads spin while they wait for each other, such as llama.cpp."
    )


def _record_speeds(measured: Sequence[Result]) -> None:
    """Records what a preset reached, for the list of presets."""
    ours = [r for r in measured if r.engine == OURS and not r.n_depth]
    decode = max((r for r in ours if r.n_gen >= MIN_TOKENS), key=lambda r: r.n_gen, default=None)
    prefill = max((r for r in ours if r.n_prompt >= MIN_TOKENS), key=lambda r: r.n_prompt, default=None)
    for tg, pp in zip_longest(decode.samples_ts if decode else (), prefill.samples_ts if prefill else ()):
        record_run(Path(ours[0].model_filename), ours[0].preset, decode=tg, prefill=pp)


def _write(measured: Sequence[Result], args: Namespace) -> None:
    """Raises UsageError if the file cannot be written. Standard output has everything then."""
    match args.output:
        case "json":
            sys.stdout.write(results.to_json(measured))
        case "md":
            sys.stdout.write(tables.to_markdown(measured))
        case _:
            out = Console(width=None if sys.stdout.isatty() else tables.WIDE)
            for part in tables.to_tables(measured, out.width):
                out.print(part)
    sys.stdout.flush()
    if args.save:
        try:
            args.save.write_text(results.to_json(measured), "utf-8")
        except OSError as error:
            raise UsageError(f"{args.save} cannot be written: {error.strerror}.") from None
