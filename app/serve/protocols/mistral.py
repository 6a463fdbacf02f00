"""Mistral's path for what lies between two texts, which editors ask for completions of code. Its answers are those of
chats: https://docs.mistral.ai/api/#tag/fim. Else Mistral's protocol is OpenAI's, but its libraries take less than
others: a call of a tool comes whole, and a model has a `type` of theirs."""

from collections.abc import Mapping

from app.serve.protocols.chat import ChatReply
from app.serve.protocols.common.reply import Asked, Json
from app.serve.protocols.common.requests import Body, generate, variants
from app.serve.protocols.completions import ends_of_fill_in, fill_in
from app.serve.service import Service

_LIBRARIES = "mistral-client-"


class FimBody(Body, kw_only=True):
    prompt: str
    suffix: str | None = None
    random_seed: int | None = None


def asked(body: FimBody, service: Service) -> Asked:
    """Raises ApiError."""
    if body.random_seed is not None:
        body.seed = body.random_seed
    prompt = fill_in(service, body.prompt, body.suffix or "")
    request = generate(body, prompt, service.sampling, body.max_tokens, 0, None)
    reply = ChatReply(service.model, service.file.tokenizer, includes_usage=body.includes_usage)
    ends = body.stop_ids | ends_of_fill_in(service)
    requests = variants(request, body.answers)
    return Asked(requests, reply, bool(body.stream), body.stops, body.asker, stop_ids=ends)


def is_asked_by_its_library(headers: Mapping[str, str]) -> bool:
    return _LIBRARIES in headers.get("user-agent", "")


def model(described: Json) -> Json:
    """A model as Mistral's libraries read it, of what `protocols.models` says of it."""
    takes = described.get("supported_parameters", ())
    sees = "image" in described.get("architecture", {}).get("input_modalities", ())
    can = {"completion_chat": True, "function_calling": "tools" in takes, "vision": sees}
    context = {"max_context_length": described["context_length"]} if "context_length" in described else {}
    return described | {"type": "base", "capabilities": can} | context
