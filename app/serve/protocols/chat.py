"""OpenAI's chat completions, with llama-server's timings. All other chats become a `ChatBody`, too.

https://platform.openai.com/docs/api-reference/chat/create, and llama.cpp's tools/server/README.md.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from app.serve.answer import AnswerDelta, AnswerEnd, CallPiece
from app.serve.errors import wrong
from app.serve.protocols.common import logprobs
from app.serve.protocols.common.conversation import ChatMessage, conversation
from app.serve.protocols.common.figures import figures, fingerprint, timings
from app.serve.protocols.common.formats import format_of
from app.serve.protocols.common.pictures import unseen
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.requests import MAX_LOGPROBS, generate, variants
from app.serve.protocols.common.thinking import ThinkingBody, wanted
from app.serve.protocols.common.tools import Choice, Named, ToolChoice, Tools, chosen_tools
from app.serve.service import Service
from engine.formats.templates.template import Prompt
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tools.grammars import reply_grammar
from engine.protocol.events import Chat, Generate, Grammar, Prefilling, Token


class ChatBody(ThinkingBody, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None  # OpenAI's first form of tools
    function_call: Literal["none", "auto"] | Named | None = None
    modalities: list[str] | None = None
    n_predict: int | None = None  # llama-server's, like the next one; 0 only reads the prompt
    return_progress: bool | None = None


def asked(body: ChatBody, service: Service) -> Asked:
    """Raises ApiError."""
    request, tools = chat_request(body, service)
    shown = body.top_logprobs or 0 if body.logprobs else None
    is_old = bool(body.functions and not body.tools)
    reply = ChatReply(
        service.model,
        service.file.tokenizer,
        shown,
        tools,
        body.includes_usage,
        bool(body.return_progress),
        calls_a_function=is_old,
    )
    return Asked(
        variants(request, body.answers),
        reply,
        bool(body.stream),
        body.stops,
        body.asker,
        tools.note,
        one_call=is_old or body.parallel_tool_calls is False,
        stop_ids=body.stop_ids,
    )


def chat_request(body: ChatBody, service: Service) -> tuple[Generate, Tools]:
    """The engine's request. Raises ApiError."""
    if not body.messages:
        raise wrong("There are no messages.", "messages")
    if "audio" in (body.modalities or ()):
        raise wrong("This server answers with text only.", "modalities")
    asked = body.top_logprobs or 0
    if not 0 <= asked <= MAX_LOGPROBS:
        raise wrong(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {asked}.", "top_logprobs")
    if asked and not body.logprobs:
        raise wrong("top_logprobs needs logprobs: true.", "top_logprobs")
    form = service.file.form
    tools = chosen_tools(*_given_tools(body), form)
    format = format_of(body)
    if isinstance(format, Grammar):
        if tools.shown:
            raise wrong("Beside tools, an answer may keep to a JSON schema, but not to a grammar.", "tools")
        grammar: Grammar | None = format
    else:
        grammar = reply_grammar(form, tools.shown, format, is_required=tools.is_required)
    limits = (body.max_completion_tokens, body.max_tokens, body.n_predict)
    limit = next((each for each in limits if each is not None), None)
    if limit == 0 and body.n_predict is None:
        raise wrong("max_tokens must be 1 or more.", "max_tokens")
    think, effort = wanted(body, service.think)
    sampling = replace(service.sampling, effort=effort) if effort else service.sampling
    sees = service.ready is None or service.ready.model.sees
    prompt = Chat(messages=conversation(body.messages, sees=sees), think=think, tools=tools.shown)
    if prompt.pictures and not sees:
        raise unseen(service.model)
    shown = max(asked, 1) if body.logprobs else 0
    return generate(body, prompt, sampling, limit, shown, grammar), tools


def _given_tools(body: ChatBody) -> tuple[list[dict[str, Any]] | None, Choice]:
    if body.tools or not body.functions:
        return body.tools, body.tool_choice
    one = body.function_call
    choice = ToolChoice(function=one) if isinstance(one, Named) else one
    return [{"type": "function", "function": function} for function in body.functions], choice


def encoded(body: ChatBody, service: Service) -> Prompt:
    """The prompt that the engine makes of it. May take as long as the text is. Raises ApiError."""
    request, _ = chat_request(body, service)
    assert isinstance(request.prompt, Chat)
    return service.file.encoded(request.prompt, request.sampling.effort)


@dataclass
class _Gathered:
    """What an answer has so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    end: AnswerEnd | None = None


@dataclass
class ChatReply(Reply):
    """`shown`: how many of the most probable tokens the client wants to see; None if it did not ask for
    log-probabilities. `calls_a_function`: a call has OpenAI's first form."""

    model: str
    tokenizer: Tokenizer
    shown: int | None = None
    tools: Tools = field(default_factory=Tools)
    includes_usage: bool = False
    with_progress: bool = False
    calls_a_function: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_urlsafe(18)}")
    created: int = field(default_factory=lambda: int(time.time()))
    answers: dict[int, _Gathered] = field(default_factory=dict)
    _started: float = field(default_factory=time.perf_counter)

    def begun(self, i: int, begun: object) -> Iterable[Json]:
        yield self._chunk(i, {"role": "assistant", "content": ""})

    def progress(self, i: int, prefilling: Prefilling) -> Iterable[Json]:
        if self.with_progress:
            progress = {
                "total": prefilling.total,
                "cache": prefilling.cached,
                "processed": prefilling.done,
                "time_ms": round((time.perf_counter() - self._started) * 1e3),
            }
            yield self._chunk(i, {}) | {"prompt_progress": progress}

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        answer = self.answers.setdefault(i, _Gathered())
        shown = self._logprobs(delta.tokens)
        new: Json = {}
        if delta.content or shown:
            new["content"] = delta.content
            answer.content.append(delta.content)
            answer.tokens += delta.tokens
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
            answer.reasoning.append(delta.reasoning)
        if (piece := delta.call) and (call := self._called(answer, piece)):
            new |= {"function_call": call["function"]} if self.calls_a_function else {"tool_calls": [call]}
        if new:
            yield self._chunk(i, new, logprobs=shown)

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        answer = self.answers.setdefault(i, _Gathered())
        answer.end = end
        custom = [(n, call) for n, call in enumerate(answer.calls) if call.name in self.tools.custom]
        for n, call in custom:
            yield self._chunk(i, {"tool_calls": [{"index": n} | self._call(call)]})
        last = self._chunk(i, {}, self._reason(end))
        yield last if self.includes_usage else last | {"timings": timings(end.finished)}

    def close(self) -> Iterable[Json]:
        """As llama-server has it, timings come with the usage."""
        if self.includes_usage:
            yield self._head("chat.completion.chunk") | {"choices": []} | figures(self._ends)

    def whole(self) -> Json:
        choices = [self._choice(i, answer) for i, answer in sorted(self.answers.items())]
        return self._head("chat.completion") | {"choices": choices} | figures(self._ends)

    # --- parts ---

    @property
    def _ends(self) -> Sequence[AnswerEnd]:
        return [answer.end for _, answer in sorted(self.answers.items()) if answer.end]

    def _choice(self, i: int, answer: _Gathered) -> Json:
        content = "".join(answer.content)
        message: Json = {"role": "assistant", "content": content, "refusal": None}  # which some clients need
        if answer.calls:
            calls = [self._call(call) for call in answer.calls]
            called = (
                {"function_call": calls[0]["function"]} if self.calls_a_function else {"tool_calls": calls}
            )
            message |= {"content": content.strip() or None} | called
        if answer.reasoning:
            message["reasoning_content"] = "".join(answer.reasoning)
        reason = self._reason(answer.end) if answer.end else None
        shown = self._logprobs(answer.tokens)
        return {"index": i, "finish_reason": reason, "logprobs": shown, "message": message}

    def _reason(self, end: AnswerEnd) -> str:
        calls = end.finish_reason == "tool_calls" and self.calls_a_function
        return "function_call" if calls else end.finish_reason

    def _head(self, kind: str) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": fingerprint()}

    def _chunk(
        self, i: int, new: Json, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> Json:
        choice = {"index": i, "delta": new, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _logprobs(self, tokens: Iterable[Token]) -> Json | None:
        reported = logprobs.reported(tokens, self.tokenizer)
        if self.shown is None or not reported:
            return None
        return {"content": logprobs.of_chat(reported, self.tokenizer, self.shown), "refusal": None}

    def _called(self, answer: _Gathered, piece: CallPiece) -> Json | None:
        """The piece of a call as a chunk has it. A custom tool's input is sent at the end, as one piece."""
        if piece.name:
            answer.calls.append(piece)
        else:
            last = answer.calls[-1]
            answer.calls[-1] = CallPiece(last.arguments + piece.arguments, last.id, last.name)
        call, n = answer.calls[-1], len(answer.calls) - 1
        if call.name in self.tools.custom:
            return None
        if piece.name:
            return {"index": n} | self._call(piece)
        return {"index": n, "function": {"arguments": piece.arguments}}

    def _call(self, call: CallPiece) -> Json:
        if call.name in self.tools.custom:
            given = {"name": call.name, "input": self.tools.text_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": given}
        return {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
