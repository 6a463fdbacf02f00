"""Who may ask: the key, and web pages.

A server without a key listens on loopback only, and answers only requests that name it so. A web page whose name was
made to point to 127.0.0.1 (DNS rebinding) sends its own name as Host; a page of another site sends its Origin. With a
key, both are harmless, because the page does not have it. Extensions of browsers and editors, and programs whose
windows are pages, have origins with schemes of their own, which no site can have.
"""

import hashlib
import hmac
import ipaddress
import os
import re
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.serve.errors import ApiError
from app.serve.http import error_response

CLIENT = "orin_chat.client"
"""The key of an ASGI scope: who asks."""
_PROGRAMS = {
    "app", "tauri", "capacitor", "vscode-webview", "vscode-file",
    "chrome-extension", "moz-extension", "safari-web-extension",
}  # fmt: skip
"""Schemes of origins that programs and extensions have. Not "file": a page of a site may have been saved."""
_NO_HOST = frozenset("@/?#\\")
"""What no browser sends as part of a host: before or after it, `urlsplit` finds other hosts than they do."""
# Of Anthropic's clients, of Azure's and of Google's.
_KEY_HEADERS = ("x-api-key", "api-key", "x-goog-api-key")
_GOOGLE = re.compile(r"/(v1beta|v1alpha)/models(/|$)|/v1/models/[^/]+:")
OPEN_PATHS = ("/health", "/v1/health")  # need no key, as in llama-server


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without a port, is this machine by its own word."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Access:
    """ASGI middleware that refuses with 401 or 403."""

    def __init__(self, app: ASGIApp, keys: str) -> None:
        """`keys`: with commas between them. "": none is needed. `CLIENT` of the scope is set to who asks."""
        self._app = app
        self._keys = [os.fsencode(key.strip()) for key in keys.split(",") if key.strip()]
        digests = {hashlib.sha256(key).hexdigest() for key in self._keys}
        self._digits = next(
            n for n in range(4, 65) if len({digest[:n] for digest in digests}) == len(digests)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        origin = headers.get("origin")

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start" and origin:
                sent = MutableHeaders(scope=message)
                sent["Access-Control-Allow-Origin"] = origin
                sent.add_vary_header("Origin")
                if scope["method"] == "OPTIONS":
                    sent["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
                    wanted = headers.get("access-control-request-headers", "Authorization, Content-Type")
                    sent["Access-Control-Allow-Headers"] = wanted
            await send(message)

        try:
            _check_length(headers)
            self._check_page(headers)
        except ApiError as error:
            return await error_response(error, scope["path"])(scope, receive, send)
        if scope["method"] == "OPTIONS":  # what a browser asks before a page may
            return await Response(status_code=204)(scope, receive, send_with_origin)
        try:
            given = _given_key(headers) or _key_in_address(scope)
            if scope["path"] not in OPEN_PATHS:
                self._check_key(given)
        except ApiError as error:
            return await error_response(error, scope["path"])(scope, receive, send_with_origin)
        await self._app({**scope, CLIENT: self._client(scope, given)}, receive, send_with_origin)

    def _client(self, scope: Scope, key: bytes) -> str:
        """The address and, where clients may have different keys, four digits or more that tell these apart."""
        address: str = scope["client"][0] if scope.get("client") else ""
        if not key or len(self._keys) == 1:
            return address
        return f"{address}#{hashlib.sha256(key).hexdigest()[: self._digits]}"

    def _check_page(self, headers: Headers) -> None:
        if self._keys:
            return
        host = headers.get("host", "")
        if _NO_HOST.intersection(host) or not is_loopback(_host(f"//{host}")):
            raise ApiError(403, "Without a key, this server answers only to localhost.", code="wrong_host")
        if not all(map(_is_of_this_machine, headers.getlist("origin"))):
            raise ApiError(
                403, "Without a key, this server answers no pages of other sites.", code="wrong_origin"
            )

    def _check_key(self, given: bytes) -> None:
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all: times tell nothing
        if matches and not any(matches):
            what = "The API key is wrong." if given else "This server needs an API key."
            bearer = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, what, "authentication_error", code="invalid_api_key", headers=bearer)


def _check_length(headers: Headers) -> None:
    """Two statements of a body's length: a proxy before this server may believe the other one, and take a part of the
    body for a request (https://www.rfc-editor.org/rfc/rfc9112#section-6.1)."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise ApiError(400, "The request states its length twice.", headers={"Connection": "close"})


def _given_key(headers: Headers) -> bytes:
    """As it was sent: a header has bytes, which `headers` shows as Latin-1."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        token = next((headers[name] for name in _KEY_HEADERS if name in headers), "")
    return token.encode("latin-1").strip()


def _key_in_address(scope: Scope) -> bytes:
    """Google's older libraries, and commands that its pages show, have the key in the address. Nowhere else is it read:
    addresses end up in histories and in logs of proxies. This server prints none."""
    if not _GOOGLE.match(scope["path"]):
        return b""
    query: str = scope["query_string"].decode("latin-1")
    try:
        return parse_qs(query, encoding="latin-1", max_num_fields=16).get("key", [""])[0].encode("latin-1")
    except ValueError:  # there are more
        return b""


def _is_of_this_machine(origin: str) -> bool:
    scheme, _, host = origin.partition("://")
    is_page = scheme in ("http", "https") and not _NO_HOST.intersection(host)
    return scheme in _PROGRAMS or (is_page and is_loopback(_host(origin)))


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
