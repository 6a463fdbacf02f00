"""What requests of all protocols are made of: fields with names in common, and the engine's request.

The names are those of OpenAI's protocol, and those that llama-server and vLLM add to it.
"""

import re

import msgspec
from msgspec.structs import replace

from app.serve.errors import wrong
from app.serve.protocols.common.formats import Formatted
from engine.protocol.events import Chat, Generate, Grammar, RawText, Sampling, TokenIds
from presets.sampling import RANGES, out_of_range

MAX_LOGPROBS = 20
MAX_STOPS = 64
"""Frontends for stories send one for each name and each mark of a template."""
MAX_N = 16
MAX_BIAS = 100
MAX_BIASES = 1 << 16
"""More take so long to read that others wait."""
MAX_USER = 64  # characters of a client's name
MAX_TOKENS = 1 << 31
"""More is the same as no limit."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Body(Formatted, kw_only=True):
    """The fields of both kinds of completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None  # vLLM's name
    repeat_last_n: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    user: str | None = None
    safety_identifier: str | None = None  # OpenAI's newer name
    stop_token_ids: list[int] | None = None  # vLLM's, like those that follow
    min_tokens: int | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids or ())

    @property
    def asker(self) -> str:
        """The user for whom a client asks, by its word; "" if it does not say."""
        return (self.safety_identifier or self.user or "")[:MAX_USER]

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def generate(
    body: Body,
    prompt: Chat | RawText | TokenIds,
    sampling: Sampling,
    limit: int | None,
    logprobs: int,
    grammar: Grammar | None,
) -> Generate:
    """The engine's request. `sampling` is what holds without the client's fields. Raises ApiError."""
    if not 1 <= body.answers <= MAX_N:
        raise wrong(f"n must be from 1 to {MAX_N}, not {body.answers}.", "n")
    if limit is not None and not 0 <= limit < MAX_TOKENS:
        limit = None  # -1 is llama-server's
    if len(body.stops) > MAX_STOPS:
        raise wrong(f"stop takes at most {MAX_STOPS} texts.", "stop")
    if len(body.stop_token_ids or ()) > MAX_STOPS:
        raise wrong(f"stop_token_ids takes at most {MAX_STOPS} ids.", "stop_token_ids")
    if body.use_beam_search:
        raise wrong("This server has no beam search.", "use_beam_search")
    if body.prompt_logprobs is not None:
        raise wrong(
            "Log-probabilities of prompts come from /v1/completions, with echo and logprobs.",
            "prompt_logprobs",
        )
    return Generate(
        request_id=0,
        prompt=prompt,
        sampling=_sampling(body, sampling),
        max_tokens=limit,
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
        fresh=body.cache_prompt is False,
        grammar=grammar,
        logit_bias=_bias(body),
        min_tokens=min(max(body.min_tokens or 0, 0), MAX_TOKENS),
    )


def variants(request: Generate, n: int) -> list[Generate]:
    """`n` requests for different answers; the first is `request`."""
    seed = request.sampling.seed
    seeds = [seed if seed is None else (seed + i) % 2**32 for i in range(n)]
    return [replace(request, sampling=replace(request.sampling, seed=each)) for each in seeds]


def _bias(body: Body) -> tuple[tuple[int, float], ...]:
    """The biases by token id. llama-server's clients send pairs, and false for a token that is never to come."""
    given = body.logit_bias or {}
    if len(given) > MAX_BIASES:
        raise wrong(f"logit_bias takes at most {MAX_BIASES:,} tokens.", "logit_bias")
    pairs = [*(given.items() if isinstance(given, dict) else given)]
    if not all(re.fullmatch(r"[0-9]{1,9}", f"{id}") for id, _ in pairs):
        raise wrong("logit_bias has token ids as names.", "logit_bias")
    bias = {int(id): -MAX_BIAS if value is False else float(value) for id, value in pairs}
    if not all(-MAX_BIAS <= value <= MAX_BIAS for value in bias.values()):
        raise wrong(f"A bias is from -{MAX_BIAS} to {MAX_BIAS}.", "logit_bias")
    return tuple((id, value) for id, value in bias.items() if value)


def _sampling(body: Body, defaults: Sampling) -> Sampling:
    given = {name: value for name in RANGES if (value := getattr(body, name)) is not None}
    if body.repetition_penalty is not None:
        given.setdefault("repeat_penalty", body.repetition_penalty)
    if "seed" in given:
        given["seed"] = None if given["seed"] < 0 else given["seed"] % 2**32
    for name in ("top_k", "repeat_last_n"):
        given[name] = max(given.get(name, getattr(defaults, name)), 0)  # -1: off
    sampling = replace(defaults, **given)
    if problem := out_of_range(sampling):
        raise wrong(f"{problem}.", problem.partition(" ")[0].replace("-", "_"))
    return sampling
