"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}} with a status that fits."""

from dataclasses import dataclass, field
from typing import Any

from engine.protocol.events import Failed


@dataclass
class ApiError(Exception):
    """A request that is not answered. `param` names the field that is wrong."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def wrong(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param)


def unavailable(message: str, retry_s: int = 1) -> ApiError:
    """The server cannot answer now."""
    headers = {"Retry-After": str(retry_s)}
    return ApiError(503, message, "unavailable_error", code=503, headers=headers)


def of_failure(failed: Failed) -> ApiError:
    """Why the engine did not answer a request."""
    message = f"{failed.message} {failed.hint}".strip()
    match failed.kind:
        case "context":
            return ApiError(400, message, code="context_length_exceeded")
        case "usage" | "model" if failed.request_id is not None:  # the prompt or the template, not the file
            return ApiError(400, message)
    return ApiError(500, message, "server_error")
