"""A server that behaves like the hub, on loopback: its API, redirects to another host for the bytes, ETags and ranges;
and every way to fail that a network has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE_BYTES = 4096


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may go away at any time; what else goes wrong is printed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FakeHub:
    """A hub with one repository, `user/model-GGUF`. As a context it runs in threads.

    `cuts` are numbers of body bytes: each file response is cut after so many, until there are no more.
    `answers` are statuses (or pairs of one and headers) that the next requests of files get instead.
    `api_answers` the same for the API. `gated` is a token that is needed. `sent` replaces the bytes of files,
    with what the hub states of them unchanged. `pause_s` comes before each 4 KiB.
    """

    repository = "user/model-GGUF"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.commit = COMMIT
        self.architecture = "llama"
        self.cuts: deque[int] = deque()
        self.answers: deque[int | tuple[int, dict[str, str]]] = deque()
        self.api_answers: deque[int | tuple[int, dict[str, str]]] = deque()
        self.gated = ""
        self.sent: dict[str, bytes] = {}
        self.pause_s = 0.0
        self.ranges = True
        self.shift = 0  # bytes by which a part begins after the place that was asked for
        self.checks_version = True  # whether a part is sent only of the version in If-Range
        self.on_cut: Callable[[], None] = lambda: None
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers
        self.cut_count = 0
        self.sent_bytes = 0
        self._lock = threading.Lock()

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]

    def info(self) -> Any:
        """What the API says of the repository."""
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": git_sha1(data),
                "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.files.items()
        ]
        for sibling in siblings:
            if not sibling["rfilename"].endswith(".gguf"):  # kept in git itself
                del sibling["lfs"]
        gguf = {"architecture": self.architecture, "total": 1}
        return {"id": self.repository, "sha": self.commit, "siblings": siblings, "gguf": gguf}


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the head and the body are two writes

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        with hub._lock:
            headers = {name.title(): value for name, value in self.headers.items()}
            hub.requests.append((self.command, path, headers))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self._api(match[1], match[2])
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._redirect(match[2], match[3])
            elif match := re.fullmatch(r"/(?:cdn|web)/(.+)", path):
                self._file(match[1])
            else:
                self._answer(404)

    def _api(self, repository: str, revision: str | None) -> None:
        if self._instead(self.hub.api_answers):
            return
        if repository != self.hub.repository:
            self._answer(401, {"X-Error-Code": "RepoNotFound"})
        elif revision not in (None, "main", self.hub.commit):
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            info = self.hub.info()
            self._answer(200, {}, info if isinstance(info, bytes) else json.dumps(info).encode())

    def _redirect(self, revision: str, name: str) -> None:
        """As the hub does it: what the file is in the headers, its bytes at another host."""
        if self._instead(self.hub.answers):
            return
        authorized = self.headers.get("Authorization") == f"Bearer {self.hub.gated}"
        if self.hub.gated and not authorized:
            self._answer(401 if "Authorization" not in self.headers else 403, {"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", self.hub.commit) or name not in self.hub.files:
            self._answer(404, {"X-Error-Code": "EntryNotFound"})
        else:
            data = self.hub.files[name]
            headers = {
                "Location": f"http://localhost:{self.hub.port}/cdn/{name}",
                "X-Repo-Commit": self.hub.commit,
                "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Linked-Size": str(len(data)),
            }
            self._answer(302, headers)

    def _file(self, name: str) -> None:
        hub = self.hub
        if self._instead(hub.answers):
            return
        if name not in hub.files:
            self._answer(404)
            return
        data = hub.sent.get(name, hub.files[name])
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"', "Accept-Ranges": "bytes"}
        start, status = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        is_same = self.headers.get("If-Range", headers["ETag"]) == headers["ETag"]
        if asked and hub.ranges and (is_same or not hub.checks_version):
            start, status = int(asked[1]) + hub.shift, 206
            if start >= len(data):
                self._answer(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._answer(status, headers, data[start:], cut=True)

    def _instead(self, answers: deque[int | tuple[int, dict[str, str]]]) -> bool:
        with self.hub._lock:
            if not answers:
                return False
            answer = answers.popleft()
        status, headers = answer if isinstance(answer, tuple) else (answer, {})
        self._answer(status, headers, b'{"error": "as the test asked"}')
        return True

    def _answer(
        self, status: int, headers: Mapping[str, str] = {}, body: bytes = b"", *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.hub._lock:
            limit = self.hub.cuts.popleft() if cut and self.hub.cuts else None
        for piece in _pieces(body if limit is None else body[:limit]):
            if self.hub.pause_s:
                time.sleep(self.hub.pause_s)
            self.wfile.write(piece)
            self.hub.sent_bytes += len(piece)
        if limit is not None and limit < len(body):
            self._cut(limit)

    def _cut(self, limit: int) -> None:
        """Ends the connection: every other time by a reset, which may take bytes on their way along."""
        self.hub.cut_count += 1
        self.hub.on_cut()
        if limit % 2:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


def _pieces(body: bytes) -> Iterable[bytes]:
    return (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))
