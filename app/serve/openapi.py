"""The description of the server's paths, in OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0), for clients and tools.

The schemas of bodies are those of the types in `app/serve/protocols`.
"""

import functools
from typing import Any

import msgspec

from app.serve.protocols.anthropic import CountBody, MessagesBody
from app.serve.protocols.chat import ChatBody
from app.serve.protocols.completions import TextBody
from app.serve.protocols.embeddings import EmbeddingsBody, RerankBody
from app.serve.protocols.llama import CompletionBody, InfillBody
from app.serve.protocols.response_body import ResponsesBody
from app.serve.protocols.tokens import DetokenizeBody, TokenizeBody

BODIES = {
    "/chat/completions": ChatBody,
    "/completions": TextBody,
    "/messages": MessagesBody,
    "/messages/count_tokens": CountBody,
    "/responses": ResponsesBody,
    "/embeddings": EmbeddingsBody,
    "/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/apply-template": ChatBody,
    "/completion": CompletionBody,
    "/infill": InfillBody,
}
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
    _, schemas = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {
        path: {
            "post": {
                "requestBody": _json({"$ref": f"#/components/schemas/{body.__name__}"}) | {"required": True},
                "responses": _responses({"type": "object"}, stream="stream" in body.__struct_fields__),
            }
        }
        for path, body in BODIES.items()
    }
    paths["/models"] = {"get": {"responses": _responses({"type": "object"})}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "orin-chat", "version": "1"},
        "servers": [{"url": "/v1"}],
        "paths": paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


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
