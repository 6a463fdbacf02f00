"""HTTP with a model server: JSON objects, streams of server-sent events, and errors in sentences."""

import http
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from engine.errors import BackendError, ContextFullError, OrinError, UsageError, one_line
from engine.formats.tokens.half_characters import without_half_characters
from engine.system.web_client import credentials, making_client

CONNECT_S = 10.0
_GONE = "peer closed connection|Server disconnected"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_BODY_BYTES = 4 << 20  # of an answer that is no stream
MAX_EVENT_BYTES = 16 << 20  # llama-server's last event repeats the prompt

Json = dict[str, Any]


class Reply(msgspec.Struct):
    """Base of the objects that servers send. Decoding checks the types of the fields; a missing field gets its
    default."""

    error: Any = None


class NotFoundError(UsageError):
    """The server has nothing at this address (status 404)."""


R = TypeVar("R", bound=Reply)


def client(base_url: str, key: str = "", socket: str | None = None) -> httpx.AsyncClient:
    """A client for the server at `base_url`; `socket` is the path of a Unix socket to reach it through.

    Without a key, a name and a password for the host come from netrc. It waits without limit for an answer: a long
    prompt may take minutes on a small machine, and the caller can stop.
    Raises UsageError if the address is not valid, the key cannot be sent, or netrc, a proxy or certificates of the
    environment cannot be used.
    """
    host = base_url if re.fullmatch(r"[\w.-]+:\d{1,5}", base_url) else "host:8000"
    example = f"Write it as http://{host}/v1"
    if not base_url.lower().startswith(("http://", "https://")):
        raise UsageError(f"{one_line(base_url)!r} is not the address of a server.", example)
    if not key.isascii() or not key.isprintable():
        raise UsageError("The key holds characters that no key has.", "Set it again, without line breaks.")
    # Without TLS nothing is verified: to read the certificates for that takes 40 ms of a start.
    verifies = base_url.lower().startswith("https://") and not socket
    try:
        with making_client():
            return httpx.AsyncClient(
                auth=None if key or socket else credentials(base_url),
                base_url=base_url.rstrip("/") + "/",
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                verify=verifies,
                transport=httpx.AsyncHTTPTransport(verify=False, uds=socket) if socket else None,
                trust_env=socket is None and urlsplit(base_url).hostname not in _LOOPBACK,  # else no proxy
            )
    except (httpx.InvalidURL, ValueError) as error:
        text = f"{one_line(base_url)!r} is not the address of a server: {one_line(str(error))}."
        raise UsageError(text, example) from None


@asynccontextmanager
async def connection_errors(name: str, address: str) -> AsyncIterator[None]:
    """Raises BackendError in place of httpx's errors. `name` and `address` are those of the server."""
    check = "Check the address, and that the server is running."
    try:
        yield
    except httpx.ConnectTimeout:
        raise BackendError(f"{name} at {one_line(address)} does not answer.", check) from None
    except httpx.ConnectError as error:
        reason = one_line(str(error)) or "no connection"
        raise BackendError(f"{name} cannot be reached at {one_line(address)}: {reason}.", check) from None
    except httpx.TimeoutException:
        raise BackendError(f"{name} takes too long to answer.", "Try again later.") from None
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        # What the library says of a server that ends in the middle of an answer is for its own developers.
        is_gone = isinstance(error, httpx.NetworkError) or re.match(_GONE, str(error))
        reason = " before its answer was complete" if is_gone else f": {one_line(str(error))}"
        hint = "It may have ended: check that it runs, and try again."
        raise BackendError(f"{name} closed the connection{reason}.", hint) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = one_line(str(error)) or type(error).__name__
        raise BackendError(f"{name} closed the connection: {reason}.", "Try again.") from None


async def get(
    server: httpx.AsyncClient, path: str, kind: type[R], name: str, timeout_s: float = CONNECT_S
) -> R:
    """The object at `path`. `name` is the server's, for error messages. Raises OrinError."""
    async with (
        connection_errors(name, str(server.base_url.copy_with(userinfo=b""))),
        server.stream("GET", path, timeout=timeout_s) as response,
    ):
        body = await _body(response, name)
        if response.is_success:
            return _decoded(body, kind, name)
        raise error_of(response, body, name)


async def stream(
    server: httpx.AsyncClient, path: str, request: Json, kind: type[R], name: str
) -> AsyncGenerator[R, None]:
    """Posts `request` and yields the objects of the server-sent events that come back, up to `[DONE]` or the end of
    the body. Raises OrinError, also for an event that is an error.

    The format: https://html.spec.whatwg.org/multipage/server-sent-events.html"""
    async with (
        connection_errors(name, str(server.base_url.copy_with(userinfo=b""))),
        server.stream("POST", path, json=request) as response,
    ):
        if not response.is_success:
            raise error_of(response, await _body(response, name), name)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            raise BackendError(
                f"{name} does not stream its answer.", "Check that the address is that of a model server."
            )
        async for line in _lines(response, name):
            field, _, data = line.partition(b":")
            if field not in (b"data", b"error"):  # some llama-servers send "error:" in the middle of a stream
                continue
            if data.strip() == b"[DONE]":
                return
            if field == b"error":
                raise error_of(None, data, name)
            event = _decoded(data, kind, name)
            if event.error:
                raise error_of(None, data, name)
            yield event


async def _body(response: httpx.Response, name: str) -> bytes:
    """The whole body. Raises BackendError if it has over MAX_BODY_BYTES, for it might never end."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BackendError(
                f"{name} sent an answer of more than {MAX_BODY_BYTES >> 20} MiB.",
                "Check that the address is that of a model server.",
            )
    return bytes(body)


async def _lines(response: httpx.Response, name: str) -> AsyncIterator[bytes]:
    """The lines of the body. Raises BackendError for a line over MAX_EVENT_BYTES, which might never end."""
    begun = bytearray()  # what came of a line whose end has not
    async for part in response.aiter_bytes():
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield bytes(begun + end).removesuffix(b"\r")
            begun.clear()
        begun += rest
        if len(begun) > MAX_EVENT_BYTES:
            raise BackendError(f"{name} sent an event of more than {MAX_EVENT_BYTES >> 20} MiB.")
    if begun:
        yield bytes(begun)


def _decoded(data: bytes, kind: type[R], name: str) -> R:
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError:
            return msgspec.json.decode(without_half_characters(data), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BackendError(
            f"{name} sent something unexpected: {one_line(str(error)).rstrip('.')}.",
            "Check that the address is that of a model server.",
        ) from None


class ModelMeta(msgspec.Struct):
    """What llama-server says of a model beside OpenAI's protocol; 0 and "" from other servers."""

    n_ctx: int = 0
    n_ctx_train: int = 0
    n_params: int = 0
    n_vocab: int = 0
    size: int = 0
    ftype: str = ""


class ListedModel(msgspec.Struct):
    """`max_model_len` is an addition of vLLM."""

    id: str
    owned_by: str = ""
    meta: ModelMeta | None = None
    max_model_len: int | None = None


class ModelList(Reply):
    """The answer to GET models."""

    data: tuple[ListedModel, ...] = ()


# --- errors that a server reports ------------------------------------------------------------------------

_CONTEXT_CODES = ("exceed_context_size_error", "context_length_exceeded")
_CONTEXT_WORDS = ("maximum context length", "context size", "context window")


def error_of(response: httpx.Response | None, body: bytes, name: str) -> OrinError:
    """The error that the server `name` reports. `response` None: it came in the middle of a stream."""
    detail = _detail(body)
    code = detail.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    if response is not None:
        status = response.status_code
    reason = one_line(str(detail.get("message") or "")).rstrip(".")
    because = f": {reason}" if reason else ""
    codes = (detail.get("type"), code)
    if any(each in _CONTEXT_CODES for each in codes) or any(word in reason for word in _CONTEXT_WORDS):
        n_prompt, n_context = detail.get("n_prompt_tokens"), detail.get("n_ctx")
        numbers = (
            f"the prompt has {n_prompt} tokens and the context holds {n_context}" if n_prompt else reason
        )
        return ContextFullError(
            f"The conversation does not fit into the context of {name}: {numbers}.",
            "Shorten the prompt, or start a new chat.",
            tokens=n_prompt if isinstance(n_prompt, int) else 0,
            most=n_context if isinstance(n_context, int) else 0,
        )
    if status in (401, 403):
        return UsageError(
            f"{name} refuses the key{because}.",
            "Put the right one into an environment variable and name it: --api-key-env. Passwords go into ~/.netrc.",
        )
    if status == 404:
        return NotFoundError(
            f"{name} has nothing at this address{because}.",
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
    """The error in a body. OpenAI's form is {"error": {"message", "type", "code"}}; some servers send less."""
    try:
        whole = msgspec.json.decode(body, type=Json)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}  # the error page of a proxy
    error = whole.get("error", whole)
    if isinstance(error, dict):
        return error
    return {"message": error if isinstance(error, str) else ""}


def _phrase(status: int) -> str:
    try:
        return f"{status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
