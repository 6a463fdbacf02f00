"""`orin-chat serve`: the model answers other programs, with OpenAI's protocol over HTTP."""

import asyncio
import math
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from app.chat.settings import Settings
from app.cli import options
from app.cli.model_file import model_path
from engine.errors import UsageError
from engine.invocation import pip_install
from engine.protocol.client import LocalEngine
from engine.protocol.events import TOKEN_GAP
from widgets.text import one_line

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
    from app.serve.routes import application
    from app.serve.server import Server, listen
    from app.serve.service import ModelFile, Service

    key, configuration = options.key(args), options.configuration(args, settings)
    path = model_path(args.model, settings)
    with listen(args.host, args.port) as sock:
        host, port = sock.getsockname()[:2]
        if not key and not is_loopback(host):
            raise UsageError(
                f"Everyone who reaches {args.host} could use this server.",
                "Put a key into an environment variable and name it: --api-key-env NAME.",
            )
        file = ModelFile.read(path)  # clients that come meanwhile wait
        engine_options = replace(
            configuration.engine, model_path=str(path), parallel=args.parallel, token_gap=args.token_gap
        )
        engine = LocalEngine(engine_options, keep_warm_s=configuration.keep_warm_s)
        service = Service(
            engine,
            model=one_line(path.stem if not args.model or args.model.endswith(path.name) else args.model),
            file=file,
            sampling=configuration.sampling,
            think=not args.no_think,
            parallel=args.parallel,
            max_waiting=args.queue,
        )
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        http = application(service, key)
        if not args.plain and _has_screen():
            from app.serve.serve_app import serve_on_screen

            return asyncio.run(serve_on_screen(service, engine, http, sock, address))
        lines = Lines(address)
        engine.on_event = service.observe
        service.on_handled = lines.handled
        return asyncio.run(Server(service, engine, http, sock, lines.show).run())


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = options.Parser("serve", "Answer other programs, with OpenAI's protocol over HTTP.", EPILOG)
    parser.set_defaults(engine=None)
    options.add_engine(parser.add_argument_group("model").add_argument)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", metavar="NAME", help="the address to listen on (127.0.0.1)")
    add("--port", type=_port, default=8080, metavar="N", help="the port; 0 takes a free one (8080)")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the key for clients")
    add("--parallel", type=options.positive, default=1, metavar="N", help="answers at the same time (1)")
    add(
        "--queue",
        type=options.count,
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
    add("--plain", action="store_true", help="a line for each request instead of the screen")
    add = parser.add_argument_group("sampling").add_argument
    options.add_sampling(add)
    add("--no-think", action="store_true", help="ask a thinking model not to think")
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    port = options.count(text)
    if port > 65535:
        raise UsageError(f"There is no port {port}.", "The highest is 65535.")
    return port


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
