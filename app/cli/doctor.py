"""`orin-chat doctor`: what this machine has for the engine, what it lacks, and what to do about that."""

import asyncio
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import platformdirs
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from app.chat.settings import Settings
from app.cli import options
from engine import backends
from engine.catalog.cache import hub_folder
from engine.devices.nvidia import gpus
from engine.doctor import Finding, Section, State, backend_checks, fair, good, host, jetson, note, nvidia
from engine.doctor.backend_checks import as_finding
from engine.doctor.checks import CheckResult
from engine.errors import BackendError, UsageError
from engine.peers.llama_process import find_llama_server
from engine.system.invocation import call, own_version
from engine.system.whole_file import free_bytes
from widgets.text import as_bytes, clean, one_line

NOTHING_WORKS = 1
_SIGNS: dict[State, tuple[str, str]] = {
    "good": ("✓", "green"),
    "note": ("·", "dim"),
    "fair": ("!", "yellow"),
    "bad": ("✗", "red"),
}
_IN_ASCII = str.maketrans("✓·✗→…µ", "+-x>.u")  # for terminals without Unicode
# The environment variables that a report names. None of them holds a secret.
_VARIABLES = (
    "DEV", "CC", "PARALLEL", "BEAM", "JITBEAM", "MV_THREADS_PER_ROW", "MV_BLOCKSIZE", "MV_ROWS_PER_THREAD", "CUDA_PATH",
    "CUDA_HOME", "CUDA_INCLUDE_PATH", "NVRTC_PATH", "LD_LIBRARY_PATH", "LLAMA_SERVER", "TERM", "COLORTERM", "LANG",
)  # fmt: skip
_MANY_FILES = 100_000

Check = Callable[[str], CheckResult]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor found. It holds no prompts, no tokens, and no names of people, home folders or machines."""

    orin_chat: str
    at: str
    sections: list[Section]
    trials: list[CheckResult]
    variables: dict[str, str]
    board: Any = None

    @property
    def works(self) -> bool:
        return any(trial.ok for trial in self.trials)


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Prints the findings. Returns 0 if any backend works. Raises UsageError if the report cannot be written."""
    args = _parse(arguments)
    out = Console(highlight=False, soft_wrap=False)
    report = examine_and_show(settings, out)
    out.print()
    if report.works:
        names = " and ".join(trial.backend for trial in report.trials if trial.ok)
        out.print(f"A chat is possible, on {names}.", style="bold")
    else:
        out.print("No backend works: a chat is not possible until one does.", style="bold red")
    if args.start is not None and report.works:
        out.print()
        _show_start(args.start, settings, out)
    if args.report:
        write(report, args.report)
        out.print(
            f"The report is in {args.report}: look through it, then attach it to your issue.", markup=False
        )
    return 0 if report.works else NOTHING_WORKS


def _show_start(model: str, settings: Settings, out: Console) -> None:
    """Raises ModelFileError, UsageError."""
    from app.chat.configuration import configure
    from app.cli.model_file import model_path
    from app.cli.start_lines import show_start
    from engine.protocol.client import LocalEngine

    path = model_path(model or None, settings)
    engine = LocalEngine(configure(str(path), settings).engine)
    out.print(f"The start of an engine with {one_line(path.name)}", style="bold", markup=False)
    asyncio.run(show_start(engine, lambda line: out.print(line, markup=False)))


def _parse(arguments: Sequence[str]) -> Any:
    description = "What this machine has for the engine, and what to do about what it lacks."
    parser = options.Parser("doctor", description, "exit codes: 0 a chat is possible, 1 no backend works")
    help = "also write it to FILE (JSON if it ends so), to be attached to an issue; it holds nothing private"
    start_help = "also start an engine with MODEL (default: the usual one), and show where the time goes"
    parser.add_argument("--start", nargs="?", const="", metavar="MODEL", help=start_help)
    parser.add_argument("--report", type=Path, metavar="FILE", help=help)
    return parser.parse_args(arguments)


def examine_and_show(settings: Settings, out: Console) -> Report:
    """Examines this machine and prints each section when it is complete."""
    status = out.status("")

    def show_part(part: Section | str) -> None:
        if isinstance(part, str):
            status.update(f"trying {part}")
            status.start()
        else:
            status.stop()
            show(part, out)

    try:
        return examine(settings, on_part=show_part)
    finally:
        status.stop()


def examine(
    settings: Settings,
    root: Path = Path("/"),
    *,
    check: Check = backend_checks.run_check,
    on_part: Callable[[Section | str], None] = lambda _: None,
) -> Report:
    """Examines the machine whose files lie under `root`. `on_part` gets each section, and the name of each backend
    before it is tried."""
    on_a_jetson = jetson.is_found(root)
    sections: list[Section] = []

    def add(title: str, findings: list[Finding]) -> None:
        if findings:
            sections.append(Section(title=title, findings=findings))
            on_part(sections[-1])

    add("Machine", host.examine(root))
    drivers = on_a_jetson and root == Path("/") and not backends.unusable_because("NV")
    add("Jetson", [*jetson.examine(root), *([backend_checks.driver_check()] if drivers else [])])
    add("NVIDIA", nvidia.examine(root, jetson=on_a_jetson))
    add("Environment", list(_environment(settings)))
    names, tried, findings = gpus(root), [], []
    for backend in backends.BACKENDS:
        if (reason := backend_checks.why_skipped(backend, names, jetson=on_a_jetson)) is not None:
            findings.append(reason)
            continue
        on_part(backend)
        tried.append(check(backend))
        findings.append(as_finding(tried[-1]))
    add("Backends", findings)
    return Report(
        orin_chat=own_version(),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        sections=sections,
        trials=tried,
        variables={name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    )


# --- the environment of the engine -----------------------------------------------------------------------


def _environment(settings: Settings) -> Iterator[Finding]:
    try:
        yield good("llama.cpp", find_llama_server(settings.llama_server or None))
    except BackendError as error:
        yield note("llama.cpp", "no llama-server: nothing to compare with", error.hint)
    cache = platformdirs.user_cache_path("orin-chat", appauthor=False)
    for topic, folder in (("models", hub_folder()), ("cache", cache)):
        yield note(topic, f"{as_bytes(_size(folder))} in {folder}")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    if (free := free_bytes(existing)) is None:
        yield note("disk", "does not say how much is free where the caches are")
    else:
        space = f"{as_bytes(free)} free where the caches are"
        yield (
            good("disk", space)
            if free > 4 << 30
            else fair("disk", space, f"Make room: {call('models')}, {call('rm')}")
        )
    yield _terminal()


def _size(folder: Path) -> int:
    """The size of its files in bytes, without links: the hub's cache has each file under two names."""
    total = 0
    for i, path in enumerate(folder.rglob("*")):
        if i > _MANY_FILES:
            break
        if path.is_file() and not path.is_symlink():
            total += path.stat().st_size
    return total


def _terminal() -> Finding:
    if not sys.stdout.isatty():
        return note("terminal", "none: the output is not a terminal")
    size, colors = shutil.get_terminal_size(), Console().color_system or "no colours"
    encoding = (sys.stdout.encoding or "ascii").upper()
    text = f"{size.columns}x{size.lines}, {colors}, {encoding}"
    if "UTF" not in encoding:
        return fair("terminal", text, f"Set a UTF-8 locale, as LANG=C.UTF-8, or: {call('--plain')}")
    return good("terminal", text)


# --- output ----------------------------------------------------------------------------------------------


def show(section: Section, out: Console) -> None:
    """Prints a section: as a table, or for a pipe or a file as plain lines."""
    to_ascii = {} if "utf" in out.encoding.lower() else _IN_ASCII
    if not out.is_terminal:
        lines = "\n".join(_plain_lines(section)).translate(to_ascii)
        return out.print(lines, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(min_width=12, max_width=24)
    table.add_column(overflow="fold")
    for finding in section.findings:
        sign, style = _SIGNS[finding.state]
        text = Text(one_line(finding.text).translate(to_ascii))
        if finding.advice:
            text.append(f"\n→ {one_line(finding.advice)}".translate(to_ascii), style="cyan")
        table.add_row(Text(sign.translate(to_ascii), style=style), Text(one_line(finding.topic)), text)
    out.print()
    out.print(Text(section.title, style="bold"))
    out.print(Padding(table, (0, 0, 0, 1)))


def _plain_lines(section: Section) -> Iterator[str]:
    yield from ("", section.title)
    for finding in section.findings:
        yield f"  {_SIGNS[finding.state][0]} {one_line(finding.topic)}: {one_line(finding.text)}"
        if finding.advice:
            yield f"      {one_line(finding.advice)}"


def as_plain_text(report: Report) -> str:
    lines = [f"orin-chat {report.orin_chat}, {report.at}"]
    for section in report.sections:
        lines += _plain_lines(section)
    lines += ["", *(f"{name}={one_line(value)}" for name, value in report.variables.items())]
    return "\n".join(lines) + "\n"


def write(report: Report, path: Path) -> None:
    """Writes the report as JSON or as text. Raises UsageError."""
    if path.suffix == ".json":
        text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    else:
        text = as_plain_text(report)
    write_text(text, path)


def write_text(text: str, path: Path) -> None:
    """Writes `text` without the names of the user and of the machine, and without terminal controls. Raises
    UsageError."""
    try:
        path.write_text(clean(without_names(text)), "utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None


def without_names(text: str) -> str:
    """Replaces the home folder, the user's name and the host's name."""
    home = str(Path.home())
    if home != "/":
        text = text.replace(home, "~")
    user = Path(home).name
    for name, placeholder in (
        (user, "<user>"),
        (os.environ.get("USER", ""), "<user>"),
        (socket.gethostname(), "<host>"),
    ):
        if len(name) > 1 and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", placeholder, text)
    return text
