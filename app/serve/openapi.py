"""The description of the server's paths, in OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0), for clients and tools.

The schemas of bodies are those of the types in `app/serve/protocols`.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from app.serve.protocols import embeddings, gemini, kobold, ollama, tgi
from app.serve.protocols.anthropic import CountBody, MessagesBody
from app.serve.protocols.chat import ChatBody
from app.serve.protocols.completions import TextBody
from app.serve.protocols.conversations import ConversationBody
from app.serve.protocols.interactions import InteractionBody
from app.serve.protocols.llama import CompletionBody, InfillBody
from app.serve.protocols.lm_studio_chat import LmChatBody
from app.serve.protocols.mistral import FimBody
from app.serve.protocols.response_body import ResponsesBody
from app.serve.protocols.tokens import DetokenizeBody, TokenizeBody

_WITH_V1: dict[str, type[Any]] = {
    "/chat/completions": ChatBody,
    "/chat/completions/input_tokens": ChatBody,
    "/completions": TextBody,
    "/fim/completions": FimBody,
    "/messages": MessagesBody,
    "/messages/count_tokens": CountBody,
    "/responses": ResponsesBody,
    "/responses/compact": ResponsesBody,
    "/responses/input_tokens": ResponsesBody,
    "/embeddings": embeddings.EmbeddingsBody,
    "/rerank": embeddings.RerankBody,
    "/score": embeddings.ScoreBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/apply-template": ChatBody,
    "/completion": CompletionBody,
    "/infill": InfillBody,
    "/generate": tgi.TgiBody,
    "/embed": tgi.EmbedBody,
}
_OF_GEMINI: dict[str, type[Any]] = {
    method: gemini.EmbedBody if method in gemini.EMBEDS else gemini.GeminiBody for method in gemini.METHODS
}
BODIES: dict[str, type[Any]] = {
    **{f"/v1{path}": body for path, body in _WITH_V1.items()},
    "/v1/conversations": ConversationBody,
    "/v1/conversations/{id}": ConversationBody,
    "/v1/conversations/{id}/items": ConversationBody,
    "/api/chat": ollama.OllamaChatBody,
    "/api/generate": ollama.OllamaGenerateBody,
    "/api/show": ollama.ShowBody,
    "/api/pull": ollama.PullBody,
    "/api/embed": embeddings.EmbedBody,
    "/api/embeddings": embeddings.OldEmbedBody,
    **{f"/v1beta/models/{{model}}:{method}": body for method, body in _OF_GEMINI.items()},
    "/v1beta/interactions": InteractionBody,
    "/api/v1/chat": LmChatBody,
    "/api/v1/generate": kobold.KoboldBody,
    "/api/extra/generate/stream": kobold.KoboldBody,
}
"""What is posted, by path."""
_READ = {
    "/v1/models": ("get",),
    "/v1/models/{model}": ("get",),
    "/v1/responses/{id}": ("get", "delete"),
    "/v1/responses/{id}/input_items": ("get",),
    "/v1/conversations/{id}": ("get", "delete"),
    "/v1/conversations/{id}/items": ("get",),
    "/v1/conversations/{id}/items/{item}": ("get", "delete"),
    "/v1beta/models": ("get",),
    "/v1beta/models/{model}": ("get",),
    "/v1beta/interactions/{id}": ("get", "delete"),
    "/api/tags": ("get",),
    "/api/ps": ("get",),
    "/api/version": ("get",),
    "/health": ("get",),
    "/props": ("get",),
    "/slots": ("get",),
}
"""Methods that have no body, by path."""
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


@functools.cache
def description_json() -> bytes:
    """The description as a file."""
    return msgspec.json.encode(description())


def description() -> dict[str, Any]:
    """As JSON values."""
    refs, schemas = msgspec.json.schema_components(
        BODIES.values(), ref_template="#/components/schemas/{name}"
    )
    paths = {
        path: {"post": _posted(body, ref), **_parameters(path)}
        for (path, body), ref in zip(BODIES.items(), refs, strict=True)
    }
    for path, methods in _READ.items():
        answered = {"responses": _responses({"type": "object"})}
        paths[path] = paths.get(path, {}) | dict.fromkeys(methods, answered) | _parameters(path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "orin-chat", "version": "1"},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _posted(body: type[Any], ref: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "requestBody": _json(dict(ref)) | {"required": True},
        "responses": _responses({"type": "object"}, stream="stream" in body.__struct_fields__),
    }


def _parameters(path: str) -> dict[str, Any]:
    """The parameters that a path has in braces."""
    names = re.findall(r"\{(\w+)\}", path)
    text = {"in": "path", "required": True, "schema": {"type": "string"}}
    return {"parameters": [{"name": name, **text} for name in names]} if names else {}


def _responses(schema: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
    answer = _json(schema)
    if stream:
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "200": {"description": "The answer."} | answer,
        "default": {"description": "Why there is none."} | _json({"$ref": "#/components/schemas/Error"}),
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
