"""Items of responses and conversations, as OpenAI gives them back, in pages."""

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from app.serve.errors import ApiError, wrong
from app.serve.protocols.common.remembered import Conversations
from app.serve.protocols.common.reply import Json

MAX_PAGE = 100
_PAGE = 20
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def go_on(id: str, kept: Conversations, owner: str, new: Sequence[Json]) -> None:
    """Adds what a response was given, and its output. A conversation that becomes longer than a request may be is
    forgotten, so that nobody goes on with half of it."""
    more = [stored(item) for item in new]
    with suppress(ApiError):  # deleted meanwhile
        try:
            kept.change(id, owner, lambda known: replace(known, items=[*known.items, *more]))
        except ApiError as error:
            if error.status == 413:
                kept.forget(id, owner)


def stored(item: Json) -> Json:
    """An item as OpenAI gives it back: with an id, and the text of a message as a list of parts."""
    kind = item.get("type", "message")
    kind = kind if isinstance(kind, str) else "unknown"
    prefix = _PREFIXES.get(kind, "item")
    id = item.get("id") or f"{prefix}_{secrets.token_hex(24)}"
    return in_parts(item) | {"id": f"{id}", "type": kind, "status": item.get("status") or "completed"}


def in_parts(item: Json) -> Json:
    """An item, the text of whose message is a list of parts."""
    if not isinstance(text := item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return item | {"content": [{"type": kind, "text": text}]}


def page(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """`limit` of the items after the one that `after` names; the last one first, unless `order` is asc. Raises
    ApiError."""
    limit = query.get("limit", f"{_PAGE}")
    if not (re.fullmatch("[0-9]{1,3}", limit) and 1 <= int(limit) <= MAX_PAGE):
        raise wrong(f"limit is from 1 to {MAX_PAGE}.", "limit")
    in_order = items if query.get("order") == "asc" else items[::-1]
    first = place(in_order, after) + 1 if (after := query.get("after")) else 0
    end = first + int(limit)
    return listed(in_order[first:end], has_more=len(in_order) > end)


def listed(items: Sequence[Json], *, has_more: bool) -> Json:
    """A list that is one page."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
    return {"object": "list", "data": items, "has_more": has_more} | ends


def place(items: Sequence[Json], id: str) -> int:
    """Of the item with this id. Raises ApiError if there is none."""
    found = next((i for i, item in enumerate(items) if item["id"] == id), None)
    if found is None:
        raise ApiError(404, f"There is no item {id[:80]!r}.", "not_found_error")
    return found
