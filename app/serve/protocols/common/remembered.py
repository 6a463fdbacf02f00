"""Responses and conversations that the server remembers, so that the next request may go on with one."""

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from app.serve.bodies import is_too_much
from app.serve.errors import ApiError
from app.serve.protocols.common.reply import Json

MAX_BYTES = 16 << 20  # of all conversations that are remembered, as JSON, compressed: a third of it, or less
MAX_RESPONSES = 512
MAX_ITEMS = 8 * MAX_RESPONSES
ENTRY_BYTES = 512  # what Python takes for each
_SHORT_BYTES = 1 << 14
_LONG_BYTES = 1 << 20  # compressing more takes so long that others wait


@dataclass(frozen=True)
class Remembered:
    """A response with all of its items, and those before it, which are the first `given`. It is for those who have the
    key of its `owner`."""

    owner: str
    items: list[dict[str, Any]]
    given: int
    response: Json


class Conversations:
    """The last responses, up to `max_bytes` and `max_responses`, and as much of the items of their outputs, which
    requests may name one by one. Of a response that no request could send at once none is kept: it would grow by a
    request each time, and others would wait while it is read."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._responses = _Recent(max_bytes, max_responses)
        self._items = _Recent(max_bytes, MAX_ITEMS)
        self._changing = threading.Lock()

    def keep(self, id: str, remembered: Remembered, output: Sequence[dict[str, Any]] = ()) -> None:
        """`output`: the items that may be named."""
        with suppress(ApiError):
            self.keep_whole(id, remembered)
            for item in output:
                self._items.keep(item["id"], msgspec.json.encode(item), remembered.owner)

    def keep_whole(self, id: str, remembered: Remembered) -> None:
        """Raises ApiError for more than is kept."""
        data = msgspec.json.encode((remembered.items, remembered.given, remembered.response))
        if is_too_much(data):
            raise ApiError(413, "The conversation is longer than a request may be.", param="items")
        self._responses.keep(id, data, remembered.owner)

    def change(self, id: str, owner: str, change: Callable[[Remembered], Remembered]) -> Remembered:
        """Keeps what `change` makes of what `get` returns; one at a time, so that none is lost. Raises ApiError as
        `get`, and for more than is kept: then it stays as it was."""
        with self._changing:
            changed = change(self.get(id, owner))
            self.keep_whole(id, changed)
        return changed

    def get(self, id: str, owner: str) -> Remembered:
        """Raises ApiError if it is not remembered, or another's."""
        data = self._responses.get(id, owner)
        if data is None:
            raise _forgotten(id)
        return Remembered(owner, *msgspec.json.decode(data))

    def check(self, id: str, owner: str) -> None:
        """Raises what `get` raises."""
        if not self._responses.size_bytes(id, owner):
            raise _forgotten(id)

    def size_bytes(self, id: str, owner: str) -> int:
        """The size of what `get` returns, as JSON; 0 if it would raise."""
        return self._responses.size_bytes(id, owner)

    def item(self, id: str, owner: str, param: str) -> dict[str, Any]:
        """An item of a response's output. Raises ApiError as `get`; `param`: where it was named."""
        data = self._items.get(id, owner)
        if data is None:
            raise ApiError(
                404,
                f"The server does not know the item {id[:80]!r}, or has forgotten it: send it.",
                param=param,
            )
        item: dict[str, Any] = msgspec.json.decode(data)
        return item

    def item_bytes(self, id: str, owner: str) -> int:
        """The size of what `item` returns, as JSON; 0 if it would raise."""
        return self._items.size_bytes(id, owner)

    def forget(self, id: str, owner: str) -> None:
        """A response with the items of its output. Raises ApiError, as `get`."""
        for item in self.get(id, owner).response.get("output", ()):
            self._items.forget(item.get("id", ""))  # those of LM Studio's chats have none
        self._responses.forget(id)


def _forgotten(id: str) -> ApiError:
    if id.startswith("conv_"):
        return ApiError(
            404, "The server does not know this conversation, or has forgotten it.", param="conversation"
        )
    message = "The server does not know this response, or has forgotten it: send the whole conversation."
    return ApiError(404, message, param="previous_response_id", code="previous_response_not_found")


_NOTHING = b"", "", 0


class _Recent:
    """The last entries by id, up to `max_bytes` of them (compressed) and `max_entries`. Each is for those who have the
    key of its owner. Any thread may call: long ones are read and written in threads."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes, self._max_entries, self._bytes = max_bytes, max_entries, 0
        self._kept: OrderedDict[str, tuple[bytes, str, int]] = OrderedDict()
        self._lock = threading.RLock()

    def keep(self, id: str, data: bytes, owner: str) -> None:
        size_bytes, data = len(data), _compressed(data)
        with self._lock:
            self.forget(id)
            self._kept[id] = data, owner, size_bytes
            self._bytes += len(data) + ENTRY_BYTES
            while self._kept and (self._bytes > self._max_bytes or len(self._kept) > self._max_entries):
                self.forget(next(iter(self._kept)))

    def get(self, id: str, owner: str) -> bytes | None:
        with self._lock:
            data, its_owner, _ = self._kept.get(id, _NOTHING)
            if not data or its_owner != owner:
                return None
            self._kept.move_to_end(id)
        return zlib.decompress(data)

    def size_bytes(self, id: str, owner: str) -> int:
        """The size before it was compressed; 0 if there is none for this owner."""
        _, its_owner, size_bytes = self._kept.get(id, _NOTHING)
        return size_bytes if its_owner == owner else 0

    def forget(self, id: str) -> None:
        with self._lock:
            data, _, _ = self._kept.pop(id, _NOTHING)
            self._bytes -= len(data) + ENTRY_BYTES if data else 0


def _compressed(data: bytes) -> bytes:
    """Compresses short data with little memory: 260 KB for each response would leave holes in the heap between those
    that stay."""
    wbits = 12 if len(data) <= _SHORT_BYTES else zlib.MAX_WBITS
    compressor = zlib.compressobj(1 if len(data) <= _LONG_BYTES else 0, wbits=wbits, memLevel=5)
    return compressor.compress(data) + compressor.flush()
