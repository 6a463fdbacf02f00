"""llama-server's own paths (llama.cpp, tools/server/README.md), which editors and dashboards ask."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from app.serve.answer import AnswerDelta, AnswerEnd
from app.serve.errors import unavailable, wrong
from app.serve.http import COMMENTED, Framing
from app.serve.protocols import chat, logprobs
from app.serve.protocols.completions import fill_in
from app.serve.protocols.figures import timings
from app.serve.protocols.formats import grammar_of
from app.serve.protocols.models import capabilities
from app.serve.protocols.reply import Asked, Json, Reply
from app.serve.protocols.requests import MAX_LOGPROBS, Body, generate
from app.serve.service import Service
from engine.formats.tokenizer import Tokenizer
from engine.protocol.events import RawText, Token, TokenIds


class ExtraText(msgspec.Struct):
    text: str = ""
    filename: str = ""


class InfillBody(Body, kw_only=True):
    """`prompt` is what has been written of the answer. `input_extra`: other files."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraText] | None = None
    prompt: str | None = None
    n_predict: int | None = None


class CompletionBody(Body, kw_only=True):
    """`n_probs`: so many of the most probable tokens are shown at each place."""

    prompt: str | list[int]
    n_predict: int | None = None
    n_probs: int | None = None


def completion_asked(body: CompletionBody, service: Service) -> Asked:
    """Raises ApiError."""
    shown = body.n_probs or 0
    if not 0 <= shown <= MAX_LOGPROBS:
        raise wrong(f"n_probs must be from 0 to {MAX_LOGPROBS}, not {shown}.", "n_probs")
    given = body.prompt
    prompt = RawText(text=given) if isinstance(given, str) else TokenIds(ids=tuple(given))
    return _asked(body, prompt, body.n_predict, service, shown)


def infill_asked(body: InfillBody, service: Service) -> Asked:
    """Raises ApiError."""
    before = body.input_prefix + (body.prompt or "")
    if body.input_extra:
        files = "\n".join(f"{extra.filename}\n{extra.text}" for extra in body.input_extra)
        before = f"{files}\n{before}"
    prompt = fill_in(service, before, body.input_suffix)
    return _asked(body, prompt, body.n_predict, service)


def _asked(
    body: Body, prompt: RawText | TokenIds, n_predict: int | None, service: Service, shown: int = 0
) -> Asked:
    if body.answers != 1:
        raise wrong("This path gives one answer: n must be 1.", "n")
    limit = body.max_tokens if n_predict is None else n_predict
    request = generate(body, prompt, service.sampling, limit, shown, grammar_of(body))
    reply = LlamaReply(service.model, service.file.tokenizer, shown)
    return Asked([request], reply, bool(body.stream), body.stops, body.asker, stop_ids=body.stop_ids)


@dataclass
class LlamaReply(Reply):
    model: str
    tokenizer: Tokenizer
    shown: int = 0
    framing: Framing = COMMENTED
    _content: list[str] = field(default_factory=list)
    _tokens: list[Token] = field(default_factory=list)
    _end: AnswerEnd | None = None

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        self._content.append(delta.content)
        self._tokens += delta.tokens
        if delta.content or (self.shown and delta.tokens):
            yield {"index": i, "content": delta.content, "stop": False} | self._probabilities(delta.tokens)

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        self._end = end
        yield self._last("")

    def whole(self) -> Json:
        return self._last("".join(self._content)) | self._probabilities(self._tokens)

    def _probabilities(self, tokens: Iterable[Token]) -> Json:
        if not self.shown:
            return {}
        entries = logprobs.of_chat(logprobs.reported(tokens, self.tokenizer), self.tokenizer, self.shown)
        return {"completion_probabilities": entries}

    def _last(self, content: str) -> Json:
        assert self._end
        end = self._end.finished
        kind = "word" if self._end.stop_text else "limit" if self._end.finish_reason == "length" else "eos"
        return {
            "index": 0,
            "content": content,
            "stop": True,
            "model": self.model,
            "tokens_predicted": end.predicted_n,
            "tokens_evaluated": end.prompt_n,
            "tokens_cached": end.cached_n,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": self._end.stop_text,
            "timings": timings(end),
        }


def props(service: Service) -> Json:
    file, sampling = service.file, msgspec.to_builtins(service.sampling)
    sampling.pop("type", None)
    return {
        "default_generation_settings": {"n_ctx": _context(service), "params": sampling},
        "total_slots": service.parallel,
        "model_alias": service.model,
        "model_path": service.model,
        "modalities": {"vision": "vision" in capabilities(service), "audio": False},
        "chat_template": file.templates.chat,
        "bos_token": file.tokenizer.text(file.tokenizer.bos_id),
        "eos_token": file.tokenizer.text(file.tokenizer.eos_id),
        "build_info": "orin-chat",
    }


def slots(service: Service, *, must_be_free: bool) -> list[Json]:
    """What each slot does: counts, nothing that is asked or said. Raises ApiError if none is free that must be."""
    at_work = service.slots.slots if service.slots else (None,) * service.parallel
    if must_be_free and service.open >= service.parallel:
        raise unavailable("No slot is free.")
    return [
        {
            "id": i,
            "n_ctx": _context(service),
            "is_processing": slot is not None,
            "n_prompt_tokens": slot.prompt_n if slot else 0,
            "n_prompt_tokens_processed": slot.prompt_done if slot else 0,
            "next_token": {"n_decoded": slot.predicted_n if slot else 0},
        }
        for i, slot in enumerate(at_work)
    ]


def applied_template(body: chat.ChatBody, service: Service) -> Json:
    """The text that the model gets. May take as long as it is. Raises ApiError."""
    ids = [id for id in chat.encoded(body, service).ids if id >= 0]  # without those of pictures
    return {"prompt": b"".join(map(service.file.tokenizer.piece, ids)).decode("utf-8", "replace")}


def _context(service: Service) -> int:
    return service.ready.context_length if service.ready else 0
