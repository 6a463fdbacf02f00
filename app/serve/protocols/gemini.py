"""Google's protocol for Gemini, as chats: https://ai.google.dev/api/generate-content. Its clients write names of fields
as `maxOutputTokens` or as `max_output_tokens`."""

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from app.serve.answer import AnswerBegun, AnswerDelta, AnswerEnd
from app.serve.errors import ApiError, gemini_form, wrong
from app.serve.http import COMMENTED, Framing
from app.serve.model_pool import ModelPool
from app.serve.protocols import chat, elsewhere, embeddings
from app.serve.protocols.common import logprobs
from app.serve.protocols.common.blocks import Block, Blocks, Closed, Grown
from app.serve.protocols.common.conversation import Call, CalledFunction, ChatMessage, Part, PicturePart
from app.serve.protocols.common.formats import JsonSchema, ResponseFormat
from app.serve.protocols.common.json_values import MAX_DEPTH, check_size, converted
from app.serve.protocols.common.pictures import NOT_READ, from_base64
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.protocols.common.requests import variants
from app.serve.protocols.common.text_files import from_file
from app.serve.protocols.common.tools import Allowed, Function, Tool, ToolChoice
from app.serve.service import Service
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Finished, Token

VERSIONS = ("v1beta", "v1alpha")
"""What paths begin with. Some clients have /v1 there."""
EMBEDS = ("embedContent", "batchEmbedContents")
METHODS = ("generateContent", "streamGenerateContent", "countTokens", *EMBEDS)
_UNDERSCORE = re.compile(r"_([a-z])")
_CHOICES: dict[str, Literal["required", "none"]] = {"ANY": "required", "NONE": "none"}
_STOPS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}


class Content(msgspec.Struct):
    parts: list[dict[str, Any]] | None = None
    role: str | None = None


class Thinking(msgspec.Struct, rename="camel"):
    thinking_budget: int | None = None
    thinking_level: str | None = None
    include_thoughts: bool | None = None


class Generation(msgspec.Struct, rename="camel"):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[str] | None = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    thinking_config: Thinking | None = None


class Calling(msgspec.Struct, rename="camel"):
    mode: str = "AUTO"
    allowed_function_names: list[str] | None = None


class ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: Calling | None = None


class GeminiBody(msgspec.Struct, rename="camel", kw_only=True):
    """What comes from the path are `model`, `is_streamed`, and `is_list`: the answer is the only one of a list.
    `generate_content_request`: what `countTokens` may have in place of `contents`."""

    contents: list[Content] | None = None
    system_instruction: Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_config: ToolConfig | None = None
    generation_config: Generation | None = None
    generate_content_request: dict[str, Any] | None = None
    cached_content: str | None = None
    model: str | None = None
    is_streamed: bool = False
    is_list: bool = False


class EmbedBody(msgspec.Struct, rename="camel", kw_only=True):
    content: Content | None = None
    requests: list["EmbedBody"] | None = None
    output_dimensionality: int | None = None


def called(path: str) -> tuple[str, str]:
    """The model and the method in `NAME:generateContent`: names may have colons, too. Raises ApiError."""
    name, _, method = path.rpartition(":")
    if method not in METHODS:
        raise ApiError(404, f"Of Gemini's methods there are {', '.join(METHODS)}.", "not_found_error")
    return name.removeprefix("models/"), method


def body_of(given: dict[str, Any], model: str, method: str = "", *, in_events: bool = False) -> GeminiBody:
    """`in_events`: how a stream is asked for, which is a list of answers otherwise. Raises ApiError."""
    body = converted(_camel(given), GeminiBody, "")
    is_stream = method.startswith("stream")
    body.model, body.is_streamed, body.is_list = model, is_stream and in_events, is_stream and not in_events
    return body


def asked(body: GeminiBody, service: Service) -> Asked:
    """Raises ApiError."""
    config = body.generation_config or Generation()
    as_chat = _chat_body(body, config)
    request, tools = chat.chat_request(as_chat, service)
    shows_thoughts = bool(config.thinking_config and config.thinking_config.include_thoughts)
    shown = config.logprobs or 0 if config.response_logprobs else None
    reply = GeminiReply(
        body.model or service.model, service.file.tokenizer, shows_thoughts, body.is_list, shown
    )
    requests = variants(request, as_chat.answers)
    return Asked(requests, reply, body.is_streamed, as_chat.stops, note=tools.note)


def embeddings_asked(given: dict[str, Any], service: Service) -> Asked:
    """Raises ApiError."""
    body = converted(_camel(given), EmbedBody, "")
    each = [body] if body.requests is None else body.requests
    texts = [_texts(one.content) if one.content else "" for one in each]
    dimensions = next((one.output_dimensionality for one in each if one.output_dimensionality), None)
    return embeddings.gemini_asked(texts, dimensions, service, is_one=body.requests is None)


def counted(body: GeminiBody, service: Service) -> Json:
    """Raises ApiError. May take as long as the text is."""
    if body.generate_content_request:
        body = body_of(body.generate_content_request, service.model)
    as_chat = _chat_body(body, body.generation_config or Generation())
    return {"totalTokens": len(chat.encoded(as_chat, service).ids)}


def listed(pool: ModelPool) -> Json:
    known = {service.model: service for service in pool.known}
    return {"models": [model(name, known.get(name)) for name in pool.names]}


def model(name: str, service: Service | None) -> Json:
    """What is only known once a model has been loaded is left out before."""
    described: Json = {
        "name": f"models/{name}",
        "displayName": name,
        "version": "1",
        "supportedGenerationMethods": METHODS,
    }
    if service and service.ready:
        length = service.ready.context_length
        described |= {"inputTokenLimit": length, "outputTokenLimit": length}
    return described


def _chat_body(body: GeminiBody, config: Generation) -> chat.ChatBody:
    """The same in OpenAI's form. Raises ApiError."""
    if body.cached_content:
        raise wrong(elsewhere.sentence("/cachedContents"), "cachedContent")
    if config.response_modalities and "TEXT" not in config.response_modalities:
        raise wrong("This server answers with text only.", "responseModalities")
    messages = list[ChatMessage]()
    if body.system_instruction:
        messages.append(ChatMessage("system", _texts(body.system_instruction)))
    for i, content in enumerate(body.contents or ()):
        messages += _messages(content, f"contents[{i}]")
    calling = (body.tool_config or ToolConfig()).function_calling_config or Calling()
    thinking = config.thinking_config or Thinking()
    as_chat = chat.ChatBody(messages=messages)
    as_chat.tools, as_chat.tool_choice = [*_tools(body.tools or ())], _choice(calling)
    as_chat.temperature, as_chat.top_p, as_chat.seed = config.temperature, config.top_p, config.seed
    as_chat.top_k = None if config.top_k is None else int(config.top_k)
    as_chat.max_tokens, as_chat.stop, as_chat.n = (
        config.max_output_tokens,
        config.stop_sequences,
        config.candidate_count,
    )
    as_chat.presence_penalty, as_chat.frequency_penalty = config.presence_penalty, config.frequency_penalty
    if config.response_logprobs:
        as_chat.logprobs, as_chat.top_logprobs = True, config.logprobs
    as_chat.thinking_budget = thinking.thinking_budget
    as_chat.chat_template_kwargs = {"reasoning_effort": (thinking.thinking_level or "").lower()}
    _set_format(as_chat, config)
    return as_chat


def _set_format(as_chat: chat.ChatBody, config: Generation) -> None:
    schema = config.response_json_schema or _json_schema(config.response_schema, "responseSchema")
    if config.response_mime_type == "text/x.enum" and schema and isinstance(schema.get("enum"), list):
        as_chat.guided_choice = [str(each) for each in schema["enum"]]
    elif schema:
        as_chat.response_format = ResponseFormat("json_schema", JsonSchema(schema))
    elif config.response_mime_type == "application/json":
        as_chat.response_format = ResponseFormat("json_object")


def _texts(content: Content) -> str:
    return "\n\n".join(part["text"] for part in content.parts or () if isinstance(part.get("text"), str))


def _messages(content: Content, param: str) -> Iterator[ChatMessage]:
    """Results of functions are messages of their own, which come first. Raises ApiError."""
    if content.role not in (None, "user", "model", "function", "tool"):
        raise wrong("A role is user or model.", f"{param}.role")
    parts, thoughts, calls, has_results = list[Part](), list[str](), list[Call](), False
    for i, part in enumerate(content.parts or ()):
        match part:
            case {"functionCall": {"name": str(name), **called}}:
                arguments = json.dumps(called.get("args") or {}, ensure_ascii=False)
                calls.append(Call(CalledFunction(name, arguments), id=f"{called.get('id') or ''}"))
            case {"functionResponse": {"name": str(name), **given}}:
                has_results = True
                result = [Part("text", _result(given.get("response"))), *_of_result(given.get("parts"))]
                yield ChatMessage("tool", result, tool_call_id=f"{given.get('id') or ''}", name=name)
            case {"text": str(text), "thought": True}:
                thoughts.append(text)
            case {"text": str(text)}:
                parts.append(Part("text", text))
            case {"inlineData": {"data": data, **of}}:
                parts.append(
                    _data(data, f"{of.get('mimeType')}", of.get("displayName"), f"{param}.parts[{i}]")
                )
            case {"fileData": _}:
                raise wrong("This server fetches nothing: send a file in inlineData.", f"{param}.parts[{i}]")
    if parts or calls or not has_results:
        role = "assistant" if content.role == "model" else "user"
        yield ChatMessage(role, parts, "".join(thoughts), tool_calls=calls or None)


def _result(response: Any) -> str:
    """The result of a function: an object, whose `result` or `output` often is all that is in it."""
    match response:
        case {"result": str(text)} | {"output": str(text)} if len(response) == 1:
            return text
    return json.dumps(response, ensure_ascii=False)


def _of_result(parts: Any) -> Iterator[Part]:
    for part in parts if isinstance(parts, list) else ():
        try:
            match part:
                case {"inlineData": {"data": data, **of}}:
                    yield _data(data, f"{of.get('mimeType')}", of.get("displayName"), "parts")
        except ApiError:
            yield Part("text", NOT_READ)


def _data(data: Any, kind: str, name: Any, param: str) -> Part:
    if kind.startswith("image/"):
        return PicturePart(picture=from_base64(data, param))
    return Part("text", from_file({"filename": name, "file_data": data}, param))


def _tools(given: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Tools that Google's servers have keep their names, and are left out."""
    for tool in given:
        declared = tool.get("functionDeclarations")
        for function in declared if isinstance(declared, list) else ():
            if not isinstance(function, dict):
                raise wrong("functionDeclarations are objects.", "tools")
            schema = function.get("parametersJsonSchema") or _json_schema(function.get("parameters"), "tools")
            fields = {"name": function.get("name"), "description": function.get("description") or ""}
            yield {"type": "function", "function": fields | {"parameters": schema or {"type": "object"}}}
        yield from ({"type": name} for name in tool if name != "functionDeclarations")


def _choice(calling: Calling) -> ToolChoice:
    mode = calling.mode.upper()
    if mode == "ANY" and calling.allowed_function_names:
        allowed = [Tool(function=Function(name)) for name in calling.allowed_function_names]
        return ToolChoice("allowed_tools", allowed_tools=Allowed(allowed, "required"))
    return ToolChoice(_CHOICES.get(mode, "auto"))


def _json_schema(given: Any, param: str) -> Any:
    """A schema of OpenAPI 3.0, whose types may be in capitals, as a JSON schema. Raises ApiError if it is too large."""
    if isinstance(given, dict | list):
        check_size(given, param)
    return _schema(given)


def _schema(given: Any) -> Any:
    if isinstance(given, list):
        return [_schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    named = {_in_camel_case(key): value for key, value in given.items()}
    made = {
        key: value for key, value in named.items() if key not in ("nullable", "propertyOrdering", "example")
    }
    is_nullable = named.get("nullable") is True
    if isinstance(kind := made.get("type"), str):
        made["type"] = [kind.lower(), "null"] if is_nullable else kind.lower()
    if made.get("format") == "enum":
        del made["format"]
    for key in ("items", "anyOf", "additionalProperties"):
        if key in made:
            made[key] = _schema(made[key])
    if isinstance(properties := made.get("properties"), dict):
        made["properties"] = {name: _schema(each) for name, each in properties.items()}
    for key in made.keys() & _SIZES:
        if isinstance(size := made[key], str) and re.fullmatch(r"[0-9]{1,9}", size):
            made[key] = int(size)
    for key, nothing in (("enum", None), ("anyOf", {"type": "null"})):
        if is_nullable and isinstance(made.get(key), list):
            made[key] = [*made[key], nothing]
    return made


_SIZES = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
"""Google's JSON has numbers of 64 bits as texts."""
_LISTS = {"contents", "parts", "tools", "functionDeclarations", "requests"}
"""Google's server takes one of these without its list, as many examples of its documentation are written."""
_AS_THEY_ARE = {
    "args",
    "response",
    "properties",
    "parametersJsonSchema",
    "responseJsonSchema",
    "enum",
    "required",
}


def _in_camel_case(name: str) -> str:
    return _UNDERSCORE.sub(lambda found: found[1].upper(), name)


def _camel(value: Any, depth: int = 0) -> Any:
    """JSON with names of fields as `maxOutputTokens`, lists where they belong, and whole numbers that are written as
    such; what the client has made stays as it is. Raises ApiError if it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise ApiError(400, "The request is nested too deeply.")
    if isinstance(value, list):
        return [_camel(each, depth + 1) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if not isinstance(value, dict):
        return value
    named = {_in_camel_case(key): each for key, each in value.items()}
    listed = {
        key: [each] if key in _LISTS and isinstance(each, dict) else each for key, each in named.items()
    }
    return {key: each if key in _AS_THEY_ARE else _camel(each, depth + 1) for key, each in listed.items()}


@dataclass
class _Answer:
    blocks: Blocks = field(default_factory=Blocks)
    end: AnswerEnd | None = None


@dataclass
class GeminiReply(Reply):
    """`shown`: as in `chat.ChatReply`."""

    model: str
    tokenizer: Tokenizer
    shows_thoughts: bool = False
    is_list: bool = False
    shown: int | None = None
    framing: Framing = COMMENTED
    takes_pieces: bool = False
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    _answers: defaultdict[int, _Answer] = field(default_factory=lambda: defaultdict(_Answer))
    _read: tuple[int, int] = (0, 0)  # tokens of the prompt, and how many of them were known

    def begun(self, i: int, begun: AnswerBegun) -> Iterable[Json]:
        self._read = begun.prompt_n, begun.cached_n
        return ()

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        return self._written(i, self._answers[i].blocks.feed(delta))

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        answer = self._answers[i]
        yield from self._written(i, answer.blocks.close())
        answer.end = end
        yield self._response(
            [_candidate(i, [{"text": ""}], _STOPS[end.finish_reason])], [end.finished], end.reasoning_n
        )

    def whole(self) -> Json | list[Json]:
        ends = [answer.end for answer in self._answers.values() if answer.end]
        candidates = [
            _candidate(
                i, self._parts(answer.blocks.all), _STOPS[answer.end.finish_reason] if answer.end else None
            )
            | self._logprobs([token for block in answer.blocks.all for token in block.tokens])
            for i, answer in sorted(self._answers.items())
        ]
        made = self._response(
            candidates, [end.finished for end in ends], sum(end.reasoning_n for end in ends)
        )
        return [made] if self.is_list else made

    def pings(self) -> Iterable[Json]:
        """A piece without text: Google's libraries read no comments."""
        yield self._response([_candidate(0, [{"text": ""}])])

    def failed(self, error: ApiError) -> Json:
        return gemini_form(error)

    def _written(self, i: int, changes: Iterable[Any]) -> Iterator[Json]:
        for change in changes:
            block, shown = change.block, dict[str, Json]()
            if isinstance(change, Grown) and block.kind != "call":
                parts = self._parts([Block(block.kind, 0, pieces=[change.text])])
                shown = self._logprobs(change.tokens)
            elif isinstance(change, Closed) and block.kind == "call":
                parts = self._parts([block])
            else:
                continue
            if parts:
                yield self._response([_candidate(i, parts) | shown])

    def _logprobs(self, tokens: Iterable[Token]) -> Json:
        reported = logprobs.reported(tokens, self.tokenizer)
        if self.shown is None or not reported:
            return {}
        return logprobs.of_candidate(reported, self.tokenizer, self.shown)

    def _parts(self, blocks: Iterable[Block]) -> list[Json]:
        return [_part(block) for block in blocks if block.kind != "thinking" or self.shows_thoughts]

    def _response(self, candidates: Sequence[Json], ends: Sequence[Finished] = (), thoughts: int = 0) -> Json:
        """Pieces of a stream have the usage so far, as Google's have: clients with strict types need it."""
        prompt, cached = self._read if not ends else (ends[0].prompt_n, ends[0].cached_n)
        predicted = sum(end.predicted_n for end in ends)
        usage = {
            "promptTokenCount": prompt,
            "candidatesTokenCount": predicted - thoughts,
            "thoughtsTokenCount": thoughts,
            "cachedContentTokenCount": cached,
            "totalTokenCount": prompt + predicted,
        }
        head = {"modelVersion": self.model, "responseId": self.id}
        return {"candidates": candidates, **head, "usageMetadata": usage}


def _part(block: Block) -> Json:
    match block.kind:
        case "text":
            return {"text": block.text}
        case "thinking":
            return {"text": block.text, "thought": True}
    try:
        arguments = json.loads(block.text)
    except (ValueError, RecursionError):  # the answer was cut off
        arguments = {}
    return {"functionCall": {"id": block.id, "name": block.name, "args": arguments}}


def _candidate(i: int, parts: Sequence[Json], reason: str | None = None) -> Json:
    made: Json = {"content": {"role": "model", "parts": parts}, "index": i}
    return made | {"finishReason": reason} if reason else made
