"""The paths of Hugging Face's servers: text-generation-inference (`/generate`, `/generate_stream`), which the hub's own
library asks for, and the vectors of text-embeddings-inference (`/embed`).

https://huggingface.github.io/text-generation-inference and https://huggingface.github.io/text-embeddings-inference
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from app.serve.answer import AnswerBegun, AnswerDelta, AnswerEnd
from app.serve.errors import wrong
from app.serve.http import COMMENTED, Framing
from app.serve.protocols import embeddings
from app.serve.protocols.common.formats import grammar_of
from app.serve.protocols.common.logprobs import spelled
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.requests import Body, generate
from app.serve.service import Service
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import RawText, Token

_LIMIT = 100  # tokens of an answer without max_new_tokens
_SAMPLED = "temperature", "top_k", "top_p", "typical_p"


class TgiGrammar(msgspec.Struct):
    type: Literal["json", "regex", "json_schema"]
    value: str | dict[str, Any]


class Parameters(msgspec.Struct, kw_only=True):
    """Fields that are not here are ignored. Without one of `_SAMPLED` or `do_sample`, each token is the most probable
    one."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_sequences: list[str] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    grammar: TgiGrammar | None = None


class TgiBody(msgspec.Struct, kw_only=True):
    """`inputs`: a text; several for vectors alone."""

    inputs: str | list[str]
    parameters: Parameters | None = None
    stream: bool | None = None
    model: str | None = None


class EmbedBody(msgspec.Struct, kw_only=True):
    inputs: str | list[str | int | list[int]]
    normalize: bool | None = None
    dimensions: int | None = None
    model: str | None = None


def generate_asked(body: TgiBody, service: Service) -> Asked:
    """Raises ApiError."""
    return _asked(body, service, is_streamed=False)


def stream_asked(body: TgiBody, service: Service) -> Asked:
    """Raises ApiError."""
    return _asked(body, service, is_streamed=True)


def root_asked(body: TgiBody, service: Service) -> Asked:
    """The form of the hub: a list of one answer, or vectors if the model is made for them. Raises ApiError."""
    if service.file.pooling and service.file.pooling != "rank":
        return embed_asked(
            EmbedBody(inputs=[*body.inputs] if isinstance(body.inputs, list) else body.inputs), service
        )
    return _asked(body, service, is_streamed=bool(body.stream), is_list=True)


def embed_asked(body: EmbedBody, service: Service) -> Asked:
    """Raises ApiError."""
    reply = TeiReply(service.model, dimensions=body.dimensions, is_plain=body.normalize is False)
    return embeddings.texts_asked(body.inputs, "inputs", body.dimensions, reply, service)


def info(service: Service) -> Json:
    """What both kinds of servers say of their model."""
    context = service.context_length
    pooling = service.file.pooling
    kind = (
        {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}} if pooling == "rank" else {}
    )
    return {
        "model_id": service.model,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "model_type": kind or {"embedding": {"pooling": pooling or "mean"}},
        "max_concurrent_requests": service.parallel + service.max_waiting,
        "max_best_of": 1,
        "max_stop_sequences": 64,
        "max_input_length": context,
        "max_input_tokens": context,
        "max_total_tokens": context,
        "max_client_batch_size": embeddings.MAX_INPUTS,
        "version": "3.3.6",
    }


def _asked(body: TgiBody, service: Service, *, is_streamed: bool, is_list: bool = False) -> Asked:
    given = body.parameters or Parameters()
    if not isinstance(body.inputs, str):
        raise wrong("inputs is one text.", "inputs")
    limit = _LIMIT if given.max_new_tokens is None else given.max_new_tokens
    if limit < 1:
        raise wrong("max_new_tokens must be 1 or more.", "max_new_tokens")
    is_drawn = given.do_sample or any(getattr(given, name) is not None for name in _SAMPLED)
    asked = Body(
        temperature=given.temperature if is_drawn else 0.0,
        top_k=given.top_k,
        top_p=given.top_p,
        repetition_penalty=given.repetition_penalty,
        frequency_penalty=given.frequency_penalty,
        seed=given.seed,
        stop=[*(given.stop or ()), *(given.stop_sequences or ())],
    )
    if given.grammar and given.grammar.type == "regex":
        asked.regex = str(given.grammar.value)
    elif given.grammar:
        value = given.grammar.value
        inner = value.get("schema") if isinstance(value, dict) else None
        asked.json_schema = inner if isinstance(inner, dict) else value
    prompt = RawText(text=body.inputs, special=True)
    request = generate(asked, prompt, service.sampling, limit, 1, grammar_of(asked))
    before = body.inputs if given.return_full_text else ""
    reply = TgiReply(service.file.tokenizer, before, bool(given.details), is_list)
    return Asked([request], reply, is_streamed, asked.stops)


@dataclass
class TgiReply(Reply):
    """`before`: what the whole answer begins with."""

    tokenizer: Tokenizer
    before: str
    has_details: bool
    is_list: bool
    framing: Framing = COMMENTED
    content: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_n: int = 0
    waiting: Json | None = None
    end: AnswerEnd | None = None

    def begun(self, i: int, begun: AnswerBegun) -> Iterable[Json]:
        self.prompt_n = begun.prompt_n
        return ()

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        """The last token is sent with the end."""
        self.content.append(delta.content)
        if delta.content or delta.tokens:
            if self.waiting:
                yield self.waiting
            self.tokens += delta.tokens
            shown = (
                self._token(delta.tokens[-1]) if delta.tokens else {"id": 0, "logprob": 0.0, "special": False}
            )
            token = shown | {"text": delta.content}
            self.waiting = {
                "index": len(self.tokens),
                "token": token,
                "generated_text": None,
                "details": None,
            }

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        self.end = end
        nothing = {"id": 0, "text": "", "logprob": 0.0, "special": True}
        last = self.waiting or {"index": 1, "token": nothing}
        text = self.before + "".join(self.content)
        yield last | {"generated_text": text, "details": self._details(end)}

    def whole(self) -> Json | list[Json]:
        assert self.end
        answer: Json = {"generated_text": self.before + "".join(self.content)}
        if self.has_details:
            tokens = [self._token(token) for token in self.tokens]
            answer["details"] = self._details(self.end) | {"prefill": [], "tokens": tokens}
        return [answer] if self.is_list else answer

    def _token(self, token: Token) -> Json:
        text = spelled(self.tokenizer, token.id)
        special = self.tokenizer.is_hidden(token.id)
        return {"id": token.id, "text": text, "logprob": token.logprob or 0.0, "special": special}

    def _details(self, end: AnswerEnd) -> Json:
        reason = (
            "length" if end.finish_reason == "length" else "stop_sequence" if end.stop_text else "eos_token"
        )
        finished = end.finished
        seed = {"seed": finished.seed, "input_length": self.prompt_n}
        return {"finish_reason": reason, "generated_tokens": finished.predicted_n, **seed}


@dataclass
class TeiReply(embeddings.EmbeddingsReply):
    """A list of vectors."""

    is_plain: bool = False

    def whole(self) -> Any:
        if self.is_plain:
            return [vector.tolist() for vector in self.in_order]
        return [embeddings.numbers(vector) for vector in embeddings.cut(self.in_order, self.dimensions)]
