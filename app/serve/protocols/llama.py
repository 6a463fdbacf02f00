"""llama-server's own completions (llama.cpp, tools/server/README.md), which editors and frontends ask for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.serve.answer import AnswerBegun, AnswerDelta, AnswerEnd
from app.serve.errors import wrong
from app.serve.http import COMMENTED, Framing
from app.serve.line_ends import LineEnds
from app.serve.protocols.common import logprobs
from app.serve.protocols.common.figures import timings
from app.serve.protocols.common.formats import grammar_of
from app.serve.protocols.common.pictures import without_pictures
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.requests import MAX_LOGPROBS, Body, generate, variants
from app.serve.protocols.completions import MAX_PROMPTS, ends_of_fill_in, fill_in
from app.serve.protocols.llama_settings import settings
from app.serve.service import Service
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Generate, RawText, Token, TokenIds


class ExtraText(msgspec.Struct):
    text: str = ""
    filename: str = ""


class LlamaBody(Body, kw_only=True):
    """`n_probs`: so many of the most probable tokens are shown at each place. `response_fields`: those of the last
    value, also within others ("timings/prompt_n"). `n_indent` and `t_max_predict_ms`: see `LineEnds`."""

    n_predict: int | None = None
    n_probs: int | None = None
    n_cmpl: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: float | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None


class InfillBody(LlamaBody, kw_only=True):
    """`prompt` is what the answer begins with. `input_extra`: other files."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraText] | None = None
    prompt: str | None = None


class PromptText(msgspec.Struct):
    prompt_string: str
    multimodal_data: list[Any] | None = None


class CompletionBody(LlamaBody, kw_only=True):
    """`prompt`: a text, a list of token ids and texts, or a list of several prompts."""

    prompt: str | list[str | int | list[str | int] | PromptText] | PromptText
    image_data: list[Any] | None = None


def completion_asked(body: CompletionBody, service: Service) -> Asked:
    """May take as long as its texts are. Raises ApiError."""
    if body.image_data:
        raise without_pictures("image_data")
    return _asked(body, _prompts(body.prompt, service.file.tokenizer), service)


def infill_asked(body: InfillBody, service: Service) -> Asked:
    """A request for the text between two others. It leaves out what does not fit into the context, as editors expect.
    May take as long as its texts are. Raises ApiError."""
    files = [(extra.filename, extra.text) for extra in body.input_extra or ()]
    context = service.ready.context_length if service.ready else None
    room = None if context is None else context - min(max(body.n_predict or 0, 0), context // 2) - 1
    prompt = fill_in(service, body.input_prefix, body.input_suffix, body.prompt or "", files, room)
    return _asked(body, [prompt], service, ends_of_fill_in(service))


def _asked(
    body: LlamaBody,
    prompts: Sequence[RawText | TokenIds],
    service: Service,
    ends: frozenset[int] = frozenset(),
) -> Asked:
    shown = body.n_probs or 0
    if not 0 <= shown <= MAX_LOGPROBS:
        raise wrong(f"n_probs must be from 0 to {MAX_LOGPROBS}, not {shown}.", "n_probs")
    if shown and body.post_sampling_probs:
        raise wrong("Probabilities are those before sampling changes them.", "post_sampling_probs")
    if body.n_cmpl is not None:
        body.n = body.n_cmpl
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    grammar, tokenizer = grammar_of(body), service.file.tokenizer
    body.logit_bias = _bias_by_id(body, tokenizer)
    made = [generate(body, prompt, service.sampling, limit, shown, grammar) for prompt in prompts]
    requests = [each for request in made for each in variants(request, body.answers)]
    indent, most_ms = max(body.n_indent or 0, 0), max(body.t_max_predict_ms or 0, 0)
    return Asked(
        requests,
        LlamaReply(service.model, tokenizer, requests, body, is_list=len(requests) > 1),
        bool(body.stream),
        body.stops,
        body.asker,
        stop_ids=body.stop_ids | ends,
        lines=(lambda: LineEnds(indent, most_ms / 1e3)) if indent or most_ms else None,
    )


def _prompts(given: Any, tokenizer: Tokenizer) -> list[RawText | TokenIds]:
    """The prompts of a request. A list with a number in it is one of tokens. Raises ApiError."""
    if not isinstance(given, list):
        return [_prompt(given, tokenizer)]
    if any(isinstance(part, int) for part in given):
        return [_prompt(given, tokenizer)]
    if not 0 < len(given) <= MAX_PROMPTS:
        raise wrong(f"prompt is one text, one list of token ids, or up to {MAX_PROMPTS} of these.", "prompt")
    return [_prompt(each, tokenizer) for each in given]


def _prompt(given: Any, tokenizer: Tokenizer) -> RawText | TokenIds:
    """Raises ApiError."""
    match given:
        case str():
            return RawText(text=given, special=True)
        case PromptText():
            if given.multimodal_data:
                raise without_pictures("prompt")
            return RawText(text=given.prompt_string, special=True)
        case list():
            if not all(isinstance(part, int | str) for part in given):
                raise wrong("A prompt is a text, or a list of token ids and texts.", "prompt")
            ids: list[int] = []
            for i, part in enumerate(given):
                ids += (
                    [part]
                    if isinstance(part, int)
                    else tokenizer.encode(part, special=True, add_special=not i)
                )
            return TokenIds(ids=tuple(ids))
    raise AssertionError(given)


def _bias_by_id(body: LlamaBody, tokenizer: Tokenizer) -> list[tuple[int | str, float | bool]] | None:
    """The biases by token id. A bias for a text goes to each token of the text."""
    given = body.logit_bias or []
    pairs = given.items() if isinstance(given, dict) else given
    return [
        (id, value)
        for token, value in pairs
        for id in (
            [token]
            if isinstance(token, int) or (isinstance(given, dict) and token.isdecimal())
            else tokenizer.encode(token)
        )
    ]


@dataclass
class _Gathered:
    content: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_n: int = 0
    end: AnswerEnd | None = None


@dataclass
class LlamaReply(Reply):
    """`is_list`: of several answers."""

    model: str
    tokenizer: Tokenizer
    requests: Sequence[Generate]
    body: LlamaBody
    is_list: bool = False
    framing: Framing = COMMENTED
    answers: dict[int, _Gathered] = field(default_factory=dict)

    def begun(self, i: int, begun: AnswerBegun) -> Iterable[Json]:
        self._answer(i).prompt_n = begun.prompt_n
        return ()

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        answer = self._answer(i)
        answer.content.append(delta.content)
        answer.tokens += delta.tokens
        ids = self._ids(delta.tokens)
        if delta.content or (self.body.n_probs and ids):  # not for the token that ends the answer
            yield {
                "index": i,
                "content": delta.content,
                "tokens": ids,
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": len(answer.tokens),
                "tokens_evaluated": answer.prompt_n,
                **self._probabilities(delta.tokens),
            }

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        self._answer(i).end = end
        yield self._last(i, is_streamed=True)

    def whole(self) -> Json | list[Json]:
        made = [self._last(i) for i in sorted(self.answers)]
        return made if self.is_list else made[0]

    def _answer(self, i: int) -> _Gathered:
        return self.answers.setdefault(i, _Gathered())

    def _ids(self, tokens: Iterable[Token]) -> list[int]:
        return [token.id for token in tokens if token.id not in self.tokenizer.eos_ids]

    def _probabilities(self, tokens: Iterable[Token]) -> Json:
        if not (shown := self.body.n_probs):
            return {}
        entries = logprobs.of_chat(logprobs.reported(tokens, self.tokenizer), self.tokenizer, shown)
        return {"completion_probabilities": entries}

    def _last(self, i: int, *, is_streamed: bool = False) -> Json:
        """The answer, whose text has been sent before if it is streamed."""
        answer, request = self._answer(i), self.requests[i]
        assert answer.end
        end, text = answer.end.finished, "".join(answer.content)
        kind = "word" if answer.end.stop_text else "limit" if answer.end.finish_reason == "length" else "eos"
        returned = self._ids(answer.tokens) if self.body.return_tokens and not is_streamed else []
        value: Json = {
            "index": i,
            "content": "" if is_streamed else text,
            "tokens": returned,
            "id_slot": -1,
            "stop": True,
            "model": self.model,
            "tokens_predicted": end.predicted_n,
            "tokens_evaluated": end.prompt_n,
            "generation_settings": settings(request, end.seed, self.body.stops, bool(self.body.stream)),
            "prompt": self._prompt(request),
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": answer.end.stop_text,
            "tokens_cached": end.cached_n,
            "timings": timings(end),
            **({} if is_streamed else self._probabilities(answer.tokens)),
        }
        return _only(value, self.body.response_fields) if self.body.response_fields else value

    def _prompt(self, request: Generate) -> str:
        if isinstance(request.prompt, RawText):
            return request.prompt.text
        assert isinstance(request.prompt, TokenIds)
        return self.tokenizer.decode(request.prompt.ids)


def _only(value: Json, fields: Sequence[str]) -> Json:
    """The fields that are named, those within others by their path."""
    chosen: Json = {}
    for path in fields:
        found: Any = value
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            chosen[path] = found
    return chosen
