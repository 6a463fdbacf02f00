"""OpenAI's conversations, which requests for responses go on with by name:
https://platform.openai.com/docs/api-reference/conversations.

The server remembers them as it does responses: the last ones, until it ends. A response adds what it was given, and its
output, when it is complete.
"""

import secrets
import time
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request

from app.serve.errors import ApiError, wrong
from app.serve.protocols import responses
from app.serve.protocols.common.items import listed, page, place, stored
from app.serve.protocols.common.remembered import Conversations, Remembered
from app.serve.protocols.common.reply import Json


class ConversationBody(msgspec.Struct):
    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


def created(body: ConversationBody, kept: Conversations, owner: str, request: Request) -> Json:
    """Raises ApiError."""
    head: Json = {
        "id": f"conv_{secrets.token_hex(24)}",
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": body.metadata or {},
    }
    items = _stored(body)
    kept.keep_whole(head["id"], Remembered(owner, items, len(items), head))
    return head


def shown(known: Remembered, request: Request) -> Json:
    """Raises ApiError for what is no conversation."""
    if known.response.get("object") != "conversation":
        raise ApiError(404, "This is no conversation.", "not_found_error")
    return known.response


def items(known: Remembered, request: Request) -> Json:
    """A page of what was said so far. Raises ApiError."""
    shown(known, request)
    return page(known.items, request.query_params)


def item(known: Remembered, request: Request) -> Json:
    """Raises ApiError."""
    shown(known, request)
    return known.items[place(known.items, request.path_params["item"])]


def with_metadata(body: ConversationBody, kept: Conversations, owner: str, request: Request) -> Json:
    """With other metadata. Raises ApiError."""

    def change(known: Remembered) -> Remembered:
        return replace(known, response=shown(known, request) | {"metadata": body.metadata or {}})

    return kept.change(request.path_params["id"], owner, change).response


def added(body: ConversationBody, kept: Conversations, owner: str, request: Request) -> Json:
    """With more items, which are returned. Raises ApiError."""
    if not (new := _stored(body)):
        raise wrong("There are no items.", "items")

    def change(known: Remembered) -> Remembered:
        shown(known, request)
        return replace(known, items=[*known.items, *new])

    kept.change(request.path_params["id"], owner, change)
    return listed(new, has_more=False)


def without_item(body: ConversationBody, kept: Conversations, owner: str, request: Request) -> Json:
    """Without an item. Raises ApiError."""

    def change(known: Remembered) -> Remembered:
        shown(known, request)
        i = place(known.items, request.path_params["item"])
        return replace(known, items=[*known.items[:i], *known.items[i + 1 :]])

    return kept.change(request.path_params["id"], owner, change).response


def deleted(body: ConversationBody, kept: Conversations, owner: str, request: Request) -> Json:
    """Raises ApiError."""
    id = request.path_params["id"]
    shown(kept.get(id, owner), request)
    kept.forget(id, owner)
    return {"id": id, "object": "conversation.deleted", "deleted": True}


def _stored(body: ConversationBody) -> list[Json]:
    """Raises ApiError for items that no request for a response may have."""
    responses.check(body.items or ())
    return [stored(item) for item in body.items or ()]
