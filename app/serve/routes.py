"""The paths of the server, as a Starlette application."""

import asyncio
import sys
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.serve import replies
from app.serve.access import CLIENT, Access
from app.serve.answer import AnswerDelta, AnswerEnd, Parts, ServedAnswer
from app.serve.bodies import Bodies, read_body
from app.serve.errors import ApiError
from app.serve.http import (
    ClientGoneError,
    ServerSentEvents,
    error_response,
    json_response,
    while_connected,
)
from app.serve.metrics import CONTENT_TYPE, Gauges
from app.serve.openapi import description_json
from app.serve.requests import (
    Body,
    ChatBody,
    DetokenizeBody,
    TextBody,
    TokenizeBody,
    chat_request,
    decoded,
    text_request,
    variants,
)
from app.serve.service import CLIENT_GONE, Exchange, Service
from app.serve.stop_texts import StopTexts
from engine.formats.tool_calls import ToolCallParser
from engine.measure.memory import gpu_used_bytes, resident_memory
from engine.protocol.events import Chat

Endpoint = Callable[[Request], Awaitable[Response]]


def application(service: Service, key: str = "") -> ASGIApp:
    """The server of `service`. `key` "": none is needed, and only this machine is answered."""
    routes = Routes(service)
    paths: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", routes.health),
        ("GET", "/models", routes.models),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/openapi.json", routes.openapi),
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
    return Access(Bodies(app), key)


class Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    # --- completions ---

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, "chat")

    async def text(self, request: Request) -> Response:
        return await self._complete(request, "text")

    async def _complete(self, request: Request, kind: Literal["chat", "text"]) -> Response:
        exchange = Exchange(self._service, request.scope[CLIENT], request.url.path)
        with exchange.closed_by_errors():
            return await self._answer(request, kind, exchange)

    async def _answer(self, request: Request, kind: Literal["chat", "text"], exchange: Exchange) -> Response:
        service = self._service
        data = await read_body(request)
        service.check_open()
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
        del data  # the answer may take long
        if body.asker:
            exchange.client = f"{body.asker}@{exchange.client}"
        form, tools = service.file.form, asked.prompt.tools if isinstance(asked.prompt, Chat) else ""

        def parser() -> ToolCallParser | None:
            return ToolCallParser(form, tools) if form and tools else None

        requests = variants(asked, body.answers)
        reply = replies.Reply(kind, service.model, service.file.tokenizer, shown)
        each = [replace(reply, index=i) for i in range(len(requests))]
        parts = service.parts(
            exchange, [ServedAnswer(one, StopTexts(body.stops), parser()) for one in requests]
        )
        if not body.stream:
            whole = await while_connected(request.receive, _collected(parts, each))
            exchange.close(200)
            return json_response(whole)
        stream = ServerSentEvents(_chunks(parts, each, body.includes_usage, exchange))
        await stream.begin(request.receive)
        return stream

    # --- what else there is ---

    async def health(self, request: Request) -> Response:
        self._service.check_ready()
        return json_response({"status": "ok", "slots": self._service.parallel})

    async def models(self, request: Request) -> Response:
        service = self._service
        vocabulary = service.file.tokenizer.vocab_size
        return json_response(replies.models(service.model, service.created, service.ready, vocabulary))

    async def metrics(self, request: Request) -> Response:
        service = self._service
        memory = resident_memory(service.engine.pid)
        gauges = Gauges(
            service.processing,
            service.waiting,
            service.slots,
            memory.now_bytes if memory else None,
            gpu_used_bytes(),
        )
        text = service.metrics.text(gauges)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def embeddings(self, request: Request) -> Response:
        raise ApiError(
            501, "This server has no embeddings: it generates text.", "not_supported_error", code=501
        )

    async def openapi(self, request: Request) -> Response:
        return Response(description_json(), media_type="application/json")

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


async def _collected(parts: Parts, answers: Sequence[replies.Reply]) -> replies.Json:
    deltas: list[list[AnswerDelta]] = [[] for _ in answers]
    ends: dict[int, AnswerEnd] = {}
    async with aclosing(parts):
        async for i, part in parts:
            if isinstance(part, AnswerDelta):
                deltas[i].append(part)
            elif isinstance(part, AnswerEnd):
                ends[i] = part
    choices = [answer.choice(deltas[i], ends[i]) for i, answer in enumerate(answers)]
    return answers[0].whole(choices, [ends[i] for i in range(len(answers))])


async def _chunks(
    parts: Parts, answers: Sequence[replies.Reply], include_usage: bool, exchange: Exchange
) -> AsyncGenerator[replies.Json, None]:
    """The objects of a stream, after an empty one when the engine has begun. Raises ApiError."""
    ends = list[AnswerEnd]()
    try:
        with exchange.closed_by_errors():
            async with aclosing(parts):
                async for i, part in parts:
                    if not exchange.is_streamed:
                        exchange.is_streamed = True
                        yield {}
                        for answer in answers:
                            if first := answer.first():
                                yield first
                    if isinstance(part, AnswerDelta) and (chunk := answers[i].chunk(part)):
                        yield chunk
                    elif isinstance(part, AnswerEnd):
                        ends.append(part)
                        yield answers[i].ending(part, timed=not include_usage)
            if include_usage:
                yield answers[0].usage(ends)
    finally:
        exchange.close(200)


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
