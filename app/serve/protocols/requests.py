"""What requests of all protocols are made of: fields with names in common, and the engine's request.

The names are those of OpenAI's protocol, and those that llama-server and vLLM add to it. Unknown fields are ignored.
null is the same as a field that is absent.
"""

import re
from itertools import chain
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from app.serve.errors import ApiError, wrong
from engine.formats.tool_grammars import schema_grammar
from engine.protocol.events import Chat, Generate, Grammar, RawText, Sampling, TokenIds
from presets.sampling import out_of_range

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_N = 16
MAX_BIAS = 100
MAX_USER = 64  # characters of a client's name
MAX_DEPTH = 64  # of JSON in JSON
MAX_VALUES = 1 << 18  # in it


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(msgspec.Struct, kw_only=True):
    """The fields of both kinds of completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None
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
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    safety_identifier: str | None = None  # OpenAI's newer name

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def asker(self) -> str:
        """For whom a client asks, by its word; "" if it does not say."""
        return (self.safety_identifier or self.user or "")[:MAX_USER]

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


B = TypeVar("B")
_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


def decoded(data: bytes | bytearray, kind: type[B]) -> B:
    """The JSON object `data`. Raises ApiError, which names the field that has a wrong type."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The request is not valid JSON: {error}.") from None
    except RecursionError:
        raise ApiError(400, "The request is nested too deeply.") from None


def converted(value: Any, kind: type[B], param: str) -> B:
    """A field of a request as a type. Raises ApiError, which names the part that has a wrong one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, param) from None


def _wrong_type(error: msgspec.ValidationError, within: str = "") -> ApiError:
    """`within`: the field that was converted."""
    message = str(error)
    place, missing = _PLACE.search(message), re.search(r"missing required field `(\w+)`", message)
    names = [f"{within}{place[1] if place else ''}", missing[1] if missing else ""]
    param, what = ".".join(filter(None, names)), _PLACE.sub("", message)
    return ApiError(400, f"{param}: {what}." if param else f"{what}.", param=param or None)


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
    if limit is not None and limit < 0:
        limit = None  # llama-server's -1
    if len(body.stops) > MAX_STOPS:
        raise wrong(f"stop takes at most {MAX_STOPS} texts.", "stop")
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
    )


def variants(request: Generate, n: int) -> list[Generate]:
    """`n` requests for different answers; the first is `request`."""
    seed = request.sampling.seed
    seeds = [seed if seed is None else (seed + i) % 2**32 for i in range(n)]
    return [replace(request, sampling=replace(request.sampling, seed=each)) for each in seeds]


def schema_of(body: Body) -> dict[str, Any] | None:
    """The JSON schema that the answer is to keep to, if there is one. Raises ApiError."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise wrong("response_format.json_schema.schema is missing.", "response_format")
    check_size(wanted.json_schema.schema, "response_format")
    return wanted.json_schema.schema


def grammar_of(body: Body) -> Grammar | None:
    """Raises ApiError."""
    schema = schema_of(body)
    return None if schema is None else schema_grammar(schema)


def check_size(value: dict[str, Any] | list[Any], param: str) -> None:
    """Raises ApiError for JSON that is nested more deeply, or has more values, than anything that is meant: nobody else
    is answered while it is gone through."""
    containers, count = [value], 0
    for _ in range(MAX_DEPTH + 1):
        count += sum(map(len, containers))
        if count > MAX_VALUES:
            raise wrong(f"{param} has too many parts.", param)
        items = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in containers)
        containers = [item for item in items if isinstance(item, dict | list)]
    if containers:
        raise wrong(f"{param} is nested too deeply.", param)


def _bias(body: Body) -> tuple[tuple[int, float], ...]:
    bias = body.logit_bias or {}
    if not all(re.fullmatch(r"[0-9]{1,9}", id) for id in bias):
        raise wrong("logit_bias has token ids as names.", "logit_bias")
    if not all(-MAX_BIAS <= value <= MAX_BIAS for value in bias.values()):
        raise wrong(f"A bias is from -{MAX_BIAS} to {MAX_BIAS}.", "logit_bias")
    return tuple((int(id), value) for id, value in bias.items() if value)


def _sampling(body: Body, defaults: Sampling) -> Sampling:
    additive = ("presence_penalty", "frequency_penalty")
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "seed", *additive)
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.repetition_penalty is not None:
        given.setdefault("repeat_penalty", body.repetition_penalty)
    if "seed" in given:
        given["seed"] = None if given["seed"] < 0 else given["seed"] % 2**32
    for name in ("top_k", "repeat_last_n"):
        given[name] = max(given.get(name, getattr(defaults, name)), 0)  # -1: off
    sampling = replace(defaults, **given)
    for name in additive:
        if not -2 <= getattr(sampling, name) <= 2:
            raise wrong(f"{name} must be from -2 to 2, not {getattr(sampling, name)}.", name)
    if problem := out_of_range(sampling):
        raise wrong(f"{problem}.", problem.partition(" ")[0].replace("-", "_"))
    return sampling
