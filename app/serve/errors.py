"""Why a request is not answered: a status, and JSON in the form of the protocol that the client speaks."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.errors import LOG_IS, UsageError
from engine.protocol.events import Failed


@dataclass
class ApiError(Exception):
    """A request that is not answered. `param` names the field that is wrong. `tokens` and `most`: those of a prompt and
    of the context that it does not fit into (0: not known). `shown` is what the server's own screen says of it."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    most: int = 0
    shown: str = ""

    def __post_init__(self) -> None:
        self.shown = self.shown or self.kind


Form = Callable[[ApiError], dict[str, Any]]
CONTEXT = "context_length_exceeded"  # OpenAI's code, for which agents look to summarize a conversation
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def openai_form(error: ApiError) -> dict[str, Any]:
    """https://platform.openai.com/docs/guides/error-codes"""
    fields = {"message": said(error), "type": error.kind, "param": error.param, "code": error.code}
    return {"error": fields}


def anthropic_form(error: ApiError) -> dict[str, Any]:
    """https://docs.anthropic.com/en/api/errors. Claude Code knows a full context by the message's beginning, and reads
    both numbers of it."""
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error")
    message = error.message
    if error.code == CONTEXT:
        sizes = f"{error.tokens} tokens > {error.most} maximum. " if error.tokens and error.most else ""
        message = f"prompt is too long: {sizes}{message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_form(error: ApiError) -> dict[str, Any]:
    """https://github.com/ollama/ollama/blob/main/docs/api.md"""
    return {"error": said(error)}


# LM Studio's, OpenRouter's
_LIKE_OPENAI = ("/api/v0/", "/api/v1/chat", "/api/v1/models", "/api/v1/completions")
_PATHS_OF_GEMINI = ("/v1beta/", "/v1alpha/")
_OF_INTERACTIONS = re.compile(r"/(v1|v1beta|v1alpha)/interactions(/|$)")
_OF_GEMINI = re.compile(r"\w+(Content|Contents|Tokens)|predict")
"""The end of a path of a model, after the last colon."""
_GEMINI_KINDS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}


def gemini_form(error: ApiError) -> dict[str, Any]:
    """https://cloud.google.com/apis/design/errors"""
    kind = _GEMINI_KINDS.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    return {"error": {"code": error.status, "message": said(error), "status": kind}}


def interactions_form(error: ApiError) -> dict[str, Any]:
    """Their code is a text: https://ai.google.dev/gemini-api/docs/interactions. Google's library reads no other."""
    error_fields = gemini_form(error)["error"]
    return {"error": error_fields | {"code": error_fields["status"].lower()}}


def said(error: ApiError) -> str:
    """The message. That of a full context begins with OpenAI's words, by which many agents know it."""
    if error.code != CONTEXT:
        return error.message
    length = f"This model's maximum context length is {error.most} tokens." if error.most else ""
    return f"{length or 'The maximum context length is exceeded.'} {error.message}"


def form_of(path: str) -> Form:
    """The form of errors of the protocol that a path belongs to."""
    if path.startswith("/api/") and not path.startswith(_LIKE_OPENAI):
        return ollama_form
    if _OF_INTERACTIONS.match(path):
        return interactions_form
    model, _, method = path.rpartition(":")
    if path.startswith(_PATHS_OF_GEMINI) or ("/models/" in model and _OF_GEMINI.fullmatch(method)):
        return gemini_form
    return anthropic_form if "/messages" in path else openai_form


def wrong(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param)


def of_usage(error: UsageError) -> ApiError:
    """The error for a request that cannot be answered as it is: the client's fault."""
    return ApiError(400, f"{error.message} {error.hint}".strip())


def unavailable(message: str, retry_s: int = 1) -> ApiError:
    """The server cannot answer now."""
    headers = {"Retry-After": str(retry_s)}
    return ApiError(503, message, "unavailable_error", code=503, headers=headers)


def of_failure(failed: Failed) -> ApiError:
    """Why the engine did not answer a request."""
    message = f"{failed.message} {failed.hint}".strip()
    match failed.kind:
        case "context":
            return ApiError(400, message, code=CONTEXT, tokens=failed.tokens, most=failed.most)
        case "usage" | "template" if failed.request_id is not None:  # else the file is damaged
            return ApiError(400, message)
    # Where the log lies concerns only who runs the server, who sees no texts of prompts, which other errors may have.
    for_client = message.partition(LOG_IS)[0].strip()
    return ApiError(500, for_client, "server_error", shown=message if failed.kind == "backend" else "")
