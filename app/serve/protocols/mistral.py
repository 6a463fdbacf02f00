"""Mistral's path for what lies between two texts, which editors ask for completions of code. Its answers are those of
chats: https://docs.mistral.ai/api/#tag/fim."""

from app.serve.protocols.chat import ChatReply
from app.serve.protocols.completions import ends_of_fill_in, fill_in
from app.serve.protocols.reply import Asked
from app.serve.protocols.requests import Body, generate, variants
from app.serve.service import Service


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
