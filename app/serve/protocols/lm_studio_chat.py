"""LM Studio's chats, whose earlier turns the server remembers as it does those of responses:
https://lmstudio.ai/docs/developer/rest/chat. Tools that LM Studio itself would run, by MCP, are refused.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from app.serve.answer import AnswerDelta, AnswerEnd
from app.serve.errors import ApiError, openai_form, wrong
from app.serve.http import NAMED_DATA, Framing
from app.serve.protocols import chat
from app.serve.protocols.common.blocks import Block, Blocks, Change, Closed, Grown, Opened
from app.serve.protocols.common.figures import usage
from app.serve.protocols.common.remembered import Conversations, Remembered
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.thinking import Reasoning
from app.serve.protocols.response_body import ResponsesBody
from app.serve.protocols.response_reply import new_id
from app.serve.protocols.responses import as_chat
from app.serve.service import Service
from engine.protocol.events import Prefilling, decode_rate

_NAMES = {"thinking": "reasoning", "text": "message", "call": "tool_call"}


class _Item(msgspec.Struct):
    type: str = "message"
    content: str = ""
    data_url: str = ""


class LmChatBody(msgspec.Struct, kw_only=True):
    input: str | list[_Item]
    model: str | None = None
    system_prompt: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    max_output_tokens: int | None = None
    reasoning: Literal["off", "on", "low", "medium", "high"] | None = None
    integrations: list[Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None

    @property
    def earlier_id(self) -> str | None:
        """The id of the response that it goes on with."""
        return self.previous_response_id


def asked(body: LmChatBody, service: Service, kept: Conversations, owner: str) -> Asked:
    """May take as long as the text is. Raises ApiError."""
    if body.integrations:
        raise wrong("The server runs no tools: integrations is not supported.", "integrations")
    effort: Any = {"off": "none", "on": None}.get(body.reasoning or "on", body.reasoning)
    response = ResponsesBody(
        input=[
            {"role": "user", "content": body.input if isinstance(body.input, str) else _parts(body.input)}
        ],
        instructions=body.system_prompt,
        previous_response_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        reasoning=Reasoning(effort=effort),
    )
    made, _, items, _ = as_chat(response, kept, owner)
    made.top_k, made.min_p, made.repeat_penalty = body.top_k, body.min_p, body.repeat_penalty
    request, _ = chat.chat_request(made, service)
    reply = LmChatReply(service.model)
    if body.store is not False:
        reply.id = new_id()
        reply.keep = lambda: kept.keep(
            reply.id, Remembered(owner, [*items, *reply.output], len(items), reply.whole())
        )
    return Asked([request], reply, bool(body.stream))


def _parts(items: list[_Item]) -> list[Json]:
    """The parts of a message in the form of responses. Raises ApiError."""
    parts = list[Json]()
    for i, item in enumerate(items):
        if item.type == "image":
            parts.append({"type": "input_image", "image_url": item.data_url})
        elif item.type in ("message", "text"):
            parts.append({"type": "input_text", "text": item.content})
        else:
            raise wrong(f'An input is a "message" or an "image", not {item.type[:80]!r}.', f"input[{i}]")
    return parts


@dataclass
class LmChatReply(Reply):
    model: str
    id: str = ""
    keep: Callable[[], None] | None = None
    framing: Framing = NAMED_DATA
    _blocks: Blocks = field(default_factory=Blocks)
    _end: AnswerEnd | None = None
    _has_begun: bool = False
    _is_reading: bool = False

    def begin(self) -> Iterable[Json]:
        if not self._has_begun:
            self._has_begun = self._is_reading = True
            yield {"type": "chat.start", "model_instance_id": self.model}
            yield {"type": "prompt_processing.start"}

    def progress(self, i: int, prefilling: Prefilling) -> Iterable[Json]:
        if self._is_reading:
            share = prefilling.done / max(1, prefilling.total)
            yield {"type": "prompt_processing.progress", "progress": share}

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        yield from self._read()
        yield from self._written(self._blocks.feed(delta))

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        yield from self._read()
        yield from self._written(self._blocks.close())
        self._end = end

    def close(self) -> Iterable[Json]:
        yield {"type": "chat.end", "result": self.whole()}

    def failed(self, error: ApiError) -> Json:
        return {"type": "error"} | openai_form(error)

    @property
    def output(self) -> list[Json]:
        """What the model said, as items of a response."""
        return [_remembered(block) for block in self._blocks.all]

    def whole(self) -> Json:
        output = [{"type": _NAMES[block.kind], "content": block.text} for block in self._blocks.all]
        result: Json = {"model_instance_id": self.model, "output": output}
        if self._end:
            used, finished = usage([self._end]), self._end.finished
            result["stats"] = {
                "input_tokens": used["prompt_tokens"],
                "total_output_tokens": used["completion_tokens"],
                "reasoning_output_tokens": self._end.reasoning_n,
                "tokens_per_second": decode_rate(finished.predicted_n, finished.predicted_ms),
                "time_to_first_token_seconds": finished.prompt_ms / 1e3,
            }
        return result | ({"response_id": self.id} if self.id else {})

    def _read(self) -> Iterator[Json]:
        if self._is_reading:
            self._is_reading = False
            yield {"type": "prompt_processing.end"}

    def _written(self, changes: Iterable[Change]) -> Iterator[Json]:
        for change in changes:
            name = _NAMES[change.block.kind]
            match change:
                case Opened():
                    yield {"type": f"{name}.start"}
                case Grown() if change.text:
                    yield {"type": f"{name}.delta", "content": change.text}
                case Closed():
                    yield {"type": f"{name}.end"}


def _remembered(block: Block) -> Json:
    """As an item of a response."""
    if block.kind == "thinking":
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": block.text}]}
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": block.text}]}
