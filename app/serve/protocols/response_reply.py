"""An answer as a response, and as a stream of events with sequence numbers."""

import base64
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.serve.answer import AnswerDelta, AnswerEnd
from app.serve.errors import CONTEXT, ApiError, said
from app.serve.http import NAMED_DATA, Framing
from app.serve.protocols.common import logprobs
from app.serve.protocols.common.blocks import Block, Blocks, Change, Grown, Opened
from app.serve.protocols.common.figures import usage
from app.serve.protocols.common.reply import Json, Reply
from app.serve.protocols.common.tools import Tools, flat
from app.serve.protocols.response_body import ResponsesBody, Spaces, TextFormat
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Sampling

SEALED = "orin-chat:"  # begins `encrypted_content`, which is not encrypted


def new_id() -> str:
    """The id of a new response."""
    return f"resp_{secrets.token_hex(24)}"


@dataclass
class ResponseReply(Reply):
    body: ResponsesBody
    model: str
    tokenizer: Tokenizer
    tools: Tools
    spaces: Spaces = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    keep: Callable[[], None] | None = None
    id: str = field(default_factory=new_id)
    created: int = field(default_factory=lambda: int(time.time()))
    framing: Framing = NAMED_DATA
    output: list[Json] = field(default_factory=list)
    _blocks: Blocks = field(default_factory=Blocks)
    _ids: dict[int, str] = field(default_factory=dict)
    _end: AnswerEnd | None = None
    _ended: int | None = None
    _sequence: int = -1
    _is_created: bool = False

    # --- the stream ---

    def begin(self) -> Iterable[Json]:
        if not self._is_created:
            self._is_created = True
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self.response("in_progress"))

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        return self._written(self._blocks.feed(delta))

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        yield from self._written(self._blocks.close())
        self._end, self._ended = end, int(time.time())

    def close(self) -> Iterable[Json]:
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def pings(self) -> Iterable[Json]:
        """Events, since Codex CLI does not count comments."""
        if not self._is_created:
            yield from self.begin()
        else:
            # These may have megabytes, and were in the first events.
            short: Json = {"instructions": None, "tools": []}
            yield self._event("response.in_progress", response=self.response("in_progress") | short)

    def failed(self, error: ApiError) -> Json:
        code = error.code if error.code == CONTEXT else error.kind
        response = self.response("failed") | {"error": {"code": code, "message": said(error)}}
        return self._event("response.failed", response=response)

    def whole(self) -> Json:
        is_cut = self._end is not None and self._end.finish_reason == "length"
        return self.response("incomplete" if is_cut else "completed")

    # --- parts ---

    def response(self, status: str) -> Json:
        """All that https://www.openresponses.org/specification asks for is there: clients with strict types need it."""
        body, names = self.body, ("temperature", "top_p", "presence_penalty", "frequency_penalty")
        sampling = {name: getattr(self.sampling, name) for name in names}
        chosen = msgspec.to_builtins(body.tool_choice)
        if isinstance(chosen, dict):
            chosen = {name: value for name, value in chosen.items() if value is not None}
        format = body.text.format if body.text and body.text.format else TextFormat()
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self._ended if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.model,
            "output": list(self.output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "conversation": {"id": id} if (id := body.conversation_id) else None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": self._summary,
            },
            "store": body.is_stored,
            **sampling,
            "text": {"format": format.shown},
            "service_tier": "default",
            "tool_choice": chosen or "auto",
            "tools": [_shown(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "usage": self._usage(),
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> Json | None:
        if not self._end:
            return None
        used = usage([self._end])
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._end.finished.cached_n, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._end.reasoning_n},
            "total_tokens": used["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence, **fields}

    def _written(self, changes: Iterable[Change]) -> Iterator[Json]:
        for change in changes:
            block = change.block
            if isinstance(change, Opened):
                yield from self._opened(block)
            elif isinstance(change, Grown):
                yield from self._grown(block, change)
            else:
                yield from self._closed(block)

    @property
    def _summary(self) -> str | None:
        """The kind of summary that the client wants to see of the model's thoughts. It gets all of them: clients that
        ask so show nothing else."""
        return self.body.reasoning.summary if self.body.reasoning else None

    def _opened(self, block: Block) -> Iterator[Json]:
        yield self._event(
            "response.output_item.added", output_index=block.index, item=self._item(block, False)
        )
        if block.kind == "thinking" and self._summary:
            part = self._part(block) | {"text": ""}
            yield self._event("response.reasoning_summary_part.added", **self._place(block), part=part)
        elif block.kind != "call":
            part = self._part(block) | {"text": ""}
            yield self._event("response.content_part.added", **self._place(block), part=part)

    def _grown(self, block: Block, grown: Grown) -> Iterator[Json]:
        place = self._place(block)
        match block.kind:
            case "thinking":
                kind = "reasoning_summary_text" if self._summary else "reasoning_text"
                yield self._event(f"response.{kind}.delta", **place, delta=grown.text)
            case "text":
                shown = self._logprobs(list(grown.tokens))
                yield self._event("response.output_text.delta", **place, delta=grown.text, logprobs=shown)
            case "call" if block.name not in self.tools.custom and grown.text:
                yield self._event("response.function_call_arguments.delta", **place, delta=grown.text)

    def _closed(self, block: Block) -> Iterator[Json]:
        place, text = self._place(block), block.text
        match block.kind:
            case "thinking" if self._summary:
                yield self._event("response.reasoning_summary_text.done", **place, text=text)
                part = self._part(block)
                yield self._event("response.reasoning_summary_part.done", **place, part=part)
            case "thinking":
                yield self._event("response.reasoning_text.done", **place, text=text)
            case "text":
                shown = self._logprobs(block.tokens)
                yield self._event("response.output_text.done", **place, text=text, logprobs=shown)
            case "call" if block.name in self.tools.custom:
                given = self.tools.text_input(text)
                yield self._event("response.custom_tool_call_input.delta", **place, delta=given)
                yield self._event("response.custom_tool_call_input.done", **place, input=given)
            case "call":
                done = "response.function_call_arguments.done"
                yield self._event(done, **place, name=block.name, arguments=text)
        if block.kind == "text" or (block.kind == "thinking" and not self._summary):
            yield self._event("response.content_part.done", **place, part=self._part(block))
        item = self._item(block, True)
        self.output.append(item)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> Json:
        place: Json = {"item_id": self._id(block), "output_index": block.index}
        if block.kind == "call":
            return place
        return place | {"summary_index" if block.kind == "thinking" and self._summary else "content_index": 0}

    def _id(self, block: Block) -> str:
        kinds = {"thinking": "rs", "text": "msg", "call": "ctc" if block.name in self.tools.custom else "fc"}
        return self._ids.setdefault(block.index, f"{kinds[block.kind]}_{secrets.token_hex(24)}")

    def _part(self, block: Block) -> Json:
        if block.kind == "thinking":
            return {"type": "summary_text" if self._summary else "reasoning_text", "text": block.text}
        shown = self._logprobs(block.tokens)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": shown}

    def _item(self, block: Block, is_done: bool) -> Json:
        """A block as an item. One that is not done has no content yet."""
        head: Json = {"id": self._id(block), "status": "completed" if is_done else "in_progress"}
        parts = [self._part(block)] if is_done else []
        match block.kind:
            case "thinking":
                shown = {"summary": parts} if self._summary else {"summary": [], "content": parts}
                item = {"type": "reasoning", **head, **shown}
                if is_done and "reasoning.encrypted_content" in (self.body.include or ()):
                    item["encrypted_content"] = SEALED + base64.b64encode(block.text.encode()).decode()
                return item
            case "text":
                return {"type": "message", **head, "role": "assistant", "content": parts}
        space, name = self.spaces.get(block.name, ("", block.name))
        call = {**head, "call_id": block.id, "name": name} | ({"namespace": space} if space else {})
        if block.name in self.tools.custom:
            given = self.tools.text_input(block.text) if is_done else ""
            return {"type": "custom_tool_call", **call, "input": given}
        return {"type": "function_call", **call, "arguments": block.text if is_done else ""}

    def _logprobs(self, tokens: Sequence[Any]) -> list[Json]:
        if not self.body.wants_logprobs:
            return []
        reported = logprobs.reported(tokens, self.tokenizer)
        return logprobs.of_chat(reported, self.tokenizer, self.body.top_logprobs or 0)


def _shown(tool: Json) -> Json:
    """A tool as a response shows it again."""
    shown = flat(tool)
    if shown.get("type") != "function":
        return shown
    return {"description": None, "parameters": None, "strict": False} | shown
