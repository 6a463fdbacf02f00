"""`orin-chat serve`: a model, or one of several, answers other programs over HTTP."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from app.chat.configuration import encoder_of
from app.chat.settings import Settings
from app.cli import options, values
from app.cli.model_file import adapters, draft_model, model_path, model_paths, models_in
from engine.errors import UsageError
from engine.protocol.client import LocalEngine
from engine.protocol.events import TOKEN_GAP
from engine.system.invocation import pip_install
from widgets.text import one_line

if TYPE_CHECKING:
    from app.chat.configuration import Configuration
    from app.serve.limits import Limits
    from app.serve.service import Service

MAX_WAITING = 32
EPILOG = """\
A client takes the address that is printed, such as http://127.0.0.1:8080/v1:
  orin-chat --engine http://127.0.0.1:8080/v1

The sampling options hold where a request does not say otherwise. Ctrl+C ends the
server; answers in progress have 5 seconds. On the screen, F9 shows one pane after
the other.
"""


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Serves until it is interrupted, and returns the exit code. Raises OrinError.

    On a terminal, a screen shows what the engine does. With --plain, or if the output goes elsewhere, requests go to
    standard output, a line each when it has ended, and all else to standard error."""
    args = _parse(arguments)
    _check_libraries()
    from app.serve.access import is_loopback
    from app.serve.lines import Lines
    from app.serve.model_pool import ModelPool
    from app.serve.routes import application
    from app.serve.server import Server, listen

    key, configuration = options.key(args), options.configuration(args, settings)
    paths, limits = _models(args, settings), args.limits or _limits_of(settings)
    if len(paths) > 1:
        _refuse_files_of_one_model(args)
    engine_options = replace(
        configuration.engine,
        draft=str(draft_model(args, settings) or ""),
        lora=adapters(args.lora),
        parallel=args.parallel,
        token_gap=args.token_gap,
        context_at_most=configuration.engine.context_at_most or len(paths) > 1,
    )
    keep_warm_s = configuration.keep_warm_s if len(paths) == 1 else None
    service_of = partial(_service, args, configuration._replace(engine=engine_options), keep_warm_s)
    with listen(args.host, args.port) as sock:
        host, port = sock.getsockname()[:2]
        if not key and not is_loopback(host):
            raise UsageError(
                f"Everyone who reaches {args.host} could use this server.",
                "Put a key into an environment variable and name it: --api-key-env NAME.",
            )
        (name, path), *others = paths.items()
        service = service_of(name, path)
        pool = ModelPool(
            service,
            {name: partial(service_of, name, path, beside=service) for name, path in others},
            most_loaded=args.loaded,
            idle_s=args.unload_after,
        )
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        http = application(pool, key, limits)
        if not args.plain and _has_screen():
            from app.serve.serve_app import serve_on_screen

            return asyncio.run(serve_on_screen(pool, http, sock, address))
        lines = Lines(address)
        service.on_handled = lines.handled
        return asyncio.run(Server(service, service.engine, http, sock, lines.show, pool).run())


def _refuse_files_of_one_model(args: Namespace) -> None:
    """Raises UsageError for options that name a file which fits one model."""
    if args.mmproj not in (None, "off"):
        raise UsageError("--mmproj FILE is for one model.", "Those of --models are found beside them.")
    if args.draft:
        raise UsageError("--draft NAME is for one model.")
    if args.lora:
        raise UsageError("--lora FILE is for one model.")


def _service(
    args: Namespace,
    configuration: Configuration,
    keep_warm_s: float | None,
    name: str,
    path: Path,
    beside: Service | None = None,
) -> Service:
    """The service of a model, whose engine is not started. It counts and shows what it does together with the service
    `beside` it. Raises OrinError if the file cannot be read."""
    from app.serve.service import ModelFile, Service

    mmproj = encoder_of(path, args.mmproj)
    file = ModelFile.read(path, mmproj)  # clients that come meanwhile wait
    engine_options = replace(configuration.engine, model_path=str(path), mmproj=mmproj)
    engine = LocalEngine(engine_options, keep_warm_s=keep_warm_s)
    service = Service(
        engine,
        model=name,
        file=file,
        sampling=configuration.sampling_of(path),
        think=not args.no_think,
        parallel=args.parallel,
        max_waiting=args.queue,
    )
    engine.on_event = service.observe
    if beside:
        service.metrics, service.on_handled = beside.metrics, beside.on_handled
        service.stopping = beside.stopping
    return service


def _models(args: Namespace, settings: Settings) -> dict[str, Path]:
    """The files of the models by the names that clients use. Raises OrinError."""
    if not args.models:
        path = model_path(args.model, settings)
        is_file = not args.model or args.model.endswith(path.name)
        return {one_line(path.stem if is_file else args.model): path}
    if args.model:
        raise UsageError("--model and --models are two ways to say the same.", "Leave one of them out.")
    folder = Path(args.models).expanduser()
    if folder.is_dir():
        paths = {one_line(file.stem): file for file in models_in(folder)}
        if not paths:
            raise UsageError(f"There is no GGUF file in {folder}.", "Name a folder with models, or models.")
        return paths
    found = model_paths([name for name in args.models.split(",") if name], settings)
    return {one_line(path.stem if name.endswith(path.name) else name): path for name, path in found.items()}


def _parse(arguments: Sequence[str]) -> Namespace:
    about = "Answer other programs over HTTP, in the protocols of OpenAI, Anthropic, Google and Ollama."
    parser = options.Parser("serve", about, EPILOG)
    parser.set_defaults(engine=None)
    options.add_engine(parser.add_argument_group("model").add_argument)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", metavar="NAME", help="the address to listen on (127.0.0.1)")
    add("--port", type=_port, default=8080, metavar="N", help="the port; 0 takes a free one (8080)")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the key for clients")
    add(
        "--models", metavar="NAMES", help="several models with commas between them, or a folder of GGUF files"
    )
    add("--loaded", type=values.positive, default=1, metavar="N", help="of --models: so many at a time (1)")
    add(
        "--unload-after",
        type=values.duration,
        metavar="TIME",
        help="of --models: 10m unloads one that nobody has asked for so long (never)",
    )
    add("--parallel", type=values.positive, default=1, metavar="N", help="answers at the same time (1)")
    add(
        "--queue",
        type=values.count,
        default=MAX_WAITING,
        metavar="N",
        help=f"requests that may wait; more are refused ({MAX_WAITING})",
    )
    add(
        "--token-gap",
        type=_token_gap,
        default=TOKEN_GAP,
        metavar="X",
        help=f"while prompts are read, the next token may take X times as long ({TOKEN_GAP})",
    )
    add(
        "--limits",
        type=_limits,
        metavar="LIMITS",
        help="of each key: requests=60,tokens=100000 a minute, open=4 at a time (none)",
    )
    add("--plain", action="store_true", help="a line for each request instead of the screen")
    add = parser.add_argument_group("sampling").add_argument
    options.add_sampling(add)
    add("--no-think", action="store_true", help="ask a thinking model not to think")
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    port = values.count(text)
    if port > 65535:
        raise UsageError(f"There is no port {port}.", "The highest is 65535.")
    return port


def _limits_of(settings: Settings) -> Limits:
    """Raises UsageError."""
    from app.serve.limits import NO_LIMITS

    try:
        return _limits(settings.limits) if settings.limits else NO_LIMITS
    except ArgumentTypeError as error:
        raise UsageError(f"In the settings, limits {error}.") from None


def _limits(text: str) -> Limits:
    from app.serve.limits import Limits

    return Limits.parse(text)


def _token_gap(text: str) -> float:
    with suppress(ValueError):
        if 1 <= (value := float(text)) < math.inf:
            return value
    raise ArgumentTypeError(f"must be a number, 1 or more, not {text!r}")


def _check_libraries() -> None:
    """Raises UsageError if the extra `serve` is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"orin-chat serve needs the library {error.name}, which is not installed.",
            f"Install it: {pip_install('llguidance', 'starlette', 'uvicorn')}",
        ) from None


def _has_screen() -> bool:
    """Whether a full screen can be shown. It is drawn on standard error."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return os.environ.get("TERM") != "dumb" and all(stream.isatty() for stream in streams)
