"""A call of a tool in words."""

import json
from contextlib import suppress

from widgets.chat.turn import Call
from widgets.text import one_line

_STATES = {
    "open": "no result yet",
    "asked": "asks whether it may run",
    "running": "running",
    "failed": "failed",
    "refused": "not allowed",
}


def call_line(call: Call, width: int = 100) -> str:
    """The name, the arguments and how the call ended: in `width` cells, if the name is not too long."""
    name, state = one_line(call.name), state_of(call)
    room = max(0, width - len(name) - len(state) - 4)
    return f"{name} {one_line(call.arguments)[:room]} · {state}"


def state_of(call: Call) -> str:
    """How a call ended, or what it waits for."""
    return _STATES.get(call.state) or f"{len(call.result):,} characters"


def pretty(arguments: str) -> str:
    """JSON, a key on each line."""
    with suppress(ValueError, RecursionError):
        return json.dumps(json.loads(arguments), ensure_ascii=False, indent=1)
    return arguments
