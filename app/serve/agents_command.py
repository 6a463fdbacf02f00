"""`orin-chat agents`: sets other programs up for a server that runs."""

import difflib
import json
import sys
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from app.chat.settings import Settings
from app.cli import options
from app.serve.agents import AGENTS, Agent, Endpoint
from engine.errors import BackendError, UsageError
from engine.system.invocation import call
from engine.system.whole_file import write_whole
from widgets.text import clean, one_line

TIMEOUT_S = 5.0
MOST_BYTES = 1 << 20  # of what a server or a file says
MOST_CONTEXT = 1 << 31  # tokens
_NO_ANSWER = (
    OSError, HTTPException, ValueError, RecursionError, KeyError, TypeError, AttributeError, StopIteration,
)  # fmt: skip
"""What is raised where no orin-chat answers: nobody, another protocol, or other JSON."""


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Prints the lines of configuration, or writes them, and returns the exit code. Raises OrinError."""
    args = _parse(arguments)
    if unknown := [name for name in args.names if name not in AGENTS]:
        raise UsageError(f"orin-chat does not know {unknown[0]!r}.", f"It knows {', '.join(AGENTS)}.")
    chosen = [AGENTS[name] for name in args.names or AGENTS]
    endpoint = _endpoint(args)
    for remark in endpoint.remarks:
        print(f"orin-chat: {remark}", file=sys.stderr)
    if args.write:
        for agent in chosen:
            _write(agent, endpoint, is_sure=args.yes)
    else:
        sys.stdout.write("\n".join(_described(agent, endpoint) for agent in chosen))
    return 0


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = options.Parser("agents", "Set other programs up for orin-chat serve, which has to run.")
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"of {', '.join(AGENTS)} (all)")
    add("--server", default="http://127.0.0.1:8080", metavar="URL", help="the server (http://127.0.0.1:8080)")
    add("--model", metavar="NAME", help="of several models of the server (the first)")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the server's key")
    add(
        "--write",
        action="store_true",
        help="put the lines into the programs' files, after showing what changes",
    )
    add("--yes", action="store_true", help="with --write: do not ask")
    return parser.parse_args(arguments)


def _endpoint(args: Namespace) -> Endpoint:
    """What the server says of itself. Raises OrinError."""
    address = args.server.rstrip("/").removesuffix("/v1")
    key = options.key(args)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{address}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            models = json.loads(response.read(MOST_BYTES))["data"]
        named = {one_line(str(model["id"])): model for model in models}
        model = args.model or next(iter(named))
        if model not in named:
            raise UsageError(f"The server has no model {one_line(model)}.", f"It has {', '.join(named)}.")
        context = named[model].get("context_length")
        can = named[model].get("capabilities", {})
        tools, images = (can.get(name, {}).get("supported") for name in ("tools", "image_input"))
    except urllib.error.HTTPError as error:
        hint = "Name the variable with its key: --api-key-env NAME." if error.code == 401 else ""
        raise BackendError(f"The server at {one_line(address)} refuses: {error.code}.", hint) from None
    except _NO_ANSWER:
        raise BackendError(
            f"No orin-chat answers at {one_line(address)}.",
            f"Start it with {call('serve')}, or name another one: --server URL.",
        ) from None
    length = context if isinstance(context, int) and 0 < context <= MOST_CONTEXT else 0
    return Endpoint(address, model, length, args.api_key_env or "", tools is not False, images is True)


def _described(agent: Agent, endpoint: Endpoint) -> str:
    parts = [f"# {agent.title}\n"]
    if agent.file:
        parts += [f"# in {agent.file}:\n", agent.lines(endpoint)]
    parts += ["# then run:\n" if agent.file else "# run:\n", f"{agent.run(endpoint)}\n"]
    return "".join(parts)


def _write(agent: Agent, endpoint: Endpoint, *, is_sure: bool) -> None:
    """Puts the lines of a program into its file, if the user agrees. Raises OrinError."""
    if not agent.file:
        sys.stdout.write(_described(agent, endpoint))
        return
    path = Path(agent.file).expanduser()
    try:
        old = path.read_text("utf-8") if path.exists() else ""
        if agent.merged is None and old:
            raise UsageError(
                f"{agent.file} is there already.", f"Put these lines into it:\n{agent.lines(endpoint)}"
            )
        new = agent.merged(old, endpoint) if agent.merged else agent.lines(endpoint)
        shown = difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), agent.file, agent.file
        )
        sys.stdout.write(clean("".join(shown)) or f"{agent.file} says so already.\n")
        if new != old and (is_sure or _agrees(agent.file)):
            write_whole(path, new.encode(), path.stat().st_mode & 0o777 if old else 0o600)
            sys.stdout.write(f"written: {agent.file}\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{agent.file} cannot be changed: {type(error).__name__}.") from None
    sys.stdout.write(f"# then run:\n{agent.run(endpoint)}\n")


def _agrees(file: str) -> bool:
    """Raises UsageError if nobody can be asked."""
    if not sys.stdin.isatty():
        raise UsageError(f"Nobody can be asked whether {file} is to be changed.", "--yes changes it unasked.")
    return input(f"Change {file}? [y/N] ").strip().lower() in ("y", "yes")
