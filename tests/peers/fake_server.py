"""A server that answers as it is told, well or badly, on a port of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

CLOSE = object()  # among what a route sends: the connection is closed here, in the middle
WAIT = object()  # ... : nothing more comes for a long time


def sse(*events: Any) -> list[bytes]:
    """Server-sent events of these objects (strings as they are)."""
    return [b"data: " + (e if isinstance(e, str) else json.dumps(e)).encode() + b"\n\n" for e in events]


class FakeServer:
    """`routes` maps a path to (status, headers, parts of the body); what was asked is in `requests`."""

    def __init__(self, routes: dict[str, tuple[int, dict[str, str], Sequence[Any]]]) -> None:
        self.routes = routes
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.url = ""
        self.hung_up = asyncio.Event()  # set when a client that was made to wait goes

    def answer(self, path: str, *parts: Any, status: int = 200, **headers: str) -> None:
        kind = "text/event-stream" if parts and str(parts[0]).startswith("b'data") else "application/json"
        headers = {"content-type": kind} | {name.replace("_", "-"): value for name, value in headers.items()}
        self.routes[path] = (
            status,
            headers,
            [p if isinstance(p, bytes) or p in (CLOSE, WAIT) else json.dumps(p).encode() for p in parts],
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            path = head[0].split()[1]
            headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append((path, headers, json.loads(body) if body else None))
            status, sent, parts = self.routes.get(
                path, (404, {"content-type": "application/json"}, [b'{"error": {"message": "Not Found"}}'])
            )
            lines = [f"HTTP/1.1 {status} Whatever", "transfer-encoding: chunked", "connection: close"]
            lines += [f"{name}: {value}" for name, value in sent.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            for part in parts:
                if part is CLOSE:
                    return
                if part is WAIT:
                    await writer.drain()
                    await reader.read()  # ends when the client goes
                    self.hung_up.set()
                    return
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.hung_up.set()
        finally:
            writer.close()


@asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer({})
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
