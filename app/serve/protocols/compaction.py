"""Conversations that the model sums up for their client, as OpenAI's server does it:
https://platform.openai.com/docs/api-reference/responses/compact.

Codex CLI asks any server that it takes for OpenAI's, before the context is full, and cannot go on without a summary. It
asks at a path of its own, or with an item of the kind `compaction_trigger` at the end of what it posts. The summary is
an item of the kind `compaction`, which the client sends back in place of all that came before it.
"""

import base64
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from app.serve.answer import AnswerDelta, AnswerEnd
from app.serve.errors import ApiError
from app.serve.long_work import MAX_TEXT_BYTES
from app.serve.protocols import chat
from app.serve.protocols.common.conversation import ChatMessage
from app.serve.protocols.common.reply import Json
from app.serve.protocols.common.thinking import Reasoning
from app.serve.protocols.response_reply import SEALED, ResponseReply
from app.serve.protocols.shortening import STAY, shorten, text_of
from app.serve.service import Service
from engine.protocol.events import Chat, Generate
from widgets.text import counted

TRIGGER = "compaction_trigger"
KINDS = ("compaction", "compaction_summary", "context_compaction")
"""Names of the item, in the versions of the protocol."""
SUMMARY_SHARE = 1 / 4
"""The part of the context that the summary may have, and that the user's messages repeated beside it may have."""
_SHORT_CHARS = 400, 100, 0
"""How many characters stay of a long message that is cut: fewer where that is not enough."""
_LEFT_OUT = "\n… (left out)"
_CHARS_A_TOKEN = 3  # of a text that is too long to be counted
_SHORTER_BY = 1.25  # more is cut than seems to be needed: how many tokens a text has is estimated
_ASKED = """\
Summarize this conversation for somebody who continues it and sees nothing else of it: what the user asked for, what \
was decided and done, what was found out (names of files, code, commands and results that are still needed), what is \
open, and what the next step is. Write plain text, and call no tool."""
_SUMMARY = "This summary takes the place of the conversation so far:\n\n"


def summary_request(body: chat.ChatBody, service: Service) -> tuple[Generate, str]:
    """The engine's request for a summary of a conversation, whose `body` is changed to ask for it, and which part of it
    is left out. The prompt begins as those before, so that little of it has to be read. Raises ApiError."""
    context = service.context_length
    body.messages = [*body.messages, ChatMessage("user", _ASKED)]
    body.max_tokens = int(context * SUMMARY_SHARE) or None
    body.reasoning, body.response_format, body.tool_choice = Reasoning(effort="none"), None, None
    body.logprobs = body.top_logprobs = None
    cut = 0
    for chars in _SHORT_CHARS if context else ():
        if (found := _cut_to(chars, body, service, context)) is None:
            break
        cut = max(cut, found)
    notes = [f"{counted(cut, 'long message')} cut, for which the context has no room" if cut else ""]
    whole = body.messages
    notes.append(shorten(body, service))
    if all(message.role in STAY for message in body.messages[:-1]):
        body.messages = whole  # of nothing there is no summary: the engine refuses so much
    return chat.chat_request(body, service)[0], "; ".join(filter(None, notes))


def _cut_to(chars: int, body: chat.ChatBody, service: Service, context: int) -> int | None:
    """Cuts long results of tools and texts of the model to `chars` characters, the oldest first, until the conversation
    fits, and returns how many it has cut; None if it did before. (An agent works for long at one message of the user,
    so that there are no whole turns to leave out.)"""
    request, _ = chat.chat_request(body, service)
    assert isinstance(request.prompt, Chat)
    n_chars = sum(len(message.content) for message in request.prompt.messages)
    n_tokens = n_chars // _CHARS_A_TOKEN
    if n_chars < MAX_TEXT_BYTES:
        n_tokens = len(service.file.encoded(request.prompt, request.sampling.effort).ids)
    too_many = n_tokens - (context - (body.max_tokens or 0))
    if too_many <= 0:
        return None
    left_chars, cut = int(too_many * _SHORTER_BY * n_chars / max(1, n_tokens)), 0
    shorter = list[ChatMessage]()
    for message in body.messages:
        text = text_of(message)
        if (
            message.role in ("tool", "assistant")
            and len(text) > 2 * chars + len(_LEFT_OUT)
            and left_chars > 0
        ):
            left_chars -= len(text) - chars
            cut += 1
            message = replace(message, content=f"{text[:chars]}{_LEFT_OUT}")
        shorter.append(message)
    body.messages = shorter
    return cut


def is_asked(items: Sequence[dict[str, Any]]) -> bool:
    """Whether the items of a request end with the one that asks for a summary."""
    return bool(items) and items[-1].get("type") == TRIGGER


def message_of(item: dict[str, Any]) -> ChatMessage | None:
    """The summary in an item; None for what another server has sealed."""
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed.startswith(SEALED):
        return None
    try:
        text = base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
    except ValueError:
        return None
    return ChatMessage("user", _SUMMARY + text)


@dataclass
class Compaction(ResponseReply):
    """A response whose one item is the summary."""

    repeats: Sequence[dict[str, Any]] | None = None
    """The items before the summary, if it was asked for at its own path: there it has the messages of the user among
    them, the newest ones, as far as `SUMMARY_SHARE` of `context` has room for them."""
    context: Callable[[], int] = lambda: 0
    """The context in tokens, which is not known before the model is loaded."""
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)

    def _repeated(self) -> list[Json]:
        kept, left_chars = list[Json](), int(_CHARS_A_TOKEN * SUMMARY_SHARE * self.context())
        for item in reversed(self.repeats or ()):
            if item.get("type", "message") != "message" or item.get("role") != "user":
                continue
            content = item.get("content") or ""
            parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
            left_chars -= sum(len(str(part.get("text") or "")) for part in parts)
            if left_chars < 0:
                break
            head = {"id": f"msg_{secrets.token_hex(24)}", "type": "message", "status": "completed"}
            kept.append({**head, "role": "user", "content": parts})
        return kept[::-1]

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        self._texts.append(delta.content)
        self._thoughts.append(delta.reasoning)
        return ()

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        self._end, self._ended = end, int(time.time())
        summary = "".join(self._texts).strip() or "".join(self._thoughts).strip()
        if not summary:
            raise ApiError(500, "The model wrote no summary of the conversation.", "server_error")
        sealed = SEALED + base64.b64encode(summary.encode()).decode()
        item = {"id": f"cmp_{secrets.token_hex(24)}", "type": "compaction", "encrypted_content": sealed}
        self.output.append(item)
        for kind in ("response.output_item.added", "response.output_item.done"):
            yield self._event(kind, output_index=0, item=item)

    def close(self) -> Iterable[Json]:
        return super().close() if self.repeats is None else ()

    def whole(self) -> Json:
        if self.repeats is None:
            return self.response("completed")
        return {
            "id": self.id,
            "object": "response.compaction",
            "created_at": self.created,
            "output": [*self._repeated(), *self.output],
            "usage": self._usage(),
        }
