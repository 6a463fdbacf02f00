"""The process that renders one chat template: `template_renderer` runs it.

A template is a program from an untrusted file. Jinja's sandbox keeps it from Python's objects, but not from endless
loops or from filling the memory, and nothing within a process can stop these reliably. So it runs here, with limits on
memory and processor time, and the parent process kills this one when it takes too long.

The parent writes lines of JSON: the template's source, then the variables of each rendering, or null to ask which ones
the template reads. Each of these is answered by one line: {"text"} or {"reads"}, or {"refused"} (the template called
raise_exception), {"limit"} or {"broken"} with the reason.
"""

import json
import sys
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Environment, Template, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from engine.formats.process_limits import limit_memory, limit_processor_time

MEMORY_BYTES = 1 << 30
RENDERING_S = 2  # of processor time: ends the process if its parent has died
TEXT_CHARACTERS, TIMES_THE_REQUEST = 1 << 20, 16
"""The longest text: what a template writes of its own, and of its request, as indented JSON in the worst case. Making
tokens of much more holds others up."""


class Refusal(Exception):
    """A template called raise_exception."""


class TooLong(Exception):
    """A template writes more than it may."""


class _GenerationBlock(Extension):
    """{% generation %}, with which some templates mark the model's text for training: only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> Environment:
    """The functions and filters that chat templates expect: those of `_compile_jinja_template` in
    transformers/utils/chat_template_utils.py. Templates may change their own lists, as files of Kimi K2 do."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["safe"] = str  # Jinja's makes a text that escapes what is added to it (functionary)
    environment.globals["raise_exception"] = _raise_exception
    return environment


@cache
def compiled(source: str) -> Template:
    return _environment().from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def rendered(template: Template, variables: dict[str, Any], most: int) -> str:
    """The template's text. The variable `now`, in ISO format, is the time for `strftime_now`. Raises TooLong for
    a text of more than `most` characters."""
    now = datetime.fromisoformat(variables.pop("now"))
    pieces, length = [], 0
    for piece in template.generate(strftime_now=now.strftime, **variables):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise TooLong
    return "".join(pieces)


def answer(source: str, request: str) -> dict[str, str | list[str]]:
    """The answer to a line."""
    try:
        if (variables := json.loads(request)) is None:
            return {"reads": sorted(meta.find_undeclared_variables(_environment().parse(source)))}
        most = TEXT_CHARACTERS + TIMES_THE_REQUEST * len(request)
        return {"text": rendered(compiled(source), variables, most)}
    except Refusal as refusal:
        return {"refused": str(refusal)}
    except TooLong:
        return {"limit": "it writes too much"}
    except MemoryError:
        return {"limit": "it takes too much memory"}
    except (OverflowError, RecursionError):
        return {"limit": "it repeats itself too often"}
    except Exception as error:
        return {"broken": f"{type(error).__name__}: {error}"}


def main() -> None:
    limit_memory(MEMORY_BYTES)
    print("ready", flush=True)
    source = json.loads(sys.stdin.readline() or '""')
    limit_processor_time(RENDERING_S)
    with suppress(Exception):  # compiles while the model loads; an error is reported with the first rendering
        compiled(source)
    for request in sys.stdin:
        limit_processor_time(RENDERING_S)
        print(json.dumps(answer(source, request)), flush=True)


if __name__ == "__main__":
    main()
