"""The paths of the server, as a Starlette application."""

import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.serve.access import Access
from app.serve.bodies import Bodies
from app.serve.endpoints import Endpoint, Endpoints
from app.serve.errors import ApiError, of_failure, of_usage
from app.serve.http import ClientGoneError, error_response
from app.serve.limits import NO_LIMITS, Budgets, Limits
from app.serve.model_pool import ModelPool
from app.serve.protocols import (
    anthropic,
    chat,
    completions,
    conversations,
    elsewhere,
    embeddings,
    gemini,
    interactions,
    kobold,
    llama,
    llama_state,
    lm_studio,
    lm_studio_chat,
    mistral,
    ollama,
    responses,
    tabby,
    tgi,
)
from app.serve.protocols.response_body import ResponsesBody
from app.serve.protocols.tokens import DetokenizeBody, TokenizeBody, detokenized, tokenized, tokenizer_info
from app.serve.service import CLIENT_GONE, Service
from engine.errors import OrinError, UsageError
from engine.protocol.events import Failed

_BEFORE_PATHS = re.compile(
    r"/openai/deployments/[^/]+/"  # Azure's
    r"|/v1/engines/[^/]+/"  # OpenAI's first form
    r"|/(?!v1/|api/)(?:[^/]+/)+?v1/"  # of Groq (/openai/v1) and others
    r"|/v1(?:beta1)?/(?:projects/[^/]+/locations/[^/]+/)?publishers/[^/]+/(?=models/)"  # Vertex AI's
    r"|/api/v1/v1/"
    r"|/v1/chat/completions/(?=chat/|models|embeddings|responses)"  # the whole address as that of the server
)
"""What clients have before a path, or set as the address of the server."""
_SAME = {
    "/reranking": "/rerank",
    "/v1/reranking": "/rerank",
    "/v2/rerank": "/rerank",
    "/api/v0/chat/completions": "/chat/completions",  # LM Studio's
    "/api/v0/completions": "/completions",
    "/api/v0/embeddings": "/embeddings",
    "/api/v1/chat/completions": "/chat/completions",  # OpenRouter's
    "/api/v1/completions": "/completions",
}
"""Further paths of what is posted to another one."""
Entry = tuple[str, str, Endpoint]
"""A method, a path, and what answers it."""


def application(models: Service | ModelPool, key: str = "", limits: Limits = NO_LIMITS) -> ASGIApp:
    """The server of a model or several. `key` "": none is needed, and only this machine is answered. `limits`: those of
    each key."""
    pool = ModelPool(models) if isinstance(models, Service) else models
    endpoints = Endpoints(pool, Budgets(limits), has_keys="," in key)
    by_path: dict[str, dict[str, Endpoint]] = {}
    for prefix in ("/v1", ""):
        for method, path, endpoint in _with_and_without_v1(endpoints):
            by_path.setdefault(prefix + path, {})[method] = endpoint
    for method, path, endpoint in _as_they_are(endpoints):
        by_path.setdefault(path, {})[method] = endpoint
    for path, other in _SAME.items():
        by_path[path] = {"POST": by_path[other]["POST"]}
    app = Starlette(
        routes=[Route(path, _by_method(each), methods=[*each]) for path, each in by_path.items()],
        exception_handlers={HTTPException: _not_found},
    )
    app.router.redirect_slashes = False
    return _plain_paths(Access(_without_sockets(Bodies(app)), key))


def _with_and_without_v1(endpoints: Endpoints) -> list[Entry]:
    """The paths of OpenAI's and Anthropic's protocols, and those of other servers that stand beside them."""
    return [
        ("GET", "/health", endpoints.health),
        ("GET", "/ping", endpoints.health),
        ("GET", "/version", endpoints.own_version),
        ("GET", "/models", endpoints.models),
        ("GET", "/models/{id:path}", endpoints.model),
        ("POST", "/models/{id:path}", endpoints.gemini),
        ("GET", "/metrics", endpoints.metrics),
        ("GET", "/openapi.json", endpoints.openapi),
        ("POST", "/chat/completions", endpoints.completing(chat.ChatBody, chat.asked)),
        ("POST", "/completions", endpoints.completing(completions.TextBody, completions.asked)),
        ("POST", "/fim/completions", endpoints.completing(mistral.FimBody, mistral.asked, True)),
        ("POST", "/messages", endpoints.completing(anthropic.MessagesBody, anthropic.asked)),
        ("POST", "/messages/count_tokens", endpoints.computing(anthropic.CountBody, anthropic.counted)),
        ("POST", "/responses", endpoints.remembering(ResponsesBody, responses.asked)),
        ("POST", "/responses/compact", endpoints.remembering(ResponsesBody, responses.compacted)),
        ("POST", "/responses/input_tokens", endpoints.count_response),
        ("GET", "/responses/{id}", endpoints.recalling(responses.remembered)),
        ("DELETE", "/responses/{id}", endpoints.forget_response),
        ("GET", "/responses/{id}/input_items", endpoints.recalling(responses.input_items)),
        ("POST", "/responses/{id}/cancel", endpoints.cancel_response),
        *_of_conversations(endpoints),
        ("POST", "/embeddings", endpoints.completing(embeddings.EmbeddingsBody, embeddings.openai_asked)),
        ("POST", "/embedding", endpoints.completing(embeddings.EmbeddingsBody, embeddings.llama_asked)),
        ("POST", "/rerank", endpoints.completing(embeddings.RerankBody, embeddings.rerank_asked, True)),
        ("POST", "/score", endpoints.completing(embeddings.ScoreBody, embeddings.score_asked, True)),
        ("POST", "/tokenize", endpoints.computing(TokenizeBody, tokenized)),
        ("POST", "/detokenize", endpoints.computing(DetokenizeBody, detokenized)),
        ("GET", "/tokenizer_info", endpoints.telling(tokenizer_info)),
        ("GET", "/props", endpoints.props),
        ("GET", "/slots", endpoints.slots),
        ("POST", "/apply-template", endpoints.computing(chat.ChatBody, llama_state.applied_template)),
        ("POST", "/completion", endpoints.completing(llama.CompletionBody, llama.completion_asked, True)),
        ("POST", "/infill", endpoints.completing(llama.InfillBody, llama.infill_asked, True)),
        ("POST", "/slots/{id:int}", endpoints.act_on_slot),
        ("POST", "/generate", endpoints.completing(tgi.TgiBody, tgi.generate_asked)),
        ("POST", "/generate_stream", endpoints.completing(tgi.TgiBody, tgi.stream_asked)),
        ("GET", "/info", endpoints.telling(tgi.info)),
        ("POST", "/embed", endpoints.completing(tgi.EmbedBody, tgi.embed_asked)),
        ("POST", "/chat/completions/input_tokens", endpoints.computing(chat.ChatBody, llama_state.counted)),
    ]


def _of_conversations(endpoints: Endpoints) -> list[Entry]:
    changing, one = partial(endpoints.changing, conversations.ConversationBody), "/conversations/{id}"
    return [
        ("POST", "/conversations", changing(conversations.created)),
        ("GET", one, endpoints.recalling(conversations.shown)),
        ("POST", one, changing(conversations.with_metadata)),
        ("DELETE", one, changing(conversations.deleted)),
        ("GET", f"{one}/items", endpoints.recalling(conversations.items)),
        ("POST", f"{one}/items", changing(conversations.added)),
        ("GET", f"{one}/items/{{item}}", endpoints.recalling(conversations.item)),
        ("DELETE", f"{one}/items/{{item}}", changing(conversations.without_item)),
    ]


def _as_they_are(endpoints: Endpoints) -> list[Entry]:
    """The paths of other programs: Hugging Face's servers, KoboldCpp, Ollama, LM Studio, Tabby, Gemini."""
    return [
        ("GET", "/lora-adapters", endpoints.adapters),
        ("POST", "/lora-adapters", endpoints.set_adapters),
        *(("GET", path, endpoints.greet) for path in ("/", "/v1")),
        ("POST", "/", endpoints.completing(tgi.TgiBody, tgi.root_asked)),
        ("POST", "/api/v1/generate", endpoints.completing(kobold.KoboldBody, kobold.generate_asked, True)),
        (
            "POST",
            "/api/extra/generate/stream",
            endpoints.completing(kobold.KoboldBody, kobold.stream_asked, True),
        ),
        ("POST", "/api/extra/tokencount", endpoints.computing(kobold.TextBody, kobold.count)),
        ("POST", "/api/extra/detokenize", endpoints.computing(kobold.IdsBody, kobold.text_of)),
        *(("GET", path, endpoints.telling(tell)) for path, tell in kobold.TOLD.items()),
        ("POST", "/api/extra/generate/check", endpoints.telling(kobold.nothing_so_far)),
        ("POST", "/api/extra/abort", endpoints.telling(kobold.aborted)),
        ("POST", "/api/chat", endpoints.completing(ollama.OllamaChatBody, ollama.chat_asked, True)),
        (
            "POST",
            "/api/generate",
            endpoints.completing(ollama.OllamaGenerateBody, ollama.generate_asked, True),
        ),
        ("GET", "/api/tags", endpoints.tags),
        ("GET", "/api/ps", endpoints.running),
        ("GET", "/api/version", endpoints.version),
        ("POST", "/api/show", endpoints.computing(ollama.ShowBody, ollama.show)),
        ("POST", "/api/embed", endpoints.completing(embeddings.EmbedBody, embeddings.ollama_asked, True)),
        (
            "POST",
            "/api/embeddings",
            endpoints.completing(embeddings.OldEmbedBody, embeddings.old_ollama_asked, True),
        ),
        ("POST", "/api/pull", endpoints.pull),
        ("GET", "/api/v0/models", endpoints.lm_studio_models),
        ("GET", "/api/v0/models/{id:path}", endpoints.lm_studio_model),
        ("GET", "/api/v1/models", endpoints.newer_lm_studio_models),
        ("POST", "/api/v1/chat", endpoints.remembering(lm_studio_chat.LmChatBody, lm_studio_chat.asked)),
        ("POST", "/api/v1/models/load", endpoints.computing(lm_studio.LoadBody, lm_studio.loaded)),
        ("POST", "/v1/events", endpoints.telling(tabby.unheard)),
        ("GET", "/v1beta/server_setting", endpoints.telling(tabby.settings)),
        *((method, path, endpoints.unmanaged) for method, path in ollama.UNMANAGED),
        *(
            (method, f"/{version}/interactions{rest}", endpoint)
            for version in ("v1", *gemini.VERSIONS)
            for method, rest, endpoint in (
                ("POST", "", endpoints.remembering(interactions.InteractionBody, interactions.asked)),
                ("GET", "/{id}", endpoints.recalling(interactions.remembered)),
                ("DELETE", "/{id}", endpoints.forget_interaction),
                ("POST", "/{id}/cancel", endpoints.cancel_response),
            )
        ),
        *(
            (method, f"/{version}/models{rest}", endpoint)
            for version in gemini.VERSIONS
            for method, rest, endpoint in (
                ("GET", "", endpoints.gemini_models),
                ("GET", "/{id:path}", endpoints.gemini_model),
                ("POST", "/{id:path}", endpoints.gemini),
            )
        ),
    ]


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


def _without_sockets(app: ASGIApp) -> ASGIApp:
    """`app`, which refuses WebSockets. Codex CLI asks for one where it takes the server for OpenAI's. After the status
    426 it posts its request at once; after any other one it first tries again for 20 s."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET" or Headers(scope=scope).get("upgrade", "").lower() != "websocket":
            return await app(scope, receive, send)
        refused = ApiError(
            426, "This server has no WebSockets: post the request.", headers={"Upgrade": "HTTP/1.1"}
        )
        await error_response(refused, scope["path"])(scope, receive, send)

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
            with suppress(OSError):  # the disk of a log may be full
                print(
                    *traceback.format_tb(error.__traceback__), type(error).__name__, sep="", file=sys.stderr
                )
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
