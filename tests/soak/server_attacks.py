"""`orin-chat serve` under attack: clients that vanish, do not read, send half, too much, or what means trouble."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from app.serve.bodies import MAX_BODY_BYTES, MAX_HELD_BYTES
from engine.measure.memory import resident_memory
from tests import generated_model
from tests.paths import ROOT
from tests.soak.counts import Counts

KEY = "s3cret"
PARALLEL, QUEUE, AT_ONCE = 4, 16, 12
SLOW_READERS = 200
LIMIT_S = 60.0
MOST_GROWTH_BYTES = 48 << 20
BUSY = (
    "orin_chat_requests_processing",
    "orin_chat_requests_waiting",
    'orin_chat_kv_cache_blocks{group="0",state="held"}',
)
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "reasoning_effort": "none"}
_ASKED = [{"role": "user", "content": "Hello"}]
HELLOS = {
    CHAT: HELLO,
    "/v1/messages": {"messages": _ASKED, "max_tokens": 24},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 24, "reasoning": {"effort": "none"}},
    "/api/chat": {"messages": _ASKED, "think": False, "options": {"num_predict": 24}},
}
"""The same question in each protocol."""


def _nested(depth: int) -> object:
    value: object = {"type": "integer"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


BOMBS = (
    _nested(60),
    _nested(400),
    {"enum": [f"v{i}-{i * 7919 % 100_003}" for i in range(100_000)]},
    {"type": "string", "pattern": "^(a|b)*a(a|b){25}$"},
    {"type": "string", "pattern": "^(((a{1,100}){1,100}){1,100})$"},
    {"type": "string", "pattern": "(" * 5000},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**6, "maxItems": 10**7, "items": {"type": "integer"}},
    {"properties": {f"p{i}": {"pattern": f"^a{{{i % 50}}}b*$"} for i in range(3000)}},
    {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(3000)]},
    {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"const": j}}} for j in range(10)]} for i in range(8)]},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "integer", "multipleOf": 999_983, "minimum": 10**15, "maximum": 10**18},
)


@dataclass
class Target:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    log: Path
    choose: random.Random
    held: list[socket.socket] = field(default_factory=list)
    """Connections that are never read from."""

    @property
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", headers={"X-Api-Key": KEY}, timeout=LIMIT_S
        )

    async def connect(self, *, receive_bytes: int = 0) -> socket.socket:
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return sock

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def resident_bytes(self) -> tuple[int, int]:
        """Of the server, and of its engine with what both have started."""
        own, *others = (resident_memory(pid) for pid in family(self.process.pid))
        return own.now_bytes if own else 0, sum(other.now_bytes for other in others if other)


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    children = list[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            children += map(int, task.read_text().split())
    return [pid, *(each for child in children for each in family(child))]


def run(tries: int, number: int = 0, *, real: bool = False) -> Counts:
    """`real`: with a small model and its engine, which starts for a while. Else a model that computes nothing."""
    counts = Counts(f"attacks on a server {'with a model' if real else 'and its engine process'}")
    with server(real) as (process, port, log):
        asyncio.run(_all(Target(process, port, log, random.Random(number)), tries, counts, real))
    return counts


@contextlib.contextmanager
def server(real: bool) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    behaviour = json.dumps({"rate": 2000, "tokens": 24, "load_s": 0.0, "prefill_s": 0.0})
    program = ["app"] if real else ["tests.app.synthetic_cli", behaviour]
    with tempfile.TemporaryDirectory() as folder:
        model = generated_model.write(Path(folder, "tiny.gguf"), architecture="qwen3")
        options = ["--model", model, "--port", "0", "--backend", "CPU", "--context", "512", "--plain"]
        options += ["--parallel", PARALLEL, "--queue", QUEUE, "--api-key-env", "ORIN_KEY"]
        log = Path(folder, "log")
        with log.open("w") as out, subprocess.Popen(
            [sys.executable, "-m", *program, "serve", *map(str, options)],
            cwd=ROOT, env=os.environ | {"ORIN_KEY": KEY}, text=True,
            stdout=out, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stderr
            try:
                for line in process.stderr:
                    if address := line.partition("listening on ")[2].strip():
                        yield process, int(address.split(":")[-1].removesuffix("/v1")), log
                        break
                else:
                    raise RuntimeError("the server did not start")
            finally:
                process.terminate()
                process.communicate(timeout=LIMIT_S)


async def _all(target: Target, tries: int, counts: Counts, real: bool) -> None:
    attacks = [_vanishes] * 8 + [
        _half_closes,
        _sends_half,
        _sends_garbage,
        _floods_headers,
        _has_no_key,
        _does_not_read,
    ]
    left = iter(range(tries))

    async def client() -> None:
        for i in left:
            rare = [
                _sends_too_much,
                _fills_memory,
                _asks_for_a_bomb,
                *([_floods, _waits_for_its_turn] if real else [_floods]),
            ]
            attack = rare[i // 50 % len(rare)] if i % 50 == 49 else target.choose.choice(attacks)
            what = attack.__name__.strip("_").replace("_", " ")
            started = time.perf_counter()
            try:
                async with asyncio.timeout(LIMIT_S):
                    await attack(target)
                counts.survived[what] += 1
            except Exception as error:
                counts.lost[f"{what}: {type(error).__name__} {str(error)[:80]}"] += 1
            counts.took((time.perf_counter() - started) * 1e3)

    before = None
    for share in (0.5, 1.0):  # what the first half leaves behind is the measure for the second
        left = iter(range(round(tries * share) - counts.tries))
        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        for sock in target.held:
            sock.close()
        target.held.clear()
        found = await _settled(target)
        before = before or found
    if found[0] > before[0] + 2:
        counts.lost[f"descriptors: {before[0]}, then {found[0]}"] += 1
    if found[1] > before[1] + MOST_GROWTH_BYTES:
        counts.lost[f"memory: {before[1] >> 20} MB, then {found[1] >> 20} MB"] += 1


async def _settled(target: Target) -> tuple[int, int]:
    """Waits until nothing is open, and asks an honest question. Open descriptors and bytes of memory then."""
    async with target.client as client, asyncio.timeout(LIMIT_S):
        while True:
            lines = (await client.get("/metrics")).text.splitlines()
            busy = [line for line in lines if line.startswith(BUSY) and not line.endswith(" 0")]
            if not busy:
                break
            await asyncio.sleep(0.05)
        answer = await client.post(CHAT, json=HELLO)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"], answer.text
    await asyncio.sleep(0.2)
    return target.descriptors(), sum(target.resident_bytes())


# --- attacks: each raises an error if the server does not do what it should ---------------------------------


def _request(body: bytes, *headers: str, key: str = KEY, path: str = CHAT) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"X-Api-Key: {key}", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _asked(**fields: object) -> bytes:
    return json.dumps(HELLO | fields).encode()


async def _send(sock: socket.socket, data: bytes) -> None:
    """The server may hang up before it has read all."""
    with contextlib.suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(sock, data)


async def _answer(sock: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    data = b""
    while part := await _beginning(sock):
        data += part
    return data


async def _beginning(sock: socket.socket) -> bytes:
    """What comes at once. b"": the server has hung up."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
    return b""


def _status(answer: bytes) -> int:
    """0: no answer."""
    return int(answer.split(maxsplit=2)[1]) if answer else 0


async def _vanishes(target: Target) -> None:
    with await target.connect() as sock:
        stream, n = target.choose.random() < 0.7, target.choose.choice((1, 1, 1, 3))
        path = target.choose.choice([*HELLOS])
        await _send(sock, _request(json.dumps(HELLOS[path] | {"stream": stream, "n": n}).encode(), path=path))
        await asyncio.sleep(target.choose.choice((0, 0.002, 0.01, 0.03)))
        if target.choose.random() < 0.5:  # RST in place of FIN
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _half_closes(target: Target) -> None:
    with await target.connect() as sock:
        await _send(sock, _request(_asked(stream=True)))
        sock.shutdown(socket.SHUT_WR)
        assert _status(await _answer(sock)) in (0, 200, 429)


async def _sends_half(target: Target) -> None:
    with await target.connect() as sock:
        whole = _request(_asked())
        await _send(sock, whole[: target.choose.randrange(len(whole))])


async def _sends_garbage(target: Target) -> None:
    with await target.connect() as sock:
        await _send(sock, target.choose.randbytes(target.choose.choice((1, 100, 5000))) + b"\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert _status(await _answer(sock)) in (0, 400)


async def _floods_headers(target: Target) -> None:
    with await target.connect() as sock:
        headers = [f"X-{i}: {'x' * 100}" for i in range(target.choose.choice((20, 200, 2000, 20_000)))]
        await _send(sock, _request(_asked(), "Connection: close", *headers))
        assert _status(await _answer(sock)) in (0, 200, 400, 429, 431)


async def _has_no_key(target: Target) -> None:
    with await target.connect() as sock:
        key = target.choose.choice(("", "s3cre", "S3CRET", "s3cret,", "caf\u00e9", "x" * 9000))
        await _send(sock, _request(_asked(), "Connection: close", key=key))
        assert _status(await _answer(sock)) == 401


async def _does_not_read(target: Target) -> None:
    """Stays for long, beside others."""
    sock = await target.connect(receive_bytes=1)
    target.held.append(sock)
    await _send(sock, _request(_asked(stream=True, logprobs=True, top_logprobs=20)))
    if len(target.held) >= SLOW_READERS:
        target.held.pop(0).close()


async def _sends_too_much(target: Target) -> None:
    with await target.connect() as sock:
        await _send(sock, _request(b" " * (17 << 20), "Connection: close"))
        assert _status(await _answer(sock)) in (0, 413)


async def _fills_memory(target: Target) -> None:
    """With bodies that do not end. Some are refused, and others with short requests are answered meanwhile."""
    head = _request(b"").replace(b"Content-Length: 0", b"Content-Length: %d" % MAX_BODY_BYTES)
    with contextlib.ExitStack() as stack:
        count = MAX_HELD_BYTES // MAX_BODY_BYTES + 2
        socks = [stack.enter_context(await target.connect()) for _ in range(count)]
        await asyncio.gather(*(_send(sock, head + bytes(MAX_BODY_BYTES - 1)) for sock in socks))
        answers = [asyncio.create_task(_beginning(sock)) for sock in socks]
        refused, left = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        async with target.client as client:
            assert (await client.post(CHAT, json=HELLO)).status_code in (200, 429)
        for answer in left:
            answer.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    statuses = {_status(answer.result()) for answer in refused}
    assert statuses <= {0, 503}, statuses


async def _asks_for_a_bomb(target: Target) -> None:
    """An answer that may be cut, or a sentence, and others are answered meanwhile."""
    bomb = {"type": "json_schema", "json_schema": {"schema": target.choose.choice(BOMBS)}}
    async with target.client as client:
        response = await client.post(CHAT, json=HELLO | {"response_format": bomb})
        if response.status_code == 400:
            message = response.json()["error"]["message"]
            assert message.endswith(".") and len(message) < 300, message
        assert response.status_code in (200, 400, 429, 503), response.text


async def _floods(target: Target) -> None:
    """Those that find no place are told so."""
    async with target.client as client:
        n = 2 * (PARALLEL + QUEUE)
        responses = await asyncio.gather(*(client.post(CHAT, json=HELLO) for _ in range(n)))
    statuses = {response.status_code for response in responses}
    assert statuses <= {200, 429} and 429 in statuses, statuses
    assert all("retry-after" in response.headers for response in responses if response.status_code == 429)


async def _waits_for_its_turn(target: Target) -> None:
    """Where one client asks for much at once, another one need not wait for all of it."""
    number = target.choose.random()  # others may do the same now

    def ended() -> list[str]:
        """Who asked for the answers that have ended, by the server's own lines. Others may have taken the places."""
        lines = [line.split() for line in target.log.read_text().splitlines() if f"{number}@" in line]
        return [client for _, client, _, status, *_ in lines if status == "200:"]

    async def ask(user: str) -> None:
        long = HELLO | {"user": f"{user}{number}", "ignore_eos": True, "max_tokens": 300}
        await client.post(CHAT, json=long)

    async with target.client as client:
        many = [asyncio.create_task(ask("many")) for _ in range(PARALLEL + QUEUE - 2)]
        await asyncio.sleep(0.05)
        before = len(ended())
        await asyncio.gather(ask("one"), *many)
    if len(names := ended()) == len(many) + 1:
        waited_for = [name.startswith("one") for name in names].index(True) - before
        assert waited_for <= 2 * PARALLEL, f"it waited for {waited_for} answers"
