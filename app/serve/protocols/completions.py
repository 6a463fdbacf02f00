"""OpenAI's completions: texts that are continued, or filled in, without the chat template. Clients apply templates of
their own, so the names of special tokens in a text are these tokens.

https://platform.openai.com/docs/api-reference/completions/create. With `echo` and `logprobs`, the tokens of the prompt
come with their log-probabilities, which is how lm-evaluation-harness asks for them.
"""

import dataclasses
import itertools
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from app.serve.answer import AnswerBegun, AnswerDelta, AnswerEnd
from app.serve.errors import of_failure, wrong
from app.serve.protocols.common import logprobs
from app.serve.protocols.common.figures import figures, fingerprint, timings
from app.serve.protocols.common.formats import grammar_of
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.requests import MAX_LOGPROBS, MAX_N, Body, generate, variants
from app.serve.service import Service
from engine.errors import ContextFullError
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Failed, Generate, RawText, Token, TokenIds

MAX_PROMPTS = 128


class Segments(Struct):
    """Tabby's text before the cursor of an editor, and after it."""

    prefix: str
    suffix: str | None = None


class TextBody(Body, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    segments: Segments | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def asked(body: TextBody, service: Service) -> Asked:
    """Raises ApiError."""
    if body.segments:
        body.prompt, body.suffix = body.segments.prefix, body.segments.suffix
    if body.prompt is None:
        raise wrong("There is no prompt.", "prompt")
    shown = body.logprobs
    if shown is not None and not 0 <= shown <= MAX_LOGPROBS:
        raise wrong(f"logprobs must be from 0 to {MAX_LOGPROBS}, not {shown}.", "logprobs")
    made = body.answers if body.best_of is None else body.best_of
    if not body.answers <= made <= MAX_N or (body.stream and made > body.answers):
        raise wrong(f"best_of must be from n to {MAX_N}, and n if the answers are streamed.", "best_of")
    if body.echo and shown is not None and (body.stream or body.stops):
        raise wrong("echo with logprobs is neither streamed nor has stop texts.", "echo")
    wanted = max(shown or 0, 1) if shown is not None or made > body.answers else 0
    prompts = [_filled_in(prompt, body, service) for prompt in _prompts(body.prompt)]
    grammar = grammar_of(body)
    requests, echoes = list[Generate](), list[Echo | None]()
    for prompt in prompts:
        request = generate(body, prompt, service.sampling, body.max_tokens, wanted, grammar)
        echo = _echo(prompt, service, with_logprobs=shown is not None) if body.echo else None
        if echo and echo.forced:
            limit = request.max_tokens
            more = None if limit is None else limit + len(echo.forced)
            first = TokenIds(ids=echo.ids[:1])
            request = replace(request, prompt=first, forced=echo.forced, max_tokens=more)
        requests += variants(request, made)
        echoes += [echo] * made
    reply = TextReply(
        service.model,
        service.file.tokenizer,
        len(prompts),
        body.answers,
        made,
        shown,
        body.includes_usage,
        echoes,
    )
    ends = body.stop_ids | ends_of_fill_in(service) if body.suffix else body.stop_ids
    return Asked(requests, reply, bool(body.stream), body.stops, body.asker, stop_ids=ends)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[RawText | TokenIds]:
    """Raises ApiError."""
    if isinstance(prompt, str):
        return [RawText(text=prompt, special=True)]
    ids = [id for id in prompt if isinstance(id, int)]
    if ids and len(ids) == len(prompt):
        return [TokenIds(ids=tuple(ids))]
    if ids or not 0 < len(prompt) <= MAX_PROMPTS:
        raise wrong(f"prompt is one text, one list of token ids, or up to {MAX_PROMPTS} of these.", "prompt")
    return [
        RawText(text=one, special=True) if isinstance(one, str) else TokenIds(ids=tuple(one))
        for one in prompt
        if not isinstance(one, int)
    ]


def _filled_in(prompt: RawText | TokenIds, body: TextBody, service: Service) -> RawText | TokenIds:
    """With a `suffix`, the answer is what lies between. Raises ApiError."""
    if not body.suffix:
        return prompt
    if body.echo or not isinstance(prompt, RawText):
        raise wrong("suffix needs a text as prompt, and no echo.", "suffix")
    return fill_in(service, prompt.text, body.suffix)


def fill_in(
    service: Service,
    before: str,
    after: str,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
    room: int | None = None,
) -> TokenIds:
    """A prompt for what lies between two texts: see `FillIn.prompt`. Raises ApiError."""
    tokens = service.file.fill_in
    if tokens is None:
        raise wrong("This model has no tokens to fill in between two texts.", "suffix")
    return TokenIds(ids=tokens.prompt(service.file.tokenizer, before, after, begun, files, room))


def ends_of_fill_in(service: Service) -> frozenset[int]:
    """Tokens with which a model says that it has filled in all."""
    return service.file.fill_in.ends if service.file.fill_in else frozenset()


@dataclass(frozen=True)
class Echo:
    """A prompt that is part of its answer. If its log-probabilities are asked for, the engine gets the first of its
    tokens as the prompt, and the others as a `forced` reply."""

    text: str
    ids: tuple[int, ...] = ()

    @property
    def forced(self) -> tuple[int, ...]:
        return self.ids[1:]


def _echo(prompt: RawText | TokenIds, service: Service, *, with_logprobs: bool) -> Echo:
    """Raises ApiError."""
    tokenizer = service.file.tokenizer
    if isinstance(prompt, TokenIds):
        return Echo(tokenizer.decode(prompt.ids), prompt.ids if with_logprobs else ())
    if not with_logprobs:
        return Echo(prompt.text)
    try:
        most = service.ready.context_length if service.ready else None
        ids = tokenizer.encode(prompt.text, special=True, add_special=True, most=most)
    except ContextFullError as error:
        raise of_failure(Failed.from_error(error)) from None
    if not ids:
        raise wrong("The prompt is empty.", "prompt")
    return Echo(prompt.text, tuple(ids))


@dataclass
class _Gathered:
    content: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    characters: int = 0  # of the tokens whose log-probabilities were sent
    end: AnswerEnd | None = None


@dataclass
class TextReply(Reply):
    """`made` answers to each of `prompts`, of which the `n` best are shown. `shown`: how many of the most probable
    tokens the client wants to see; None if it did not ask for log-probabilities. `echoes`: what comes before each
    answer."""

    model: str
    tokenizer: Tokenizer
    prompts: int = 1
    n: int = 1
    made: int = 1
    shown: int | None = None
    includes_usage: bool = False
    echoes: Sequence[Echo | None] = (None,)
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_urlsafe(18)}")
    created: int = field(default_factory=lambda: int(time.time()))
    answers: dict[int, _Gathered] = field(default_factory=dict)

    def begun(self, i: int, begun: AnswerBegun) -> Iterable[Json]:
        if echo := self.echoes[i]:
            yield self._chunk(i, echo.text, None)

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        answer = self.answers.setdefault(i, _Gathered())
        answer.content.append(delta.content)
        answer.tokens += delta.tokens
        if shown := self._logprobs(delta.tokens, answer.characters):
            answer.characters += sum(map(len, shown["tokens"]))
        if delta.content or shown:
            yield self._chunk(i, delta.content, shown)

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        if (echo := self.echoes[i]) and (n := len(echo.forced)):
            finished = replace(end.finished, prompt_n=1 + n, predicted_n=end.finished.predicted_n - n)
            end = dataclasses.replace(end, finished=finished)
        self.answers.setdefault(i, _Gathered()).end = end
        last = self._chunk(i, "", None, end.finish_reason)
        yield last if self.includes_usage else last | {"timings": timings(end.finished)}

    def close(self) -> Iterable[Json]:
        if self.includes_usage:
            yield self._head() | {"choices": []} | self._figures()

    def whole(self) -> Json:
        choices: list[Json] = []
        for start in range(0, len(self.answers), self.made):
            answers = [(self.answers[i], self.echoes[i]) for i in range(start, start + self.made)]
            if self.made > self.n:
                answers.sort(key=_likelihood, reverse=True)
            for answer, echo in answers[: self.n]:
                reason = answer.end.finish_reason if answer.end else None
                text, shown = "".join(answer.content), self._logprobs(answer.tokens)
                if echo and echo.ids:
                    text, shown = self._echoed(echo, answer)
                elif echo:
                    text = echo.text + text
                choice = {"index": len(choices), "finish_reason": reason, "logprobs": shown, "text": text}
                choices.append(choice)
        return self._head() | {"choices": choices} | self._figures()

    def _echoed(self, echo: Echo, answer: _Gathered) -> tuple[str, Json]:
        """Text and log-probabilities with those of the prompt. Nothing is known of its first token."""
        ends = answer.end and answer.end.finish_reason == "stop"
        tokens = [t for t in answer.tokens if t.logprob is not None]
        if ends and len(tokens) > len(echo.forced):
            del tokens[-1]
        first = logprobs.spelled(self.tokenizer, echo.ids[0])
        shown = self._entries(tokens, len(first))
        for name, value in (("tokens", first), ("token_logprobs", None), ("top_logprobs", None)):
            shown[name].insert(0, value)
        shown["text_offset"].insert(0, 0)
        return first + "".join(answer.content), shown

    def _figures(self) -> Json:
        ends: Sequence[AnswerEnd] = [a.end for _, a in sorted(self.answers.items()) if a.end]
        return figures(ends, self.prompts)

    def _head(self) -> Json:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return head | {"system_fingerprint": fingerprint()}

    def _chunk(self, i: int, text: str, logprobs: Json | None, finish_reason: str | None = None) -> Json:
        choice = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head() | {"choices": [choice]}

    def _logprobs(self, tokens: Iterable[Token], offset: int = 0) -> Json | None:
        reported = logprobs.reported(tokens, self.tokenizer)
        return self._entries(reported, offset) if self.shown is not None and reported else None

    def _entries(self, tokens: Sequence[Token], offset: int) -> Json:
        """`offset`: how many characters come before."""

        def spelled(id: int) -> str:
            return logprobs.spelled(self.tokenizer, id)

        texts = [spelled(t.id) for t in tokens]
        return {
            "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
            "tokens": texts,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{spelled(top.id): top.logprob for top in t.top[: self.shown]} for t in tokens],
        }


def _likelihood(answer: tuple[_Gathered, Echo | None]) -> float:
    """The mean log-probability of its tokens."""
    known = [t.logprob for t in answer[0].tokens if t.logprob is not None]
    return sum(known) / len(known) if known else 0.0
