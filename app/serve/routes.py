"""The paths of the server, as a Starlette application."""

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.serve.access import CLIENT, Access
from app.serve.answering import answer
from app.serve.bodies import Bodies, check_copies, read_body
from app.serve.errors import ApiError
from app.serve.http import ClientGoneError, error_response, json_response
from app.serve.metrics import CONTENT_TYPE, Gauges
from app.serve.openapi import description_json
from app.serve.protocols import anthropic, chat, completions, llama, models, ollama, responses
from app.serve.protocols.reply import Asked, Json
from app.serve.protocols.requests import decoded
from app.serve.protocols.tokens import DetokenizeBody, TokenizeBody, detokenized, tokenized, tokenizer_info
from app.serve.service import CLIENT_GONE, Exchange, Service
from engine.measure.memory import gpu_used_bytes, resident_memory

Endpoint = Callable[[Request], Awaitable[Response]]


def application(service: Service, key: str = "") -> ASGIApp:
    """The server of `service`. `key` "": none is needed, and only this machine is answered."""
    routes = Routes(service)
    paths: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", routes.health),
        ("GET", "/models", routes.models),
        ("GET", "/models/{id:path}", routes.model),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/openapi.json", routes.openapi),
        ("POST", "/chat/completions", routes.completing(chat.ChatBody, chat.asked)),
        ("POST", "/completions", routes.completing(completions.TextBody, completions.asked)),
        ("POST", "/messages", routes.completing(anthropic.MessagesBody, anthropic.asked)),
        ("POST", "/messages/count_tokens", routes.count_tokens),
        ("POST", "/responses", routes.respond),
        ("GET", "/responses/{id}", routes.response),
        ("DELETE", "/responses/{id}", routes.forget_response),
        ("POST", "/embeddings", routes.embeddings),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("GET", "/tokenizer_info", routes.tokenizer_info),
        ("GET", "/props", routes.props),
        ("GET", "/slots", routes.slots),
        ("POST", "/apply-template", routes.apply_template),
        ("POST", "/infill", routes.completing(llama.InfillBody, llama.infill_asked)),
    ]
    ollamas: list[tuple[str, str, Endpoint]] = [
        ("GET", "/", routes.greet),
        ("POST", "/api/chat", routes.completing(ollama.OllamaChatBody, ollama.chat_asked)),
        ("POST", "/api/generate", routes.completing(ollama.OllamaGenerateBody, ollama.generate_asked)),
        ("GET", "/api/tags", routes.tags),
        ("GET", "/api/ps", routes.running),
        ("GET", "/api/version", routes.version),
        ("POST", "/api/show", routes.show),
        ("POST", "/api/embed", routes.embeddings),
        ("POST", "/api/embeddings", routes.embeddings),
    ]
    app = Starlette(
        routes=[
            Route(prefix + path, _guarded(endpoint), methods=[method])
            for method, path, endpoint in paths
            for prefix in ("/v1", "")
        ]
        + [Route(path, _guarded(endpoint), methods=[method]) for method, path, endpoint in ollamas],
        exception_handlers={HTTPException: _not_found},
    )
    return Access(Bodies(app), key)


class Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._conversations = responses.Conversations()

    # --- completions ---

    def completing(self, kind: type[Any], asked: Callable[[Any, Service], Asked | Json]) -> Endpoint:
        """What answers requests whose bodies are of a `kind`, in a protocol."""
        return lambda request: self._complete(request, kind, asked)

    async def respond(self, request: Request) -> Response:
        owner = _owner(request)
        asked = lambda body, service: responses.asked(body, service, self._conversations, owner)
        return await self._complete(request, responses.ResponsesBody, asked)

    async def _complete(
        self, request: Request, kind: type[Any], asked: Callable[[Any, Service], Asked | Json]
    ) -> Response:
        service = self._service
        exchange = Exchange(service, request.scope[CLIENT], request.url.path)
        with exchange.closed_by_errors():
            data = await read_body(request)
            service.check_open()
            wanted = asked(decoded(data, kind), service)
            if not isinstance(wanted, Asked):
                exchange.answers = 0
                exchange.close(200)
                return json_response(wanted)
            check_copies(data, wanted.requests)
            del data  # the answer may take long
            return await answer(request, exchange, wanted)

    # --- what is remembered ---

    async def response(self, request: Request) -> Response:
        known = self._conversations.get(request.path_params["id"], _owner(request))
        return json_response(known.response)

    async def forget_response(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._conversations.forget(id, _owner(request))
        return json_response({"id": id, "object": "response", "deleted": True})

    # --- what else there is ---

    async def health(self, request: Request) -> Response:
        self._service.check_ready()
        return json_response({"status": "ok", "slots": self._service.parallel})

    async def models(self, request: Request) -> Response:
        return json_response(models.listed([self._service]))

    async def model(self, request: Request) -> Response:
        id = request.path_params["id"]
        if id != self._service.model:
            message = f"There is no model of this name. There is: {self._service.model}."
            raise ApiError(404, message, "not_found_error", param="model", code="model_not_found")
        return json_response(models.model(self._service))

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
        body = decoded(await read_body(request), TokenizeBody)
        return json_response(await asyncio.to_thread(tokenized, body, self._service))

    async def detokenize(self, request: Request) -> Response:
        body = decoded(await read_body(request), DetokenizeBody)
        return json_response(detokenized(body, self._service))

    async def tokenizer_info(self, request: Request) -> Response:
        return json_response(tokenizer_info(self._service))

    async def props(self, request: Request) -> Response:
        self._service.check_ready()
        return json_response(llama.props(self._service))

    async def slots(self, request: Request) -> Response:
        must_be_free = request.query_params.get("fail_on_no_slot", "0") not in ("", "0")
        return json_response(llama.slots(self._service, must_be_free=must_be_free))

    async def apply_template(self, request: Request) -> Response:
        body = decoded(await read_body(request), chat.ChatBody)
        return json_response(await asyncio.to_thread(llama.applied_template, body, self._service))

    async def greet(self, request: Request) -> Response:
        """Clients of Ollama see so whether a server runs."""
        return Response("orin-chat is running", media_type="text/plain")

    async def tags(self, request: Request) -> Response:
        return json_response(ollama.tags([self._service]))

    async def running(self, request: Request) -> Response:
        return json_response(ollama.running([self._service]))

    async def version(self, request: Request) -> Response:
        return json_response({"version": ollama.VERSION})

    async def show(self, request: Request) -> Response:
        decoded(await read_body(request), ollama.ShowBody)
        return json_response(ollama.show(self._service))

    async def count_tokens(self, request: Request) -> Response:
        body = decoded(await read_body(request), anthropic.CountBody)
        prompt = await asyncio.to_thread(chat.encoded, anthropic.chat_body(body), self._service)
        return json_response({"input_tokens": len(prompt.ids)})


def _owner(request: Request) -> str:
    """Who may see what a client has said: those with the same key, if there are several."""
    return str(request.scope[CLIENT]).partition("#")[2]


def _guarded(endpoint: Endpoint) -> Endpoint:
    """`endpoint` with errors in OpenAI's form. Nothing that a client sent is printed."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ApiError as error:
            return error_response(error, request.url.path)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            print(*traceback.format_tb(error.__traceback__), type(error).__name__, sep="", file=sys.stderr)
            failed = ApiError(500, "The server failed.", "server_error")
            return error_response(failed, request.url.path)

    return guarded


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "There is nothing at this path." if error.status_code == 404 else f"{error.detail}."
    headers = dict(error.headers or {})
    return error_response(ApiError(error.status_code, what, headers=headers), request.url.path)
