"""OpenAI's completions: texts that are continued without the chat template.

https://platform.openai.com/docs/api-reference/completions/create. With `echo` and `logprobs`, the tokens of the prompt
come with their log-probabilities, which is how lm-evaluation-harness asks for them.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from app.serve.answer import AnswerDelta, AnswerEnd
from app.serve.errors import wrong
from app.serve.protocols import logprobs
from app.serve.protocols.figures import figures, timings
from app.serve.protocols.reply import Asked, Json, Reply
from app.serve.protocols.requests import MAX_LOGPROBS, MAX_N, Body, generate, grammar_of, variants
from app.serve.service import Service
from engine.formats.tokenizer import Tokenizer
from engine.protocol.events import RawText, Token, TokenIds

MAX_PROMPTS = 128


class TextBody(Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def asked(body: TextBody, service: Service) -> Asked:
    """Raises ApiError."""
    for name in ("echo", "suffix"):
        if getattr(body, name):
            raise wrong(f"{name} is not supported.", name)
    shown = body.logprobs
    if shown is not None and not 0 <= shown <= MAX_LOGPROBS:
        raise wrong(f"logprobs must be from 0 to {MAX_LOGPROBS}, not {shown}.", "logprobs")
    made = body.answers if body.best_of is None else body.best_of
    if not body.answers <= made <= MAX_N or (body.stream and made > body.answers):
        raise wrong(f"best_of must be from n to {MAX_N}, and n if the answers are streamed.", "best_of")
    wanted = max(shown or 0, 1) if shown is not None or made > body.answers else 0
    prompts = _prompts(body.prompt)
    requests = [
        one
        for prompt in prompts
        for one in variants(
            generate(body, prompt, service.sampling, body.max_tokens, wanted, grammar_of(body)), made
        )
    ]
    reply = TextReply(
        service.model, service.file.tokenizer, len(prompts), body.answers, made, shown, body.includes_usage
    )
    return Asked(requests, reply, bool(body.stream), body.stops, body.asker)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[RawText | TokenIds]:
    """Raises ApiError."""
    if isinstance(prompt, str):
        return [RawText(text=prompt)]
    ids = [id for id in prompt if isinstance(id, int)]
    if ids and len(ids) == len(prompt):
        return [TokenIds(ids=tuple(ids))]
    if ids or not 0 < len(prompt) <= MAX_PROMPTS:
        raise wrong(f"prompt is one text, one list of token ids, or up to {MAX_PROMPTS} of these.", "prompt")
    return [
        RawText(text=one) if isinstance(one, str) else TokenIds(ids=tuple(one))
        for one in prompt
        if not isinstance(one, int)
    ]


@dataclass
class _Gathered:
    content: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    end: AnswerEnd | None = None


@dataclass
class TextReply(Reply):
    """`made` answers to each of `prompts`, of which the `n` best are shown. `shown`: how many of the most probable
    tokens the client wants to see; None if it did not ask for log-probabilities."""

    model: str
    tokenizer: Tokenizer
    prompts: int = 1
    n: int = 1
    made: int = 1
    shown: int | None = None
    includes_usage: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_urlsafe(18)}")
    created: int = field(default_factory=lambda: int(time.time()))
    answers: dict[int, _Gathered] = field(default_factory=dict)

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        answer = self.answers.setdefault(i, _Gathered())
        answer.content.append(delta.content)
        answer.tokens += delta.tokens
        shown = self._logprobs(delta.tokens)
        if delta.content or shown:
            yield self._chunk(i, delta.content, shown)

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        self.answers.setdefault(i, _Gathered()).end = end
        last = self._chunk(i, "", None, end.finish_reason)
        yield last if self.includes_usage else last | {"timings": timings(end.finished)}

    def close(self) -> Iterable[Json]:
        if self.includes_usage:
            yield self._head() | {"choices": []} | self._figures()

    def whole(self) -> Json:
        choices: list[Json] = []
        for start in range(0, len(self.answers), self.made):
            answers = [self.answers[i] for i in range(start, start + self.made)]
            if self.made > self.n:
                answers.sort(key=_likelihood, reverse=True)
            for answer in answers[: self.n]:
                shown, text = self._logprobs(answer.tokens), "".join(answer.content)
                reason = answer.end.finish_reason if answer.end else None
                choice = {"index": len(choices), "finish_reason": reason, "logprobs": shown, "text": text}
                choices.append(choice)
        return self._head() | {"choices": choices} | self._figures()

    def _figures(self) -> Json:
        ends: Sequence[AnswerEnd] = [a.end for _, a in sorted(self.answers.items()) if a.end]
        return figures(ends, self.prompts)

    def _head(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _chunk(self, i: int, text: str, logprobs: Json | None, finish_reason: str | None = None) -> Json:
        choice = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head() | {"choices": [choice]}

    def _logprobs(self, tokens: Iterable[Token]) -> Json | None:
        reported = logprobs.reported(tokens, self.tokenizer)
        if self.shown is None or not reported:
            return None
        texts = [logprobs.spelled(self.tokenizer, t.id) for t in reported]
        return {
            "tokens": texts,
            "token_logprobs": [t.logprob for t in reported],
            "top_logprobs": [
                {logprobs.spelled(self.tokenizer, top.id): top.logprob for top in t.top[: self.shown]}
                for t in reported
            ],
        }


def _likelihood(answer: _Gathered) -> float:
    """The mean log-probability of its tokens."""
    known = [t.logprob for t in answer.tokens if t.logprob is not None]
    return sum(known) / len(known) if known else 0.0
