"""Vectors in place of answers: OpenAI's embeddings, Ollama's, and the ranking of documents.

https://platform.openai.com/docs/api-reference/embeddings/create, Ollama's docs/api.md, and llama.cpp's
tools/server/README.md for `/rerank`, whose fields are those of Jina and Cohere.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.serve.answer import AnswerEnd
from app.serve.bodies import MAX_BODY_BYTES
from app.serve.errors import ApiError, wrong
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.service import Service
from engine.protocol.events import Generate, Pooling, RawText, TokenIds

MAX_INPUTS = 2048
_CHARACTERS = 32  # tokens have fewer on the average
Floats = NDArray[np.float32]


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """`content` and `embd_normalize` are llama-server's."""

    input: str | list[str | int | list[int]] | None = None
    content: str | list[str | int | list[int]] | None = None
    embd_normalize: int | None = None
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class EmbedBody(msgspec.Struct, kw_only=True):
    """Ollama's. `options` and `keep_alive` are ignored."""

    input: str | list[str] | None = None
    model: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None


class OldEmbedBody(msgspec.Struct, kw_only=True):
    """Ollama's first form, of one text."""

    prompt: str | None = None
    model: str | None = None


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    """`texts` in place of `documents` asks for the answer of Hugging Face's text-embeddings-inference."""

    query: str
    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    return_text: bool | None = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreBody(msgspec.Struct, kw_only=True):
    """vLLM's: `text_2` by how well they fit `text_1`, each with its own if there are as many of both."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


@dataclass
class _Vectors(Reply):
    """Gathers a vector for each of the texts."""

    model: str
    vectors: dict[int, Floats] = field(default_factory=dict)
    ends: dict[int, AnswerEnd] = field(default_factory=dict)

    def vector(self, i: int, values: bytes) -> None:
        self.vectors[i] = np.frombuffer(values, "<f4")

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        self.ends[i] = end
        return ()

    @property
    def in_order(self) -> Sequence[Floats]:
        return [self.vectors[i] for i in sorted(self.vectors)]

    @property
    def prompt_n(self) -> int:
        return sum(end.finished.prompt_n for end in self.ends.values())

    @property
    def usage(self) -> Json:
        return {"prompt_tokens": self.prompt_n, "total_tokens": self.prompt_n}


@dataclass
class EmbeddingsReply(_Vectors):
    dimensions: int | None = None
    is_base64: bool = False

    def whole(self) -> Json:
        data = [
            {"object": "embedding", "index": i, "embedding": self._shown(vector)}
            for i, vector in enumerate(cut(self.in_order, self.dimensions))
        ]
        id = f"embd-{secrets.token_hex(12)}"  # Mistral's and vLLM's clients need one
        return {"id": id, "object": "list", "data": data, "model": self.model, "usage": self.usage}

    def _shown(self, vector: NDArray[np.float64]) -> str | msgspec.Raw:
        if self.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return numbers(vector)


@dataclass
class LlamaEmbeddingsReply(_Vectors):
    """llama-server's own form: a list, in which each text has a list of vectors, here of one."""

    is_plain: bool = False
    """Vectors are as the model gives them, not of length 1."""

    def whole(self) -> list[Json]:
        wide = [vector.astype(np.float64) for vector in self.in_order]
        vectors = wide if self.is_plain else cut(self.in_order, None)
        return [{"index": i, "embedding": [numbers(vector)]} for i, vector in enumerate(vectors)]


@dataclass
class EmbedReply(_Vectors):
    dimensions: int | None = None
    is_one: bool = False
    _asked: float = field(default_factory=time.perf_counter)

    def whole(self) -> Json:
        vectors = [*map(numbers, cut(self.in_order, self.dimensions))]
        if self.is_one:
            return {"embedding": vectors[0]}
        total_ms = (time.perf_counter() - self._asked) * 1e3
        prompt_ms = sum(end.finished.prompt_ms for end in self.ends.values())
        return {
            "model": self.model,
            "embeddings": vectors,
            "total_duration": round(total_ms * 1e6),  # in nanoseconds
            "load_duration": round(max(total_ms - prompt_ms, 0) * 1e6),
            "prompt_eval_count": self.prompt_n,
        }


@dataclass
class GeminiEmbedReply(_Vectors):
    dimensions: int | None = None
    is_one: bool = False

    def whole(self) -> Json:
        vectors = [{"values": numbers(vector)} for vector in cut(self.in_order, self.dimensions)]
        return {"embedding": vectors[0]} if self.is_one else {"embeddings": vectors}


@dataclass
class RerankReply(_Vectors):
    texts: Sequence[str] | None = None
    top_n: int | None = None
    is_list: bool = False

    def whole(self) -> Json | list[Json]:
        scores = [float(vector[0]) for vector in self.in_order]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top_n]
        if self.is_list:
            texts = self.texts
            # text-embeddings-inference gives probabilities.
            if all(len(vector) == 1 for vector in self.in_order):
                scores = [float(1 / (1 + np.exp(-score))) for score in scores]
            return [{"index": i, "score": scores[i]} | ({"text": texts[i]} if texts else {}) for i in order]
        results: list[Json] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if self.texts is not None:
            for result in results:
                result["document"] = {"text": self.texts[result["index"]]}
        return {"object": "list", "model": self.model, "usage": self.usage, "results": results}


@dataclass
class ScoreReply(_Vectors):
    def whole(self) -> Json:
        data = [
            {"index": i, "object": "score", "score": float(vector[0])}
            for i, vector in enumerate(self.in_order)
        ]
        return {"object": "list", "model": self.model, "usage": self.usage, "data": data}


def cut(vectors: Iterable[Floats], dimensions: int | None) -> Iterable[NDArray[np.float64]]:
    """The first `dimensions` of vectors, of length 1."""
    for vector in vectors:
        wide = vector[:dimensions].astype(np.float64)
        yield wide / max(float(np.linalg.norm(wide)), 1e-12)


def numbers(vector: NDArray[np.float64]) -> msgspec.Raw:
    """A vector as JSON. It is encoded by itself, so that other threads go on between vectors."""
    return msgspec.Raw(msgspec.json.encode(vector.round(8).tolist()))


def openai_asked(body: EmbeddingsBody, service: Service) -> Asked:
    """`content` in place of `input` asks for llama-server's form. Raises ApiError."""
    if body.input is None:
        return llama_asked(body, service)
    _check_dimensions(body.dimensions, service)
    reply = EmbeddingsReply(service.model, dimensions=body.dimensions)
    reply.is_base64 = body.encoding_format == "base64"
    return _asked(_prompts(body.input, "input"), reply, service, body.user or "")


def llama_asked(body: EmbeddingsBody, service: Service) -> Asked:
    """Raises ApiError."""
    given, param = (body.content, "content") if body.input is None else (body.input, "input")
    if given is None:
        raise wrong("There is no text: input or content.", "input")
    if body.embd_normalize not in (None, -1, 2):
        raise wrong("embd_normalize is 2, for vectors of length 1, or -1.", "embd_normalize")
    reply = LlamaEmbeddingsReply(service.model, is_plain=body.embd_normalize == -1)
    return _asked(_prompts(given, param), reply, service, body.user or "")


def texts_asked(
    given: str | list[str | int | list[int]],
    param: str,
    dimensions: int | None,
    reply: Reply,
    service: Service,
) -> Asked:
    """Asks for the vectors of texts, for a `reply` of another protocol. Raises ApiError."""
    _check_dimensions(dimensions, service)
    return _asked(_prompts(given, param), reply, service)


def _prompts(given: str | list[str | int | list[int]], param: str) -> list[RawText | TokenIds]:
    """Raises ApiError."""
    ids = [id for id in given if isinstance(id, int)]
    texts: Sequence[str | list[int]]
    if isinstance(given, str):
        texts = [given]
    elif ids and len(ids) == len(given):
        texts = [ids]
    elif ids:
        raise wrong(f"{param} is texts, or lists of token ids, not both.", param)
    else:
        texts = [one for one in given if not isinstance(one, int)]
    _check_count(len(texts), param)
    return [RawText(text=one) if isinstance(one, str) else TokenIds(ids=tuple(one)) for one in texts]


def ollama_asked(body: EmbedBody, service: Service) -> Asked | Json:
    """Raises ApiError. Without a text, the model is to be loaded only. May take as long as its texts are."""
    _check_dimensions(body.dimensions, service)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        return {"model": service.model, "embeddings": []}
    _check_count(len(texts), "input")
    cuts = body.truncate is not False
    prompts = [_beginning(text, service) if cuts else RawText(text=text) for text in texts]
    return _asked(prompts, EmbedReply(service.model, dimensions=body.dimensions), service)


def old_ollama_asked(body: OldEmbedBody, service: Service) -> Asked | Json:
    """Raises ApiError. May take as long as its text is."""
    if not body.prompt:
        return {"embedding": []}
    return _asked([_beginning(body.prompt, service)], EmbedReply(service.model, is_one=True), service)


def gemini_asked(texts: Sequence[str], dimensions: int | None, service: Service, *, is_one: bool) -> Asked:
    """Raises ApiError."""
    _check_dimensions(dimensions, service)
    _check_count(len(texts), "requests")
    reply = GeminiEmbedReply(service.model, dimensions=dimensions, is_one=is_one)
    return _asked([RawText(text=text) for text in texts], reply, service)


def rerank_asked(body: RerankBody, service: Service) -> Asked:
    """Raises ApiError. May take as long as its texts are."""
    _check_ranks(service)
    given = body.texts if body.documents is None else body.documents
    if given is None:
        raise wrong("There are no documents.", "documents")
    _check_count(len(given), "documents" if body.texts is None else "texts")
    if body.top_n is not None and body.top_n < 1:
        raise wrong("top_n must be 1 or more.", "top_n")
    texts = [one if isinstance(one, str) else one.text for one in given]
    reply = RerankReply(service.model, top_n=body.top_n, is_list=body.documents is None)
    reply.texts = texts if body.return_documents or body.return_text else None
    return _made(_ranked([(body.query, text) for text in texts], service), "rank", reply)


def score_asked(body: ScoreBody, service: Service) -> Asked:
    """Raises ApiError. May take as long as its texts are."""
    _check_ranks(service)
    firsts, seconds = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    _check_count(len(seconds), "text_2")
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise wrong("text_1 is one text, or as many as text_2.", "text_1")
    pairs = [*zip(firsts, seconds, strict=True)]
    return _made(_ranked(pairs, service), "rank", ScoreReply(service.model))


def _check_ranks(service: Service) -> None:
    if service.file.pooling != "rank":
        raise ApiError(
            501,
            "This model does not rank documents: take one that is made for it, such as Qwen3-Reranker.",
            "not_supported_error",
            code=501,
        )


def _ranked(pairs: Sequence[tuple[str, str]], service: Service) -> Sequence[TokenIds]:
    """Raises ApiError: a long query would be made into tokens with each of its documents."""
    if sum(len(query) + len(document) for query, document in pairs) > MAX_BODY_BYTES:
        raise ApiError(
            413, f"The request is longer than {MAX_BODY_BYTES >> 20} MiB, with a query for each document."
        )
    return [TokenIds(ids=tuple(service.file.rank_prompt(query, document))) for query, document in pairs]


def _asked(prompts: Sequence[RawText | TokenIds], reply: Reply, service: Service, asker: str = "") -> Asked:
    pooling = service.file.pooling
    if pooling == "rank":
        raise wrong("This model ranks documents (/v1/rerank); it has no embeddings.", "model")
    note = "" if pooling else "mean of a model that is not made for embeddings"
    return _made(prompts, pooling or "mean", reply, asker, note)


def _made(
    prompts: Sequence[RawText | TokenIds], pooling: Pooling, reply: Reply, asker: str = "", note: str = ""
) -> Asked:
    requests = [Generate(request_id=0, prompt=prompt, pooling=pooling) for prompt in prompts]
    return Asked(requests, reply, is_streamed=False, asker=asker, note=note, one_by_one=True)


def _beginning(text: str, service: Service) -> RawText | TokenIds:
    """As much of a text as the context holds; with the token at the end that the model expects there."""
    most = service.ready.context_length if service.ready else None
    if most is None or len(text) < most // 2:
        return RawText(text=text)
    ids = service.file.tokenizer.encode(text[: _CHARACTERS * most], add_special=True)
    last = ids[-1:] if service.file.tokenizer.add_eos else []
    return TokenIds(ids=tuple(ids if len(ids) <= most else [*ids[: most - len(last)], *last]))


def _check_count(n: int, param: str) -> None:
    if not 1 <= n <= MAX_INPUTS:
        raise wrong(f"{param} has from 1 to {MAX_INPUTS} texts.", param)


def _check_dimensions(dimensions: int | None, service: Service) -> None:
    most = service.file.dimensions
    if dimensions is not None and not 1 <= dimensions <= most:
        raise wrong(f"The embeddings of this model have from 1 to {most} dimensions.", "dimensions")
