"""What a server answers over HTTP: streams of events, and failures as sentences."""

from __future__ import annotations

import http
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from engine.errors import BackendError, ContextFullError, OrinError, UsageError, one_line

CONNECT_S = 10.0
_OURSELVES = ("localhost", "127.0.0.1", "::1")
MAX_EVENT_BYTES = 16 << 20  # llama-server's last event repeats the prompt

Json = dict[str, Any]


class Reply(msgspec.Struct):
    """An object that a server sends: what a type names is there and of its kind, or has the default."""

    error: Any = None


class Missing(UsageError):
    """The server has nothing at this address."""


R = TypeVar("R", bound=Reply)


def client(base_url: str, key: str = "", socket: str | None = None) -> httpx.AsyncClient:
    """A client of the server at `base_url`, through the Unix socket at the path `socket` if there is one.

    It waits for answers as long as they take: a long prompt may take minutes on a small machine, and whoever
    waits can stop. Raises UsageError for an address that cannot be one, or a key that cannot be sent.
    """
    if not base_url.lower().startswith(("http://", "https://")):
        raise UsageError(
            f"{one_line(base_url)!r} is no address of a server.", "Write it as http://host:8000/v1"
        )
    if not key.isascii() or not key.isprintable():
        raise UsageError("The key holds characters that no key has.", "Set it again, without line breaks.")
    try:
        return httpx.AsyncClient(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            transport=httpx.AsyncHTTPTransport(uds=socket) if socket else None,
            trust_env=socket is None and urlsplit(base_url).hostname not in _OURSELVES,  # no proxy to those
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(
            f"{one_line(base_url)!r} is no address of a server: {one_line(str(error))}.",
            "Write it as http://host:8000/v1",
        ) from None


@asynccontextmanager
async def failures_as_sentences(name: str, where: str) -> AsyncIterator[None]:
    """Within it, what goes wrong between us and the server `name` at `where` is raised as an OrinError."""
    try:
        yield
    except httpx.ConnectTimeout:
        raise BackendError(
            f"{name} at {one_line(where)} does not answer.", "Check the address, and that it is running."
        ) from None
    except httpx.ConnectError as error:
        raise BackendError(
            f"{name} cannot be reached at {one_line(where)}: {one_line(str(error)) or 'no connection'}.",
            "Check the address, and that it is running.",
        ) from None
    except httpx.TimeoutException:
        raise BackendError(f"{name} takes too long to answer.", "Try again later.") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BackendError(
            f"{name} broke the connection off: {one_line(str(error)) or type(error).__name__}.", "Try again."
        ) from None


async def get(
    server: httpx.AsyncClient, path: str, kind: type[R], name: str, timeout_s: float = CONNECT_S
) -> R:
    """The object at `path`. Raises OrinError."""
    async with failures_as_sentences(name, str(server.base_url)):
        response = await server.get(path, timeout=timeout_s)
        if response.is_success:
            return _decoded(response.content, kind, name)
        raise refusal(response, response.content, name)


async def events(
    server: httpx.AsyncClient, path: str, request: Json, kind: type[R], name: str
) -> AsyncGenerator[R, None]:
    """Posts `request`, and gives what the server streams back: the objects of server-sent events, up to
    `[DONE]` or the end. Raises OrinError, also for an object that tells of an error."""
    async with (
        failures_as_sentences(name, str(server.base_url)),
        server.stream("POST", path, json=request) as response,
    ):
        if not response.is_success:
            raise refusal(response, await response.aread(), name)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            raise BackendError(
                f"{name} does not stream its answer.", "Check that the address is one of a model server."
            )
        async for line in _lines(response, name):
            field, _, data = line.partition(b":")
            if field not in (b"data", b"error"):  # llama-server has used "error:" for failures in mid-stream
                continue
            if data.strip() == b"[DONE]":
                return
            if field == b"error":
                raise refusal(None, data, name)
            event = _decoded(data, kind, name)
            if event.error:
                raise refusal(None, data, name)
            yield event


async def _lines(response: httpx.Response, name: str) -> AsyncIterator[bytes]:
    """Lines of the body, without an end to one of a server that never ends it."""
    buffer = b""
    async for part in response.aiter_bytes():
        *lines, buffer = (buffer + part).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            yield line
        if len(buffer) > MAX_EVENT_BYTES:
            raise BackendError(f"{name} sent an event of more than {MAX_EVENT_BYTES >> 20} MiB.")
    if buffer:
        yield buffer


def _decoded(data: bytes, kind: type[R], name: str) -> R:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BackendError(
            f"{name} sent something that is not as expected: {one_line(str(error)).rstrip('.')}.",
            "Check that the address is one of a model server.",
        ) from None


# --- refusals ------------------------------------------------------------------------------------------

_CONTEXT_CODES = ("exceed_context_size_error", "context_length_exceeded")
_CONTEXT_WORDS = ("maximum context length", "context size", "context window")


def refusal(response: httpx.Response | None, body: bytes, name: str) -> OrinError:
    """What the server `name` said in place of an answer. `response` None: in the middle of one."""
    detail = _detail(body)
    status = response.status_code if response is not None else _status(detail)
    reason = one_line(str(detail.get("message") or "")).rstrip(".")
    because = f": {reason}" if reason else ""
    codes = (detail.get("type"), detail.get("code"))
    if any(code in _CONTEXT_CODES for code in codes) or any(word in reason for word in _CONTEXT_WORDS):
        n_prompt, n_context = detail.get("n_prompt_tokens"), detail.get("n_ctx")
        numbers = (
            f"the prompt has {n_prompt} tokens and the context holds {n_context}" if n_prompt else reason
        )
        return ContextFullError(
            f"{name} has no room for the conversation: {numbers}.", "Start a new chat, or shorten the prompt."
        )
    if status in (401, 403):
        return UsageError(
            f"{name} refuses the key{because}.",
            "Put the right one into an environment variable and name it with --api-key-env.",
        )
    if status == 404:
        return Missing(
            f"{name} has no such thing{because}.",
            "Check the address (many end in /v1), and the model's name.",
        )
    if status == 429:
        wait = one_line(response.headers.get("retry-after", "") if response is not None else "")
        when = f"in {wait} s" if wait.isdigit() else "later"
        return BackendError(f"{name} takes no more requests now{because}.", f"Try again {when}.")
    if status is not None and 400 <= status < 500:
        return UsageError(f"{name} refuses the request{because or f' ({_phrase(status)})'}.")
    number = f" ({_phrase(status)})" if status is not None else ""
    return BackendError(f"{name} failed{number}{because}.", "Try again; its log may say more.")


def _detail(body: bytes) -> Json:
    """The error in a body: OpenAI's form is {"error": {"message", "type", "code"}}; some have less."""
    try:
        whole = msgspec.json.decode(body, type=Json)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}  # an error page of something in between
    error = whole.get("error", whole)
    if isinstance(error, dict):
        return error
    return {"message": error if isinstance(error, str) else ""}


def _status(detail: Json) -> int | None:
    code = detail.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else None


def _phrase(status: int) -> str:
    try:
        return f"{status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
