"""Conversations that are longer than the context, for protocols whose servers leave out the oldest turns then: that of
Ollama, and responses with `truncation: "auto"`."""

from collections.abc import Sequence

from app.serve.long_work import MAX_TEXT_BYTES
from app.serve.protocols import chat
from app.serve.protocols.common.conversation import TEXTS, ChatMessage, Part
from app.serve.service import Service
from widgets.text import counted

STAY = "system", "developer"
_MESSAGE_BYTES = 64  # what a template adds to each message, at most
_TOKEN_BYTES = 16  # an average token has fewer


def shorten(body: chat.ChatBody, service: Service) -> str:
    """Leaves out the oldest turns of a conversation that does not fit into the context, and says so ("" if it fits). A
    turn begins with a message of the user; the last one stays, and so do the system's messages. Room for a reply is
    left, a quarter of the context or what its limit says. May take as long as the text is. Raises ApiError."""
    if service.ready is None:
        return ""
    context, messages = service.ready.context_length, body.messages
    size = sum(map(_size, messages)) + len(str(body.tools or ""))
    # So much of the end may have to be made into tokens, to see whether it fits.
    most_bytes = min(_TOKEN_BYTES * context, MAX_TEXT_BYTES)
    fits = size < context  # a token has a byte or more
    stays = sum(_size(message) for message in messages if message.role in STAY)
    if fits or stays > most_bytes or any(map(_has_picture, messages)):
        return ""

    def begin(start: int) -> None:
        body.messages = [m for i, m in enumerate(messages) if i >= start or m.role in STAY]

    def tokens(start: int) -> int:
        begin(start)
        return len(chat.encoded(body, service).ids)

    starts = _starts(messages, context, size - most_bytes)
    if size <= most_bytes and tokens(0) < context:
        body.messages = messages
        return ""
    room = context - min(body.max_tokens or context // 4, context // 2)
    low, high = 0, len(starts) - 1
    while low < high:  # the first start that fits is not before `low`
        middle = (low + high) // 2
        low, high = (low, middle) if tokens(starts[middle]) <= room else (middle + 1, high)
    begin(starts[low])
    n = len(messages) - len(body.messages)
    return f"{counted(n, 'message')} left out, for which the context has no room" if n else ""


def _starts(messages: Sequence[ChatMessage], step_bytes: int, first_byte: int) -> list[int]:
    """Where a shorter conversation may begin, not before `first_byte`: at a message of the user every `step_bytes` or
    so, so that the next requests begin with the same one, and share their prompt's beginning; and at the last one."""
    starts, size, step = list[int](), 0, 0
    for i, message in enumerate(messages):
        if message.role == "user" and size // step_bytes > step:
            step = size // step_bytes
            if size >= first_byte:
                starts.append(i)
        size += _size(message)
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
    return starts if starts[-1:] == [last] else [*starts, last]


def _size(message: ChatMessage) -> int:
    """Bytes, at least as many as a template makes of it."""
    texts = [message.reasoning_content or "", *(call.called.given for call in message.tool_calls or ())]
    return _MESSAGE_BYTES + sum(len(text.encode("utf-8", "replace")) for text in (*texts, text_of(message)))


def text_of(message: ChatMessage) -> str:
    """The texts of a message's content, one behind the other."""
    content = message.content or ""
    return content if isinstance(content, str) else "".join(map(_text, content))


def _text(part: Part | str) -> str:
    return part if isinstance(part, str) else part.text or part.refusal or ""


def _has_picture(message: ChatMessage) -> bool:
    """Whether a message has a picture or a file. Only the engine knows how many tokens these have."""
    content = message.content or ()
    return not isinstance(content, str) and any(isinstance(p, Part) and p.type not in TEXTS for p in content)
