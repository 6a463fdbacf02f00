"""A request for a completion from its arrival to its end, in whatever protocol it came."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from app.serve.answer import (
    AnswerBegun,
    AnswerDelta,
    AnswerEnd,
    AnswerProgress,
    AnswerVector,
    Parts,
    ServedAnswer,
)
from app.serve.http import EventStream, SlowJson
from app.serve.protocols import mistral
from app.serve.protocols.common.reply import Asked, Json, Reply
from app.serve.service import Exchange
from app.serve.stop_texts import StopTexts
from engine.formats.tools.calls import ToolCallParser
from engine.protocol.events import Chat, Generate
from widgets.text import counted


async def answer(request: Request, exchange: Exchange, asked: Asked) -> Response:
    """The answer to `request`, streamed if that is asked. Raises ApiError and ClientGoneError."""
    if asked.asker:
        exchange.client = f"{asked.asker}@{exchange.client}"
    exchange.note, exchange.one_by_one = asked.note, asked.one_by_one
    service = exchange.service
    takes_pieces = asked.reply.takes_pieces and not mistral.is_asked_by_its_library(request.headers)
    answers = [
        ServedAnswer(
            one,
            StopTexts(asked.stops),
            _parser(exchange, one, in_pieces=asked.is_streamed and takes_pieces),
            asked.one_call,
            asked.stop_ids,
            takes_pieces,
            asked.lines() if asked.lines else None,
        )
        for one in asked.requests
    ]
    values = _values(service.parts(exchange, answers), asked.reply)
    values = _noting(values, answers, exchange)
    if not asked.is_streamed:
        whole = SlowJson(_whole(values, asked.reply, exchange), asked.reply.failed)
        await whole.begin(request.receive)
        return whole
    stream = EventStream(_closing(values, exchange), asked.reply)
    await stream.begin(request.receive)
    return stream


def _parser(exchange: Exchange, request: Generate, *, in_pieces: bool) -> ToolCallParser | None:
    form, prompt = exchange.service.file.form, request.prompt
    if not (form and isinstance(prompt, Chat) and prompt.tools):
        return None
    return ToolCallParser(form, prompt.tools, in_pieces=in_pieces)


async def _noting(
    values: AsyncGenerator[Json, None], answers: Sequence[ServedAnswer], exchange: Exchange
) -> AsyncGenerator[Json, None]:
    """`values`. Notes at their end how many calls of the model could not be read, and were given as text."""
    async with aclosing(values):
        async for value in values:
            yield value
    if misread := sum(answer.parser.misread for answer in answers if answer.parser):
        unread = f"{counted(misread, 'call')} of tools could not be read"
        exchange.note = "; ".join(filter(None, (exchange.note, unread)))


async def _values(parts: Parts, reply: Reply) -> AsyncGenerator[Json, None]:
    """The values of a stream, after an empty one when the engine has begun. Raises ApiError."""
    has_begun = False
    async with aclosing(parts):
        async for i, part in parts:
            if not has_begun:
                has_begun = True
                yield {}
                for value in reply.begin():
                    yield value
            match part:
                case AnswerBegun():
                    values = reply.begun(i, part)
                case AnswerProgress():
                    values = reply.progress(i, part.prefilling)
                case AnswerDelta():
                    values = reply.delta(i, part)
                case AnswerVector():
                    reply.vector(i, part.values)
                    continue
                case AnswerEnd():
                    values = reply.ended(i, part)
            for value in values:
                yield value
    if reply.keep:
        await asyncio.to_thread(reply.keep)
    for value in reply.close():
        yield value


async def _whole(values: AsyncGenerator[Json, None], reply: Reply, exchange: Exchange) -> Json | list[Json]:
    """The answer that is made of `values`. Closes the exchange at its end, whatever that is."""
    try:
        with exchange.closed_by_errors():
            async with aclosing(values):
                async for _ in values:
                    pass
            return await asyncio.to_thread(reply.whole)
    finally:
        exchange.close(200)


async def _closing(values: AsyncGenerator[Json, None], exchange: Exchange) -> AsyncGenerator[Json, None]:
    """`values` of a stream. Closes the exchange at its end, whatever that is."""
    try:
        with exchange.closed_by_errors():
            async with aclosing(values):
                async for value in values:
                    exchange.is_streamed = True
                    yield value
    finally:
        exchange.close(200)
