"""What answers requests: reads their bodies, has a protocol make a request to the engine of them, and answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from app.serve.access import CLIENT
from app.serve.answering import answer
from app.serve.bodies import check_copies, is_made, read_body, work_bytes
from app.serve.errors import ApiError
from app.serve.http import HOLDS, json_response, while_connected
from app.serve.limits import Budgets
from app.serve.long_work import MAX_TEXT_BYTES, LongWork
from app.serve.metrics import CONTENT_TYPE, Gauges
from app.serve.model_pool import ModelPool
from app.serve.openapi import description_json
from app.serve.protocols import (
    gemini,
    llama_state,
    lm_studio,
    mistral,
    models,
    ollama,
    responses,
)
from app.serve.protocols.common.json_values import decoded
from app.serve.protocols.common.remembered import Conversations, Remembered
from app.serve.protocols.common.reply import Asked, Json
from app.serve.protocols.response_body import ResponsesBody
from app.serve.service import Exchange, Service
from engine.measure.memory import gpu_used_bytes, resident_memory
from engine.system import invocation

Endpoint = Callable[[Request], Awaitable[Response]]
B = TypeVar("B")
T = TypeVar("T")
LONG_BODY_BYTES = 256 << 10
"""Ordinary requests of long conversations are shorter, or need a few milliseconds more."""


class Endpoints:
    """What answers requests, by protocol."""

    def __init__(self, models: ModelPool, budgets: Budgets, *, has_keys: bool) -> None:
        """`has_keys`: clients have different ones."""
        self._models, self._budgets, self._has_keys = models, budgets, has_keys
        self._conversations, self._long_work = Conversations(), LongWork()

    # --- completions ---

    def completing(
        self, kind: type[Any], asked: Callable[[Any, Service], Asked | Json], in_thread: bool = False
    ) -> Endpoint:
        """What answers requests whose bodies are of a `kind`, in a protocol. `in_thread`: `asked` may take long."""
        return lambda request: self._complete(request, kind, asked, in_thread)

    def remembering(
        self, kind: type[Any], asked: Callable[[Any, Service, Conversations, str], Asked]
    ) -> Endpoint:
        """What answers requests that may go on with an earlier one, which the server remembers."""

        async def endpoint(request: Request) -> Response:
            owner = _owner(request)
            known = lambda body, service: asked(body, service, self._conversations, owner)
            return await self._complete(request, kind, known, in_thread=True)

        return endpoint

    async def _complete(
        self,
        request: Request,
        kind: type[Any],
        asked: Callable[[Any, Service], Asked | Json],
        in_thread: bool = False,
        model: str | None = None,
    ) -> Response:
        """`model`: which is asked, where the body does not say it."""
        port = request.client.port if request.client else 0
        exchange = Exchange(self._models.default, request.scope[CLIENT], request.url.path, port)
        with exchange.closed_by_errors():
            self._enter(exchange, _owner(request) if self._has_keys else exchange.client.partition("#")[0])
            data, body = await self._read(request, kind)
            self._models.default.check_open()
            exchange.service = service = await self._models.named(body.model if model is None else model)
            n_bytes = work_bytes(data) + self._earlier_bytes(request, body)
            if in_thread or n_bytes > LONG_BODY_BYTES:
                wanted = await self._in_thread(request, n_bytes, asked, body, service)
            else:
                wanted = asked(body, service)
            if not isinstance(wanted, Asked):
                exchange.answers = 0
                exchange.close(200)
                return json_response(wanted)
            check_copies(data, wanted.requests)
            del data, body  # the answer may take long
            is_made(request)
            return await answer(request, exchange, wanted)

    async def _read(self, request: Request, kind: type[B]) -> tuple[bytearray, B]:
        """The body of a request. Raises ApiError and ClientGoneError. Long ones of a client are decoded one at a
        time, in a thread, so that others are answered between two of them."""
        data = await read_body(request)
        if len(data) <= LONG_BODY_BYTES:
            return data, decoded(data, kind)
        return data, await self._in_thread(request, len(data), decoded, data, kind)

    async def _in_thread(self, request: Request, n_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
        """What `work` makes, which may take as long as so many bytes of JSON do. Raises ApiError, and ClientGoneError
        if the client goes."""
        coroutine = self._long_work.run(request.scope[CLIENT], n_bytes, work, *arguments)
        return await while_connected(request.receive, coroutine)

    def _earlier_bytes(self, request: Request, body: object) -> int:
        """What the server remembers of the conversation that a request goes on with, and of the items that it names.
        Raises ApiError if there is no room for that."""
        id, names, owner = getattr(body, "earlier_id", None), getattr(body, "named_ids", ()), _owner(request)
        n_bytes = self._conversations.size_bytes(id, owner) if id else 0
        n_bytes += sum(self._conversations.item_bytes(name, owner) for name in {*names})
        request.scope[HOLDS](n_bytes)
        return n_bytes

    def _enter(self, exchange: Exchange, who: str) -> None:
        """Counts a request to its key's limits, until it has ended. Raises ApiError if it is one too many."""
        self._budgets.enter(who)
        exchange.on_closed = lambda tokens: self._budgets.leave(who, tokens)

    async def gemini(self, request: Request) -> Response:
        """The model, and what is asked of it, are in the path."""
        model, method = gemini.called(request.path_params["id"])
        in_events = request.query_params.get("alt") == "sse"

        def asked(given: dict[str, Any], service: Service) -> Asked:
            return gemini.asked(gemini.body_of(given, model, method, in_events=in_events), service)

        def counted(given: dict[str, Any], service: Service) -> Json:
            return gemini.counted(gemini.body_of(given, model), service)

        if method == "countTokens":
            return await self.computing(dict, counted, model)(request)
        if method in gemini.EMBEDS:
            return await self._complete(request, dict, gemini.embeddings_asked, model=model)
        return await self._complete(request, dict, asked, model=model)

    async def gemini_models(self, request: Request) -> Response:
        return json_response(gemini.listed(self._models))

    async def gemini_model(self, request: Request) -> Response:
        service = await self._models.found(request.path_params["id"])
        return json_response(gemini.model(service.model, service))

    # --- what is remembered ---

    def recalling(self, make: Callable[[Remembered, Request], Json]) -> Endpoint:
        """What answers requests for something that the server remembers."""

        async def endpoint(request: Request) -> Response:
            id, owner = request.path_params["id"], _owner(request)
            n_bytes = self._conversations.size_bytes(id, owner)
            request.scope[HOLDS](n_bytes)

            def made() -> Response:
                return json_response(make(self._conversations.get(id, owner), request))

            return await self._in_thread(request, n_bytes, made)

        return endpoint

    def changing(self, kind: type[B], change: Callable[[B, Conversations, str, Request], Json]) -> Endpoint:
        """What answers requests that change what the server remembers. Their bodies may be empty."""

        async def endpoint(request: Request) -> Response:
            data, owner = await read_body(request), _owner(request)
            n_bytes = len(data) + self._conversations.size_bytes(request.path_params.get("id", ""), owner)
            request.scope[HOLDS](n_bytes)

            def made() -> Response:
                return json_response(
                    change(decoded(data or b"{}", kind), self._conversations, owner, request)
                )

            return await self._in_thread(request, n_bytes, made)

        return endpoint

    async def forget_response(self, request: Request) -> Response:
        await self._forget(request)
        return json_response({"id": request.path_params["id"], "object": "response", "deleted": True})

    async def cancel_response(self, request: Request) -> Response:
        self._conversations.check(request.path_params["id"], _owner(request))
        raise ApiError(
            400, "Only responses in the background can be cancelled: close the connection of others."
        )

    async def forget_interaction(self, request: Request) -> Response:
        await self._forget(request)
        return json_response({})

    async def _forget(self, request: Request) -> None:
        """Raises ApiError and ClientGoneError."""
        id, owner = request.path_params["id"], _owner(request)
        n_bytes = self._conversations.size_bytes(id, owner)
        request.scope[HOLDS](n_bytes)
        await self._in_thread(request, n_bytes, self._conversations.forget, id, owner)

    async def count_response(self, request: Request) -> Response:
        owner = _owner(request)
        counted = lambda body, service: responses.counted(body, service, self._conversations, owner)
        return await self.computing(ResponsesBody, counted)(request)

    # --- what else there is ---

    async def health(self, request: Request) -> Response:
        service = self._models.default
        service.check_open()
        if len(self._models.names) == 1:  # else models are loaded as they are asked for
            service.check_ready()
        return json_response({"status": "ok", "slots": service.parallel})

    async def models(self, request: Request) -> Response:
        listed = models.listed(self._models)
        if mistral.is_asked_by_its_library(request.headers):
            listed["data"] = [mistral.model(each) for each in listed["data"]]
        return json_response(listed)

    async def model(self, request: Request) -> Response:
        found = models.model(await self._models.found(request.path_params["id"]))
        return json_response(
            mistral.model(found) if mistral.is_asked_by_its_library(request.headers) else found
        )

    async def lm_studio_models(self, request: Request) -> Response:
        return json_response(lm_studio.listed(self._models))

    async def lm_studio_model(self, request: Request) -> Response:
        return json_response(lm_studio.model(await self._models.found(request.path_params["id"])))

    async def newer_lm_studio_models(self, request: Request) -> Response:
        return json_response(lm_studio.newer_listed(self._models))

    async def metrics(self, request: Request) -> Response:
        services = self._models.known
        memories = [resident_memory(service.engine.pid) for service in services]
        resident = [memory.now_bytes for memory in memories if memory]
        gauges = Gauges(
            sum(service.processing for service in services),
            sum(service.waiting for service in services),
            next((service.slots for service in services if service.slots), None),
            sum(resident) if resident else None,
            await asyncio.to_thread(gpu_used_bytes),  # a driver may take long
        )
        text = self._models.default.metrics.text(gauges)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return Response(description_json(), media_type="application/json")

    def computing(
        self, kind: type[B], make: Callable[[B, Service], Json], model: str | None = None
    ) -> Endpoint:
        """What answers requests whose bodies are of a `kind`, and need no engine. `make` may take long. `model`: which
        is asked, where the body does not say it."""

        def made(body: B, service: Service) -> Response:
            return json_response(make(body, service))

        async def endpoint(request: Request) -> Response:
            data, body = await self._read(request, kind)
            n_bytes = len(data) + self._earlier_bytes(request, body)
            if n_bytes > MAX_TEXT_BYTES:
                raise ApiError(413, f"The request is longer than {MAX_TEXT_BYTES >> 20} MiB.")
            service = await self._models.named(model or getattr(body, "model", None))
            return await self._in_thread(request, n_bytes, made, body, service)

        return endpoint

    def telling(self, tell: Callable[[Service], Json]) -> Endpoint:
        """What says something of a model."""

        async def endpoint(request: Request) -> Response:
            return json_response(tell(await self._asked(request)))

        return endpoint

    async def props(self, request: Request) -> Response:
        service = await self._asked(request)
        service.check_ready()
        return json_response(llama_state.props(service))

    async def slots(self, request: Request) -> Response:
        must_be_free = request.query_params.get("fail_on_no_slot", "0") not in ("", "0")
        return json_response(llama_state.slots(await self._asked(request), must_be_free=must_be_free))

    async def act_on_slot(self, request: Request) -> Response:
        service, action = await self._asked(request), request.query_params.get("action", "")
        return json_response(llama_state.slot_action(service, request.path_params["id"], action))

    async def greet(self, request: Request) -> Response:
        """Clients of Ollama see at / whether a server runs. Browsers, and who looks at /v1, are told what it is."""
        is_told = request.url.path != "/" or "text/html" in request.headers.get("accept", "")
        said = "orin-chat is running: programs take this address" if is_told else ollama.GREETING
        return Response(said, media_type="text/plain")

    async def tags(self, request: Request) -> Response:
        return json_response(ollama.tags(self._models))

    async def running(self, request: Request) -> Response:
        return json_response(ollama.running(self._models))

    async def version(self, request: Request) -> Response:
        return json_response({"version": ollama.VERSION})

    async def pull(self, request: Request) -> Response:
        """Models that there are need not be pulled, which some clients do first."""
        body = decoded(await read_body(request), ollama.PullBody)
        name = body.model or body.name
        if name not in (names := self._models.names) and f"{name}".removesuffix(":latest") not in names:
            raise ApiError(404, f"This server pulls no models. There are: {', '.join(names)}.", param="model")
        return json_response({"status": "success"})

    async def unmanaged(self, request: Request) -> Response:
        raise ApiError(501, "This server's models are those that it was started with: it changes none.")

    async def own_version(self, request: Request) -> Response:
        """As vLLM has it."""
        return json_response({"version": invocation.own_version()})

    async def adapters(self, request: Request) -> Response:
        """llama-server's list of LoRA adapters."""
        return json_response(llama_state.adapters((await self._asked(request)).engine.options.lora))

    async def set_adapters(self, request: Request) -> Response:
        asked = decoded(await read_body(request), list[llama_state.Adapter])
        llama_state.check_adapters((await self._asked(request)).engine.options.lora, asked)
        return json_response({"success": True})

    async def _asked(self, request: Request) -> Service:
        """The model that a request names which has no body."""
        return await self._models.named(request.query_params.get("model"))


def _owner(request: Request) -> str:
    """Who may see what a client has said: those with the same key, if there are several."""
    return str(request.scope[CLIENT]).partition("#")[2]
