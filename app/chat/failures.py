"""How replies end and engines fail: in words, and what may help."""

from collections.abc import AsyncIterator

from msgspec.structs import replace

from engine.protocol.events import Event, Failed, Finished
from widgets.chat.turn import WARNING
from widgets.text import counted, one_line

NOTHING_OLDER = "There are no older turns to leave out: F2 shortens the prompt, Ctrl+N starts a new chat"
EMPTY = "The model gave an empty reply"
NO_REPLY = f"{EMPTY} · Ctrl+R tries again"
NOTHING_TO_ADD = "The model has nothing to add"
FULL = "Ctrl+G offers how to go on"
TOO_LONG = "The prompt alone is too long: F2 brings it back to shorten it"
STOPPED = Finished(
    request_id=0,
    reason="cancelled",
    prompt_n=0,
    cached_n=0,
    prompt_ms=0,
    predicted_n=0,
    predicted_ms=0,
    load_ms=0,
    seed=0,
)
"""The end of a reply that was stopped before the engine was asked."""


def fills_context(end: Finished | Failed, length: int, max_tokens: int | None) -> bool:
    """Whether a reply was cut, or refused, because the context of `length` tokens (0: not known) is full. `max_tokens`
    was the longest reply that was asked for."""
    if isinstance(end, Failed):
        return end.kind == "context"
    if end.reason != "length" or (max_tokens is not None and end.predicted_n >= max_tokens):
        return False
    return 0 < length - 1 <= end.context_used  # else it is a limit of a server; some leave one token free


def is_prompt_too_long(end: Finished | Failed, used: int) -> bool:
    """Whether the last prompt alone is too long for the context, so that nothing before it needs to go. The
    conversation before it has `used` tokens."""
    return isinstance(end, Failed) and end.kind == "context" and 0 < end.most < end.tokens - used


def reason(
    end: Finished | Failed, length: int, max_tokens: int | None, *, is_full: bool, is_too_long: bool = False
) -> tuple[str, str] | tuple[()]:
    """Why a reply is not complete, and which key helps; empty if it is. `is_full`: the context of `length` tokens;
    `is_too_long`: the last prompt alone for it."""
    if isinstance(end, Failed) and is_full:  # the hint is for programs that have no such keys
        return f"{WARNING} {in_words(replace(end, hint=''))}", TOO_LONG if is_too_long else FULL
    if isinstance(end, Failed):
        return f"{WARNING} {in_words(end).removesuffix(' Try again.')}", "Ctrl+R tries again"
    if end.reason == "cancelled":
        return "stopped", "Ctrl+G goes on"
    if end.reason == "length":
        if max_tokens is not None and end.predicted_n >= max_tokens:
            return f"stopped at {counted(end.predicted_n, 'token')}, as asked", "Ctrl+G goes on"
        if not is_full:
            return f"cut at {counted(end.predicted_n, 'token')}", "Ctrl+G goes on"
        return f"{WARNING} The context of {length:,} tokens is full", FULL
    return ()


def is_about_model(failure: Failed) -> bool:
    """Whether another model may start where this one failed."""
    return failure.kind in ("model", "template") or lacks_memory(failure)


def lacks_memory(event: Event) -> bool:
    return isinstance(event, Failed) and "memory" in event.message.lower()


def in_words(failure: Failed) -> str:
    message = failure.message if failure.message.endswith((".", "!", "?")) else f"{failure.message}."
    return one_line(f"{message} {failure.hint}")


async def events_of(stream: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The events of an engine. If it raises, which it should not, the conversation goes on."""
    try:
        async for event in stream:
            yield event
    except Exception as error:
        yield Failed(kind="internal", message=f"The engine broke off: {type(error).__name__}: {error}.")
