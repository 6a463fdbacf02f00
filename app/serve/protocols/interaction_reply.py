"""Answers to Google's interactions, as steps: https://ai.google.dev/gemini-api/docs/interactions/streaming."""

import base64
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from app.serve.answer import AnswerDelta, AnswerEnd
from app.serve.errors import ApiError, said
from app.serve.http import DATA, Framing
from app.serve.protocols.common.blocks import Block, Blocks, Change, Closed, Grown, Opened
from app.serve.protocols.common.reply import Json, Reply

_EVENTS = replace(
    DATA, frame=lambda value: b"event: %s\n%s" % (value["event_type"].encode(), DATA.frame(value))
)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@dataclass
class InteractionReply(Reply):
    model: str
    shows_thoughts: bool = False
    previous_id: str | None = None
    labels: dict[str, str] | None = None
    keep: Callable[[], None] | None = None
    id: str = field(default_factory=lambda: f"v1_{secrets.token_urlsafe(24)}")
    created: str = field(default_factory=_now)
    framing: Framing = _EVENTS
    _blocks: Blocks = field(default_factory=Blocks)
    _end: AnswerEnd | None = None
    _events: int = 0
    _is_created: bool = False

    def begin(self) -> Iterable[Json]:
        if not self._is_created:
            self._is_created = True
            yield self._event("interaction.created", interaction=self._head())
            yield self._event(
                "interaction.status_update", interaction_id=self.id, status=self._head()["status"]
            )

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        return self._written(self._blocks.feed(delta))

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        yield from self._written(self._blocks.close())
        self._end = end

    def close(self) -> Iterable[Json]:
        yield self._event("interaction.completed", interaction=self._head() | self._usage())

    def failed(self, error: ApiError) -> Json:
        return self._event("error", error={"code": str(error.code or error.kind), "message": said(error)})

    def whole(self) -> Json:
        named = {"previous_interaction_id": self.previous_id, "labels": self.labels}
        return self._head() | {k: v for k, v in named.items() if v} | {"steps": self.steps} | self._usage()

    @property
    def steps(self) -> list[Json]:
        return [self._step(block, is_done=True) for block in self._blocks.all]

    def _head(self) -> Json:
        return {
            "id": self.id,
            "object": "interaction",
            "model": self.model,
            "status": self._status(),
            "created": self.created,
            "updated": _now(),
        }

    def _status(self) -> str:
        if not self._end:
            return "in_progress"
        if self._end.finish_reason == "length":
            return "incomplete"
        return "requires_action" if any(block.kind == "call" for block in self._blocks.all) else "completed"

    def _usage(self) -> Json:
        if not self._end:
            return {}
        finished, thoughts = self._end.finished, self._end.reasoning_n
        return {
            "usage": {
                "total_input_tokens": finished.prompt_n,
                "total_cached_tokens": finished.cached_n,
                "total_output_tokens": finished.predicted_n - thoughts,
                "total_thought_tokens": thoughts,
                "total_tool_use_tokens": 0,
                "total_tokens": finished.prompt_n + finished.predicted_n,
            }
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"event_type": kind, "event_id": str(self._events), **fields}

    def _written(self, changes: Iterable[Change]) -> Iterator[Json]:
        for change in changes:
            block = change.block
            if isinstance(change, Opened):
                step = self._step(block, is_done=False)
                yield self._event("step.start", index=block.index, step=step)
            elif isinstance(change, Grown):
                if change.text and (block.kind != "thinking" or self.shows_thoughts):
                    yield self._delta(block, _grown(block, change.text))
            elif isinstance(change, Closed):
                if block.kind == "thinking":
                    yield self._delta(
                        block, {"type": "thought_signature", "signature": signature(block.text)}
                    )
                yield self._event("step.stop", index=block.index)

    def _delta(self, block: Block, delta: Json) -> Json:
        return self._event("step.delta", index=block.index, delta=delta)

    def _step(self, block: Block, *, is_done: bool) -> Json:
        """A step that is not done has no content yet."""
        match block.kind:
            case "text":
                return {"type": "model_output", "content": [text_content(block.text)] if is_done else []}
            case "call":
                arguments = _arguments(block.text) if is_done else {}
                return {"type": "function_call", "id": block.id, "name": block.name, "arguments": arguments}
        if not is_done:
            return {"type": "thought"}
        summary = {"summary": [text_content(block.text)]} if self.shows_thoughts else {}
        return {"type": "thought", "signature": signature(block.text)} | summary


def _grown(block: Block, text: str) -> Json:
    match block.kind:
        case "text":
            return text_content(text)
        case "call":
            return {"type": "arguments_delta", "arguments": text}
    return {"type": "thought_summary", "content": text_content(text)}


def text_content(text: str) -> Json:
    return {"type": "text", "text": text}


def signature(text: str) -> str:
    """All that the model thought: clients that keep conversations themselves send it back."""
    return base64.b64encode(text.encode()).decode()


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the answer was cut off
        return {}
