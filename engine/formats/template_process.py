"""Renders one chat template, in a process of its own: `template` starts this file as a script.

A template is a program out of a file from anywhere. Jinja's sandbox keeps it away from Python, but not from
looping or from filling the memory, and nothing inside a process can stop that reliably. So it runs here, with
limits on memory and processor time, and its parent ends it when it takes too long.

The parent writes lines of JSON: the template's source, then the variables of each rendering. For each of
these one line comes back: {"text"}, or {"refused"} (the template called raise_exception), {"limit"} or
{"broken"} with what went wrong.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
RENDERING_S = 2  # of processor time: ends a process whose parent is gone
TEXT_CHARACTERS = 1 << 24


class Refusal(Exception):
    """What raise_exception raises in a template."""


class _GenerationBlock(Extension):
    """{% generation %}, by which some templates mark for training what the model wrote: just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def compiled(source: str) -> Template:
    """The template with what templates of this kind expect, as in transformers' `apply_chat_template`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def rendered(template: Template, variables: dict[str, Any]) -> str:
    """`now` among the variables, in ISO format, is the time that the template sees."""
    now = datetime.fromisoformat(variables.pop("now"))
    pieces, length = [], 0
    for piece in template.generate(strftime_now=now.strftime, **variables):
        pieces.append(piece)
        length += len(piece)
        if length > TEXT_CHARACTERS:
            raise MemoryError
    return "".join(pieces)


def answer(source: str, request: str) -> dict[str, str]:
    try:
        return {"text": rendered(compiled(source), json.loads(request))}
    except Refusal as refusal:
        return {"refused": str(refusal)}
    except MemoryError:
        return {"limit": "it takes too much memory"}
    except (OverflowError, RecursionError):
        return {"limit": "it repeats itself too often"}
    except Exception as error:
        return {"broken": f"{type(error).__name__}: {error}"}


def _limit_processor_time() -> None:
    """To what is used so far and a little more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + RENDERING_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def main() -> None:
    with suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
    print("ready", flush=True)
    source = json.loads(sys.stdin.readline() or '""')
    _limit_processor_time()
    with suppress(Exception):  # while the model loads; what fails here fails again below
        compiled(source)
    for request in sys.stdin:
        _limit_processor_time()
        print(json.dumps(answer(source, request)), flush=True)


if __name__ == "__main__":
    main()
