"""The paths of the server, as a Starlette application."""

import asyncio
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.serve.access import CLIENT, Access
from app.serve.answering import answer
from app.serve.bodies import Bodies, check_copies, is_made, read_body
from app.serve.errors import ApiError, of_failure, of_usage
from app.serve.http import ClientGoneError, error_response, json_response, while_connected
from app.serve.limits import NO_LIMITS, Budgets, Limits
from app.serve.long_work import MAX_TEXT_BYTES, LongWork
from app.serve.metrics import CONTENT_TYPE, Gauges
from app.serve.model_pool import ModelPool
from app.serve.openapi import description_json
from app.serve.protocols import (
    anthropic,
    chat,
    completions,
    elsewhere,
    embeddings,
    gemini,
    kobold,
    llama,
    llama_state,
    lm_studio,
    lm_studio_chat,
    mistral,
    models,
    ollama,
    responses,
    tabby,
    tgi,
)
from app.serve.protocols.json_values import decoded
from app.serve.protocols.remembered import Conversations
from app.serve.protocols.reply import Asked, Json
from app.serve.protocols.response_body import ResponsesBody
from app.serve.protocols.tokens import DetokenizeBody, TokenizeBody, detokenized, tokenized, tokenizer_info
from app.serve.service import CLIENT_GONE, Exchange, Service
from engine.errors import OrinError, UsageError
from engine.measure.memory import gpu_used_bytes, resident_memory
from engine.protocol.events import Failed
from engine.system import invocation

_BEFORE_PATHS = re.compile(
    r"/openai/deployments/[^/]+/"  # Azure's
    r"|/v1/engines/[^/]+/"  # OpenAI's first form
    r"|/(?!v1/|api/)(?:[^/]+/)+?v1/"  # of Groq (/openai/v1) and others
    r"|/api/v1/v1/"
    r"|/v1/chat/completions/(?=chat/|models|embeddings|responses)"  # the whole address as that of the server
)
"""What clients have before a path, or set as the address of the server."""
LONG_BODY_BYTES = 256 << 10
"""Ordinary requests of long conversations are shorter, or need a few milliseconds more."""
Endpoint = Callable[[Request], Awaitable[Response]]
B = TypeVar("B")


def application(models: Service | ModelPool, key: str = "", limits: Limits = NO_LIMITS) -> ASGIApp:
    """The server of a model or several. `key` "": none is needed, and only this machine is answered. `limits`: those of
    each key."""
    pool = ModelPool(models) if isinstance(models, Service) else models
    routes = Routes(pool, Budgets(limits), has_keys="," in key)
    paths: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", routes.health),
        ("GET", "/ping", routes.health),
        ("GET", "/version", routes.own_version),
        ("GET", "/models", routes.models),
        ("GET", "/models/{id:path}", routes.model),
        ("POST", "/models/{id:path}", routes.gemini),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/openapi.json", routes.openapi),
        ("POST", "/chat/completions", chats := routes.completing(chat.ChatBody, chat.asked)),
        ("POST", "/completions", texts := routes.completing(completions.TextBody, completions.asked)),
        ("POST", "/fim/completions", routes.completing(mistral.FimBody, mistral.asked, True)),
        ("POST", "/messages", routes.completing(anthropic.MessagesBody, anthropic.asked)),
        ("POST", "/messages/count_tokens", routes.computing(anthropic.CountBody, anthropic.counted)),
        ("POST", "/responses", routes.respond),
        ("POST", "/responses/input_tokens", routes.count_response),
        ("GET", "/responses/{id}", routes.response),
        ("DELETE", "/responses/{id}", routes.forget_response),
        ("GET", "/responses/{id}/input_items", routes.input_items),
        ("POST", "/responses/{id}/cancel", routes.cancel_response),
        (
            "POST",
            "/embeddings",
            vectors := routes.completing(embeddings.EmbeddingsBody, embeddings.openai_asked),
        ),
        ("POST", "/embedding", routes.completing(embeddings.EmbeddingsBody, embeddings.llama_asked)),
        (
            "POST",
            "/rerank",
            rerank := routes.completing(embeddings.RerankBody, embeddings.rerank_asked, True),
        ),
        ("POST", "/reranking", rerank),
        ("POST", "/score", routes.completing(embeddings.ScoreBody, embeddings.score_asked, True)),
        ("POST", "/tokenize", routes.computing(TokenizeBody, tokenized)),
        ("POST", "/detokenize", routes.computing(DetokenizeBody, detokenized)),
        ("GET", "/tokenizer_info", routes.telling(tokenizer_info)),
        ("GET", "/props", routes.props),
        ("GET", "/slots", routes.slots),
        ("POST", "/apply-template", routes.computing(chat.ChatBody, llama_state.applied_template)),
        ("POST", "/completion", routes.completing(llama.CompletionBody, llama.completion_asked, True)),
        ("POST", "/infill", routes.completing(llama.InfillBody, llama.infill_asked, True)),
        ("POST", "/slots/{id:int}", routes.act_on_slot),
        ("POST", "/generate", routes.completing(tgi.TgiBody, tgi.generate_asked)),
        ("POST", "/generate_stream", routes.completing(tgi.TgiBody, tgi.stream_asked)),
        ("GET", "/info", routes.telling(tgi.info)),
        ("POST", "/embed", routes.completing(tgi.EmbedBody, tgi.embed_asked)),
        ("POST", "/chat/completions/input_tokens", routes.computing(chat.ChatBody, llama_state.counted)),
    ]
    of_others: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v2/rerank", rerank),
        ("GET", "/lora-adapters", routes.adapters),
        ("POST", "/lora-adapters", routes.set_adapters),
        *(("GET", path, routes.greet) for path in ("/", "/v1")),
        ("POST", "/", routes.completing(tgi.TgiBody, tgi.root_asked)),
        ("POST", "/api/v1/generate", routes.completing(kobold.KoboldBody, kobold.generate_asked, True)),
        (
            "POST",
            "/api/extra/generate/stream",
            routes.completing(kobold.KoboldBody, kobold.stream_asked, True),
        ),
        ("POST", "/api/extra/tokencount", routes.computing(kobold.TextBody, kobold.count)),
        ("POST", "/api/extra/detokenize", routes.computing(kobold.IdsBody, kobold.text_of)),
        *(("GET", path, routes.telling(tell)) for path, tell in kobold.TOLD.items()),
        ("POST", "/api/extra/generate/check", routes.telling(kobold.nothing_so_far)),
        ("POST", "/api/extra/abort", routes.telling(kobold.aborted)),
        ("POST", "/api/chat", routes.completing(ollama.OllamaChatBody, ollama.chat_asked, True)),
        ("POST", "/api/generate", routes.completing(ollama.OllamaGenerateBody, ollama.generate_asked, True)),
        ("GET", "/api/tags", routes.tags),
        ("GET", "/api/ps", routes.running),
        ("GET", "/api/version", routes.version),
        ("POST", "/api/show", routes.computing(ollama.ShowBody, ollama.show)),
        ("POST", "/api/embed", routes.completing(embeddings.EmbedBody, embeddings.ollama_asked, True)),
        (
            "POST",
            "/api/embeddings",
            routes.completing(embeddings.OldEmbedBody, embeddings.old_ollama_asked, True),
        ),
        ("POST", "/api/pull", routes.pull),
        ("GET", "/api/v0/models", routes.lm_studio_models),
        ("GET", "/api/v0/models/{id:path}", routes.lm_studio_model),
        ("GET", "/api/v1/models", routes.newer_lm_studio_models),
        ("POST", "/api/v0/chat/completions", chats),
        ("POST", "/api/v0/completions", texts),
        ("POST", "/api/v0/embeddings", vectors),
        ("POST", "/api/v1/chat", routes.lm_studio_chat),
        ("POST", "/api/v1/models/load", routes.computing(lm_studio.LoadBody, lm_studio.loaded)),
        ("POST", "/api/v1/chat/completions", chats),  # OpenRouter's
        ("POST", "/api/v1/completions", texts),
        ("POST", "/v1/events", routes.telling(tabby.unheard)),
        ("GET", "/v1beta/server_setting", routes.telling(tabby.settings)),
        *((method, path, routes.unmanaged) for method, path in ollama.UNMANAGED),
        *(
            (method, f"/{version}/models{rest}", endpoint)
            for version in gemini.VERSIONS
            for method, rest, endpoint in (
                ("GET", "", routes.gemini_models),
                ("GET", "/{id:path}", routes.gemini_model),
                ("POST", "/{id:path}", routes.gemini),
            )
        ),
    ]
    by_path: dict[str, dict[str, Endpoint]] = {}
    for prefix in ("/v1", ""):
        for method, path, endpoint in paths:
            by_path.setdefault(prefix + path, {})[method] = endpoint
    for method, path, endpoint in of_others:
        by_path.setdefault(path, {})[method] = endpoint
    app = Starlette(
        routes=[Route(path, _by_method(each), methods=[*each]) for path, each in by_path.items()],
        exception_handlers={HTTPException: _not_found},
    )
    app.router.redirect_slashes = False
    return _plain_paths(Access(Bodies(app), key))


class Routes:
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

    async def respond(self, request: Request) -> Response:
        owner = _owner(request)
        asked = lambda body, service: responses.asked(body, service, self._conversations, owner)
        return await self._complete(request, ResponsesBody, asked, in_thread=True)

    async def lm_studio_chat(self, request: Request) -> Response:
        owner = _owner(request)
        asked = lambda body, service: lm_studio_chat.asked(body, service, self._conversations, owner)
        return await self._complete(request, lm_studio_chat.LmChatBody, asked, in_thread=True)

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
            if in_thread or len(data) > LONG_BODY_BYTES:
                work = self._long_work.run(exchange.client, len(data), asked, body, service)
                wanted = await while_connected(request.receive, work)
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
        work = self._long_work.run(request.scope[CLIENT], len(data), decoded, data, kind)
        return data, await while_connected(request.receive, work)

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

    async def response(self, request: Request) -> Response:
        known = self._conversations.get(request.path_params["id"], _owner(request))
        return json_response(known.response)

    async def forget_response(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._conversations.forget(id, _owner(request))
        return json_response({"id": id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        known = self._conversations.get(request.path_params["id"], _owner(request))
        return json_response(responses.input_items(known))

    async def cancel_response(self, request: Request) -> Response:
        self._conversations.get(request.path_params["id"], _owner(request))
        raise ApiError(
            400, "Only responses in the background can be cancelled: close the connection of others."
        )

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
        return json_response(models.listed(self._models))

    async def model(self, request: Request) -> Response:
        return json_response(models.model(await self._models.found(request.path_params["id"])))

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
            if len(data) > MAX_TEXT_BYTES:
                raise ApiError(413, f"The request is longer than {MAX_TEXT_BYTES >> 20} MiB.")
            service = await self._models.named(model or getattr(body, "model", None))
            work = self._long_work.run(request.scope[CLIENT], len(data), made, body, service)
            return await while_connected(request.receive, work)

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
        return json_response([])

    async def set_adapters(self, request: Request) -> Response:
        if decoded(await read_body(request), list):
            raise ApiError(501, "This server has no LoRA adapters.", "not_supported_error", code=501)
        return json_response({"success": True})

    async def _asked(self, request: Request) -> Service:
        """The model that a request names which has no body."""
        return await self._models.named(request.query_params.get("model"))


def _owner(request: Request) -> str:
    """Who may see what a client has said: those with the same key, if there are several."""
    return str(request.scope[CLIENT]).partition("#")[2]


def _by_method(endpoints: Mapping[str, Endpoint]) -> Endpoint:
    """What answers all methods of a path."""
    guarded = {method: _guarded(endpoint) for method, endpoint in endpoints.items()}

    async def endpoint(request: Request) -> Response:
        return await guarded["GET" if request.method == "HEAD" else request.method](request)

    return endpoint


def _plain_paths(app: ASGIApp) -> ASGIApp:
    """`app`, for which paths with and without a slash at their end, with several at their beginning, or as whole
    addresses (https://www.rfc-editor.org/rfc/rfc9112#section-3.2.2) are the same. Clients add a /v1 of their own,
    or Ollama's /api, to an address that ends with /v1, and some have what other providers have before it."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.lower().startswith(("http://", "https://")):
            path = path.partition("://")[2].partition("/")[2]
        path = f"/{path.strip('/')}"
        if path.startswith(("/v1/v1/", "/v1/api/")):
            path = path.removeprefix("/v1")
        elif found := _BEFORE_PATHS.match(path):
            path = f"/v1/{path[found.end() :]}"
        await app({**scope, "path": path}, receive, send)

    return called


def _guarded(endpoint: Endpoint) -> Endpoint:
    """`endpoint` with errors in OpenAI's form. Nothing that a client sent is printed."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ApiError as error:
            return error_response(error, request.url.path)
        except UsageError as error:
            return error_response(of_usage(error), request.url.path)
        except OrinError as error:  # the file of another model, which is read when that is asked for
            return error_response(of_failure(Failed.from_error(error)), request.url.path)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            print(*traceback.format_tb(error.__traceback__), type(error).__name__, sep="", file=sys.stderr)
            failed = ApiError(500, "The server failed.", "server_error")
            return error_response(failed, request.url.path)

    return guarded


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    path = request.url.path
    if not_done := elsewhere.sentence(path):
        failed = ApiError(404, not_done, "not_supported_error", code="not_supported")  # a 501 is asked again
    elif error.status_code == 405:
        failed = ApiError(405, f"This path takes {headers.get('Allow', 'other methods')}.", headers=headers)
    else:
        failed = ApiError(404, "There is nothing at this path.", "not_found_error", headers=headers)
    return error_response(failed, path)
