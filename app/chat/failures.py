"""Failures of an engine: in words, and what may help."""

from collections.abc import AsyncIterator

from engine.protocol.events import Event, Failed
from widgets.text import one_line


def is_about_model(failure: Failed) -> bool:
    """Whether another model may start where this one failed."""
    return failure.kind == "model" or lacks_memory(failure)


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
