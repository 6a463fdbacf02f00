"""The commands that begin with "/", in the line mode and in the prompt of the full screen, and what they share."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from app.chat.session import Session
from app.chat.settings import check_sampling
from engine.errors import UsageError
from engine.formats.kv_format import KVFormat
from engine.protocol.events import ContextLength, EngineOptions, Sampling, Speculate

COMMANDS: Mapping[str, str] = {
    "help": "this list",
    "new": "start a new chat",
    "chats": "[WORDS]: past chats, or those that hold these words",
    "open": "NUMBER: go on with a past chat",
    "delete": "NUMBER: delete a past chat for good",
    "continue": "go on with the last reply where it ended or, in a new chat, with the most recent chat",
    "regenerate": "answer the last message again",
    "summary": "go on in a new chat, with a summary of this one that the model writes",
    "shorten": "leave the oldest turns out of what the model reads; the chat keeps them",
    "edit": "change the last message and send it again",
    "fork": "start a new chat with all before the last message, to go another way from there",
    "save": "FILE: write the chat as Markdown",
    "model": "[NAME]: what is answering, or go on with another model",
    "mcp": "[again]: the servers of tools and their tools; starts those anew that are down",
    "stats": "figures of the last reply",
    "thoughts": "what the model thought before the last reply",
    "system": '[TEXT]: show the system prompt, or start a new chat under this one ("none": without)',
    "think": "on|off: whether a thinking model should think",
    "set": '[NAME VALUE]: show the sampling options and the engine\'s, or change one ("none": without)',
    "quit": "end the chat",
}
"""The help of each command, by name."""
SETTABLE = (*Sampling.__struct_fields__, "max_tokens")
ENGINE_OPTIONS = {
    "context": ("context_length", ContextLength),
    "kv": ("kv", KVFormat),
    "speculate": ("speculate", Speculate),
}
"""Options that need another start of the engine: their names in `EngineOptions`, and their types."""
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_MOST_DIGITS = 18  # of the number of a chat: SQLite has room for them


def commands() -> dict[str, str]:
    """The help of each command, by name."""
    return dict(COMMANDS)


def completions() -> dict[str, Sequence[str]]:
    """The words that may follow each command, by name."""
    return dict.fromkeys(COMMANDS, ()) | {
        "set": (*SETTABLE, *ENGINE_OPTIONS),
        "think": ("on", "off"),
        "mcp": ("again",),
    }


_OF_OTHERS = {
    "exit": "quit", "bye": "quit", "q": "quit", "close": "quit", "clear": "new", "reset": "new", "?": "help",
    "history": "chats", "list": "chats", "search": "chats", "load": "open", "resume": "continue", "models": "model",
    "switch": "model", "retry": "regenerate", "redo": "regenerate", "again": "regenerate", "compact": "summary",
    "undo": "edit", "branch": "fork", "export": "save", "write": "save", "settings": "set", "config": "set",
    "temperature": "set", "tools": "mcp", "usage": "stats", "cost": "stats", "info": "stats", "prompt": "system",
    "thinking": "thoughts", "reasoning": "thoughts",
}  # fmt: skip
"""What commands of other chats are here."""


def split(text: str) -> tuple[str, str] | None:
    """The name and the argument of a command; None if `text` is a message, as /etc/hosts is. Raises UsageError for a
    command that does not exist."""
    name, _, argument = text[1:].partition(" ")
    if not text.startswith("/") or "/" in name or "\n" in name:
        return None
    if name not in COMMANDS:
        meant = _OF_OTHERS.get(name) or next(iter(difflib.get_close_matches(name, COMMANDS, 1)), "")
        hint = f"Is /{meant} meant?" if meant else ""
        raise UsageError(
            f"There is no command /{name}; /help lists them.",
            f"{hint} To send it as a message, put a space before it.".strip(),
        )
    return name, argument.strip()


def chat_number(command: str, text: str) -> int:
    """Raises UsageError."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise UsageError(f"/{command} needs the number of a chat.", "/chats lists them.")
    return int(text)


def set_think(session: Session, choice: str) -> None:
    """Raises UsageError."""
    if choice not in ("on", "off"):
        raise UsageError("/think needs on or off.")
    session.think = choice == "on"


def set_option(session: Session, name: str, text: str) -> None:
    """Changes one of SETTABLE, from the next prompt on. Raises UsageError."""
    if name not in SETTABLE:
        listed = ", ".join((*SETTABLE, *ENGINE_OPTIONS))
        raise UsageError(f"There is no option {name}.", f"The options are {listed}.")
    value = "null" if text == "none" else text
    try:
        if name == "max_tokens":
            session.max_tokens = msgspec.convert(value, _Positive | None, strict=False)
        else:
            fields = msgspec.structs.asdict(session.sampling) | {name: value}
            changed = msgspec.convert(fields, Sampling, strict=False)
            check_sampling(changed)
            session.sampling = changed
    except msgspec.ValidationError:
        raise UsageError(f"{text!r} is no value for {name}.", allowed(name)) from None


def settable_values(session: Session, options: EngineOptions | None) -> dict[str, object]:
    """The value of each option that /set changes, by name. `options`: those of the engine, None if it has its own."""
    values = msgspec.structs.asdict(session.sampling) | {"max_tokens": session.max_tokens}
    if options:
        values |= {name: getattr(options, field) for name, (field, _) in ENGINE_OPTIONS.items()}
    return {name: "none" if value is None else value for name, value in values.items()}


def engine_option(name: str, text: str) -> dict[str, Any]:
    """The field of `EngineOptions` that an option of ENGINE_OPTIONS sets, and its value. Raises UsageError."""
    field, kind = ENGINE_OPTIONS[name]
    try:
        chosen = msgspec.convert("null" if text == "none" else text, kind, strict=False)
    except msgspec.ValidationError:
        raise UsageError(f"{text!r} is no value for {name}.", allowed(name)) from None
    return {field: msgspec.to_builtins(chosen)}


def allowed(name: str) -> str:
    """A sentence with the values that an option takes."""
    values = {
        "effort": "low, medium, high or none",
        "context": "a number of tokens, max or none",
        "kv": f"{', '.join(each.value for each in KVFormat)} or none",
        "speculate": "auto, off, lookup, heads, draft or none",
        "max_tokens": "a whole number of 1 or more, or none",
        "seed": "a whole number, or none",
        "top_k": "a whole number of 0 or more",
        "repeat_last_n": "a whole number of 0 or more",
    }
    return f"It takes {values.get(name, 'a number')}."
