"""The paths of the server, as a Starlette application."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.serve import replies
from app.serve.access import Access
from app.serve.answer import Answer, Delta, End, Part
from app.serve.errors import ApiError
from app.serve.http import (
    ClientGoneError,
    EventStream,
    error_response,
    json_response,
    read_body,
    while_connected,
)
from app.serve.metrics import CONTENT_TYPE
from app.serve.requests import (
    Body,
    ChatBody,
    DetokenizeBody,
    TextBody,
    TokenizeBody,
    chat_request,
    decoded,
    text_request,
)
from app.serve.service import CLIENT_GONE, Exchange, Service
from app.serve.stop_texts import StopTexts
from engine.events import Chat
from engine.formats.tool_calls import ToolCallParser

Endpoint = Callable[[Request], Awaitable[Response]]


def application(service: Service, key: str = "") -> ASGIApp:
    """The server of `service`. `key` "": none is needed, and only this machine is answered."""
    routes = Routes(service)
    paths: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", routes.health),
        ("GET", "/models", routes.models),
        ("GET", "/metrics", routes.metrics),
        ("POST", "/chat/completions", routes.chat),
        ("POST", "/completions", routes.text),
        ("POST", "/embeddings", routes.embeddings),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
    ]
    app = Starlette(
        routes=[
            Route(prefix + path, _guarded(endpoint), methods=[method])
            for method, path, endpoint in paths
            for prefix in ("/v1", "")
        ],
        exception_handlers={HTTPException: _not_found},
    )
    return Access(app, key)


class Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    # --- completions ---

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, "chat")

    async def text(self, request: Request) -> Response:
        return await self._complete(request, "text")

    async def _complete(self, request: Request, kind: Literal["chat", "text"]) -> Response:
        exchange = Exchange(self._service, request.client.host if request.client else "", request.url.path)
        try:
            return await self._completed(request, kind, exchange)
        except ApiError as error:
            exchange.close(error.status, error.kind)
            raise
        except ClientGoneError:
            exchange.close(CLIENT_GONE)
            raise
        except Exception:
            exchange.close(500, "server_error")
            raise

    async def _completed(
        self, request: Request, kind: Literal["chat", "text"], exchange: Exchange
    ) -> Response:
        service = self._service
        data = await read_body(request)
        service.check_ready()
        body: Body
        shown: int | None
        if kind == "chat":
            body = decoded(data, ChatBody)
            asked = chat_request(body, service.sampling, service.file.form, service.think)
            shown = body.top_logprobs or 0 if body.logprobs else None
        else:
            body = decoded(data, TextBody)
            asked = text_request(body, service.sampling)
            shown = body.logprobs
        parser = None
        if isinstance(asked.prompt, Chat) and asked.prompt.tools and service.file.form:
            parser = ToolCallParser(service.file.form, asked.prompt.tools)
        reply = replies.Reply(kind, service.model, service.file.tokenizer, shown)
        parts = service.parts(exchange, Answer(asked, StopTexts(body.stops), parser))
        if not body.stream:
            deltas, end = await while_connected(request.receive, _collected(parts))
            exchange.close(200)
            return json_response(reply.whole(deltas, end))
        chunks = _chunks(parts, reply, body.includes_usage, exchange)
        await while_connected(request.receive, _begun(chunks))
        return EventStream(chunks)

    # --- what else there is ---

    async def health(self, request: Request) -> Response:
        self._service.check_ready()
        return json_response({"status": "ok"})

    async def models(self, request: Request) -> Response:
        service = self._service
        vocabulary = service.file.tokenizer.vocab_size
        return json_response(replies.models(service.model, service.created, service.ready, vocabulary))

    async def metrics(self, request: Request) -> Response:
        service = self._service
        text = service.metrics.text(service.processing, service.waiting)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def embeddings(self, request: Request) -> Response:
        raise ApiError(
            501, "This server has no embeddings: it generates text.", "not_supported_error", code=501
        )

    async def tokenize(self, request: Request) -> Response:
        """As llama-server: special tokens in the text are special unless the client says otherwise."""
        body = decoded(await read_body(request), TokenizeBody)
        tokenizer = self._service.file.tokenizer
        special, add = body.parse_special is not False, bool(body.add_special)
        ids = await asyncio.to_thread(tokenizer.encode, body.content, special=special, add_special=add)
        if not body.with_pieces:
            return json_response({"tokens": ids})
        return json_response({"tokens": [{"id": id, "piece": _piece(tokenizer.piece(id))} for id in ids]})

    async def detokenize(self, request: Request) -> Response:
        body = decoded(await read_body(request), DetokenizeBody)
        pieces = b"".join(map(self._service.file.tokenizer.piece, body.tokens))
        return json_response({"content": pieces.decode("utf-8", "replace")})


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are only a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]


async def _begun(chunks: AsyncGenerator[replies.Json, None]) -> None:
    """Waits until the engine begins: what is wrong with a request is known then."""
    await anext(chunks)


async def _collected(parts: AsyncGenerator[Part, None]) -> tuple[list[Delta], End]:
    deltas = []
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Delta):
                deltas.append(part)
            elif isinstance(part, End):
                return deltas, part
    raise AssertionError("an answer without its end")


async def _chunks(
    parts: AsyncGenerator[Part, None], reply: replies.Reply, include_usage: bool, exchange: Exchange
) -> AsyncGenerator[replies.Json, None]:
    """The objects of a stream, after an empty one when the engine has begun. Raises ApiError before that; a later error
    is the last object."""
    async with aclosing(parts):
        await anext(parts)
        error = ""
        try:
            yield {}
            if first := reply.first():
                yield first
            async for part in parts:
                if isinstance(part, Delta) and (chunk := reply.chunk(part)):
                    yield chunk
                elif isinstance(part, End):
                    for last in reply.ending(part, include_usage):
                        yield last
        except ApiError as failure:
            error = failure.kind
            yield failure.body
        finally:
            exchange.close(200, error)


def _guarded(endpoint: Endpoint) -> Endpoint:
    """`endpoint` with errors in OpenAI's form. Nothing that a client sent is printed."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ApiError as error:
            return error_response(error)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            print(*traceback.format_tb(error.__traceback__), type(error).__name__, sep="", file=sys.stderr)
            return error_response(ApiError(500, "The server failed.", "server_error"))

    return guarded


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "There is nothing at this path." if error.status_code == 404 else f"{error.detail}."
    return error_response(ApiError(error.status_code, what, headers=dict(error.headers or {})))
