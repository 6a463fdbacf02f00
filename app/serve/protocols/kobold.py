"""KoboldCpp's protocol (https://lite.koboldai.net/koboldcpp_api), which frontends for stories and roles speak."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from app.serve.answer import AnswerBegun, AnswerDelta, AnswerEnd
from app.serve.http import COMMENTED, Framing
from app.serve.protocols.common.formats import grammar_of
from app.serve.protocols.common.pictures import without_pictures
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.requests import MAX_BIAS, MAX_STOPS, Body, generate
from app.serve.service import Service
from engine.protocol.events import TokenIds

VERSION = "1.100"
_LIMIT = 200  # tokens of an answer without max_length

NAMED = replace(COMMENTED, frame=lambda value: b"event: message\ndata: %s\n\n" % msgspec.json.encode(value))
"""Its streams have one kind of event."""


class KoboldBody(msgspec.Struct, kw_only=True):
    """Fields that are not here are ignored: samplers that this server does not have among them. Of a `prompt` that does
    not fit, the beginning is left out, after the `memory`."""

    prompt: str = ""
    memory: str = ""
    images: list[Any] | None = None
    max_length: int | None = None
    max_context_length: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    rep_pen: float | None = None
    rep_pen_range: int | None = None
    presence_penalty: float | None = None
    sampler_seed: int | None = None
    stop_sequence: list[str] | None = None
    use_default_badwordsids: bool | None = None
    ban_eos_token: bool | None = None
    bypass_eos: bool | None = None
    grammar: str | None = None
    logit_bias: dict[str, float] | None = None
    trim_stop: bool | None = None
    model: str | None = None


class TextBody(msgspec.Struct, kw_only=True):
    prompt: str = ""
    special: bool | None = None
    model: str | None = None


class IdsBody(msgspec.Struct, kw_only=True):
    ids: list[int] = []
    model: str | None = None


def generate_asked(body: KoboldBody, service: Service) -> Asked:
    """May take as long as its text is. Raises ApiError."""
    return _asked(body, service, is_streamed=False)


def stream_asked(body: KoboldBody, service: Service) -> Asked:
    """May take as long as its text is. Raises ApiError."""
    return _asked(body, service, is_streamed=True)


def _asked(body: KoboldBody, service: Service, *, is_streamed: bool) -> Asked:
    if body.images:
        raise without_pictures("images")
    limit = max(_LIMIT if body.max_length is None else body.max_length, 1)
    bias = {id: max(min(value, MAX_BIAS), -MAX_BIAS) for id, value in (body.logit_bias or {}).items()}
    asked = Body(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repeat_penalty=body.rep_pen,
        repeat_last_n=body.rep_pen_range,
        presence_penalty=body.presence_penalty,
        seed=body.sampler_seed,
        stop=(body.stop_sequence or [])[:MAX_STOPS],
        ignore_eos=bool(body.ban_eos_token or body.use_default_badwordsids),
        logit_bias=dict(bias),
        grammar=body.grammar or None,
    )
    prompt = TokenIds(ids=tuple(_shortened(body, limit, service)))
    request = generate(asked, prompt, service.sampling, limit, 0, grammar_of(asked))
    keeps_stop = body.trim_stop is False
    return Asked([request], KoboldReply(keeps_stop), is_streamed, asked.stops)


def _shortened(body: KoboldBody, limit: int, service: Service) -> list[int]:
    """The tokens of memory and prompt, as many of the last ones as the context holds beside an answer."""
    tokenizer = service.file.tokenizer
    memory = tokenizer.encode(body.memory, special=True, add_special=True) if body.memory else []
    prompt = tokenizer.encode(body.prompt, special=True, add_special=not memory)
    context = service.ready.context_length if service.ready else None
    if context is None:
        return [*memory, *prompt]
    context = min(context, body.max_context_length or context)
    room = max(context - min(limit, context // 2) - 1, 1)
    memory = memory[: room // 2]
    return [*memory, *prompt[max(len(prompt) - (room - len(memory)), 0) :]]


@dataclass
class KoboldReply(Reply):
    keeps_stop: bool
    framing: Framing = NAMED
    content: list[str] = field(default_factory=list)
    end: AnswerEnd | None = None
    prompt_n: int = 0

    def begun(self, i: int, begun: AnswerBegun) -> Iterable[Json]:
        self.prompt_n = begun.prompt_n
        return ()

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        self.content.append(delta.content)
        if delta.content:
            yield {"token": delta.content, "finish_reason": None}

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        self.end = end
        yield {"token": self._kept_stop(end), "finish_reason": _reason(end)}

    def whole(self) -> Json:
        assert self.end
        text = "".join(self.content) + self._kept_stop(self.end)
        counts = {"prompt_tokens": self.prompt_n, "completion_tokens": self.end.finished.predicted_n}
        return {"results": [{"text": text, "finish_reason": _reason(self.end), "logprobs": None, **counts}]}

    def _kept_stop(self, end: AnswerEnd) -> str:
        return end.stop_text if self.keeps_stop else ""


def _reason(end: AnswerEnd) -> str:
    return "length" if end.finish_reason == "length" else "stop"


# --- what there is ---------------------------------------------------------------------------------------


def count(body: TextBody, service: Service) -> Json:
    """`/api/extra/tokencount`. May take as long as its text is."""
    ids = service.file.tokenizer.encode(body.prompt, special=True, add_special=body.special is not False)
    return {"value": len(ids), "ids": ids}


def text_of(body: IdsBody, service: Service) -> Json:
    """`/api/extra/detokenize`."""
    return {"result": service.file.tokenizer.decode(body.ids), "success": True}


def context(service: Service) -> Json:
    return {"value": service.context_length}


def named(service: Service) -> Json:
    return {"result": service.model}


def about(service: Service) -> Json:
    """`/api/extra/version`."""
    can_see = bool(service.ready and service.ready.model.sees)
    other = (
        "txt2img",
        "audio",
        "transcribe",
        "multiplayer",
        "websearch",
        "tts",
        "savedata",
        "admin",
        "music",
    )
    return {
        "result": "KoboldCpp",
        "version": VERSION,
        "protected": False,
        "llm": True,
        "vision": can_see,
        "embeddings": True,
        "jinja": True,
        **dict.fromkeys(other, False),
    }


def figures(service: Service) -> Json:
    """`/api/extra/perf`."""
    return {
        "queue": service.waiting,
        "idle": int(not service.processing),
        "total_gens": service.metrics.requests.total(),
        "last_token_count": 0,
        "stop_reason": 0,
        "uptime": 0,
    }


def nothing_so_far(_: Service) -> Json:
    """`/api/extra/generate/check`: answers are told to those who asked for them, and not to others."""
    return {"results": [{"text": ""}]}


def aborted(_: Service) -> Json:
    """`/api/extra/abort`. An answer ends when its connection is closed, which frontends do too: by this alone, one
    client could end the answers of others."""
    return {"success": True}


TOLD = {
    "/api/v1/model": named,
    "/api/v1/info/version": lambda _: {"result": "1.2.5"},
    "/api/v1/config/max_length": lambda _: {"value": _LIMIT},
    "/api/v1/config/max_context_length": context,
    "/api/extra/true_max_context_length": context,
    "/api/extra/version": about,
    "/api/extra/perf": figures,
    "/api/extra/generate/check": nothing_so_far,
}
"""What is said of a model, by the path."""
