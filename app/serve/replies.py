"""What clients get: the JSON of OpenAI's protocol, with llama-server's timings and models."""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.serve.answer import AnswerDelta, AnswerEnd
from engine.formats.tokenizer import Tokenizer
from engine.protocol.events import Finished, Ready, Token, ToolCall, decode_rate, prefill_rate

OWNER = "orin-chat"
Json = dict[str, Any]


@dataclass
class Reply:
    """Writes one of the answers to a request, in chunks (`chunk`, `ending`) or as a whole (`choice`). `index` is its
    place among them. `logprobs`: how many of the most probable tokens the client wants to see; None if it did not ask
    for log-probabilities."""

    kind: Literal["chat", "text"]
    model: str
    tokenizer: Tokenizer
    logprobs: int | None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    index: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    _calls: int = 0

    # --- in chunks ---

    def first(self) -> Json | None:
        return self._chunk({"role": "assistant", "content": ""}) if self.kind == "chat" else None

    def chunk(self, delta: AnswerDelta) -> Json | None:
        """None if there is nothing to say."""
        logprobs = self._logprobs(delta.tokens)
        if self.kind == "text":
            text = {"text": delta.content}
            return self._chunk(text, logprobs=logprobs) if delta.content or logprobs else None
        new: Json = {}
        if delta.content or logprobs:
            new["content"] = delta.content
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
        if delta.call:
            new["tool_calls"] = [{"index": self._calls} | _call(delta.call)]
            self._calls += 1
        return self._chunk(new, logprobs=logprobs) if new else None

    def ending(self, end: AnswerEnd, timed: bool) -> Json:
        """The last chunk, with timings if it is `timed`."""
        last = self._chunk({} if self.kind == "chat" else {"text": ""}, end.finish_reason)
        return last | {"timings": timings(end.finished)} if timed else last

    def usage(self, ends: Sequence[AnswerEnd]) -> Json:
        """The chunk after all answers, for clients that ask for it. As llama-server has it, timings come with it."""
        return self._head("chunk") | {"choices": []} | _figures(ends)

    # --- as a whole ---

    def choice(self, deltas: Sequence[AnswerDelta], end: AnswerEnd) -> Json:
        content = "".join(delta.content for delta in deltas)
        logprobs = self._logprobs([token for delta in deltas for token in delta.tokens])
        choice: Json = {"index": self.index, "finish_reason": end.finish_reason, "logprobs": logprobs}
        if self.kind == "text":
            choice["text"] = content
        else:
            calls = [_call(delta.call) for delta in deltas if delta.call]
            message: Json = {"role": "assistant", "content": content}
            if calls:
                message |= {"content": content.strip() or None, "tool_calls": calls}
            if reasoning := "".join(delta.reasoning for delta in deltas):
                message["reasoning_content"] = reasoning
            choice["message"] = message
        return choice

    def whole(self, choices: Sequence[Json], ends: Sequence[AnswerEnd]) -> Json:
        return self._head("") | {"choices": choices} | _figures(ends)

    # --- parts ---

    def _head(self, part: str) -> Json:
        kind, id = "text_completion", f"cmpl-{self.id}"
        if self.kind == "chat":
            kind, id = "chat.completion.chunk" if part else "chat.completion", f"chat{id}"
        return {"id": id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, new: Json, finish_reason: str | None = None, logprobs: Json | None = None) -> Json:
        """`new`: the delta of a chat, or the text and its field."""
        part = {"delta": new} if self.kind == "chat" else new
        choice = {"index": self.index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head("chunk") | {"choices": [choice]}

    def _logprobs(self, tokens: Iterable[Token]) -> Json | None:
        """Without the token that ends the answer."""
        shown = [t for t in tokens if t.logprob is not None and t.id not in self.tokenizer.eos_ids]
        if self.logprobs is None or not shown:
            return None
        n = self.logprobs
        if self.kind == "chat":
            content = [
                self._token(t.id, t.logprob)
                | {"top_logprobs": [self._token(top.id, top.logprob) for top in t.top[:n]]}
                for t in shown
            ]
            return {"content": content, "refusal": None}
        texts = [self._spelled(t.id) for t in shown]
        return {
            "tokens": texts,
            "token_logprobs": [t.logprob for t in shown],
            "top_logprobs": [{self._spelled(top.id): top.logprob for top in t.top[:n]} for t in shown],
        }

    def _token(self, id: int, logprob: float | None) -> Json:
        return {"token": self._spelled(id), "logprob": logprob, "bytes": [*self.tokenizer.piece(id)]}

    def _spelled(self, id: int) -> str:
        return self.tokenizer.piece(id).decode("utf-8", "replace")


def _figures(ends: Sequence[AnswerEnd]) -> Json:
    """The usage of all answers together. Timings are those of one."""
    timed = {"timings": timings(ends[0].finished)} if len(ends) == 1 else {}
    return {"usage": usage(ends)} | timed


def usage(ends: Sequence[AnswerEnd]) -> Json:
    """The prompt of several answers counts once."""
    prompt = ends[0].finished
    predicted = sum(end.finished.predicted_n for end in ends)
    return {
        "prompt_tokens": prompt.prompt_n,
        "completion_tokens": predicted,
        "total_tokens": prompt.prompt_n + predicted,
        "prompt_tokens_details": {"cached_tokens": prompt.cached_n},
        "completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_n for end in ends)},
    }


def timings(end: Finished) -> Json:
    """As llama-server gives them. `prompt_n` counts the tokens that were computed; the rates are those of
    `engine.protocol.events`."""
    prompt_n = end.prompt_n - end.cached_n
    return {
        "cache_n": end.cached_n,
        "prompt_n": prompt_n,
        "prompt_ms": end.prompt_ms,
        "prompt_per_token_ms": end.prompt_ms / max(prompt_n, 1),
        "prompt_per_second": prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms),
        "predicted_n": end.predicted_n,
        "predicted_ms": end.predicted_ms,
        "predicted_per_token_ms": end.predicted_ms / max(end.predicted_n - 1, 1),
        "predicted_per_second": decode_rate(end.predicted_n, end.predicted_ms),
    }


def models(id: str, created: int, ready: Ready | None, vocab_size: int) -> Json:
    """The list of the one model, with llama-server's `meta`."""
    model: Json = {"id": id, "object": "model", "created": created, "owned_by": OWNER}
    if ready:
        info = ready.model
        model["meta"] = {
            "n_ctx": ready.context_length,
            "n_ctx_train": info.trained_context,
            "n_vocab": vocab_size,
            "n_params": info.parameters,
            "size": info.file_bytes,
            "ftype": info.quantization,
        }
    return {"object": "list", "data": [model]}


def _call(call: ToolCall) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
