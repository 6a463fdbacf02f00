"""A server that many clients ask at once, for long: answers, errors, times and memory.

    python -m tools.measure many_clients MODEL [--backend cuda] [--clients 200] [--seconds 560]

The clients ask in all protocols, streamed or not, with long prompts and JSON schemas; some cancel a stream in its
middle, some vanish at once, some ask for too much. They run in processes of their own, under one key; one client more,
with a key of its own, asks for a single token again and again. Each row is printed when its time is over: what was
asked, what failed, the time to the first token (ms: median, 99 of 100, longest), memory of the server and of its engine
with what they started (MB), and of the GPU (MiB: the engine by nvidia-smi, where it tells processes apart; what the
engine counts itself; all programs). Then a row for each kind of request, and what is left once the server has ended:
also if the measurement is told to end before (SIGTERM).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import queue
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from engine.measure.memory import resident_memory
from tests.generated_model import PASSAGE
from tests.paths import ROOT
from tests.soak.server_attacks import family

PROCESSES, LIMIT_S, START_S, END_S = 6, 120.0, 120.0, 20.0
KEYS = ("of-many", "of-one")
_WORDS = sorted(set(re.findall(r"[a-z]+", PASSAGE.lower())))
_TOKEN = re.compile(rb'"(content|text|delta|response|thinking|reasoning_content|partial_json)": ?"[^"]')
_ERROR = re.compile(rb'(^|\n)(data: )?\s*\{"error"|event: (error|response\.failed)')
_END = re.compile(rb'data: \[DONE\]|event: (response\.(completed|incomplete)|message_stop)|"done": ?true')
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT = "/v1/chat/completions"


@dataclass
class Result:
    """Of a request. `outcome`: "" if it went as it should. `first_s`: until the first token, where one is streamed."""

    kind: str
    outcome: str = ""
    first_s: float | None = None
    whole_s: float = 0.0


def request(choose: random.Random, number: int) -> tuple[str, str, dict[str, Any]]:
    """A kind, a path and a body. No two texts are alike, and one in two has the beginning of others."""
    begin = "You are asked by a program that runs for long. " if choose.random() < 0.5 else ""
    text = begin + f"{number} " + " ".join(choose.choices(_WORDS, k=choose.choice((5, 40, 200))))
    long = f"{number} " + " ".join(choose.choices(_WORDS, k=choose.choice((400, 800, 1400))))
    asked, few = [{"role": "user", "content": text}], choose.choice((8, 16, 48))
    own = {"user": f"user{choose.randrange(200)}", "temperature": choose.choice((0, 0.8)), "max_tokens": few}
    stream = {"stream": True}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": _PERSON}}
    kinds: list[tuple[int, str, str, dict[str, Any]]] = [
        (20, "chat, streamed", CHAT, own | stream | {"messages": asked}),
        (10, "chat, whole", CHAT, own | {"messages": asked, "frequency_penalty": 0.3}),
        (10, "cancelled", CHAT, own | stream | {"messages": asked, "max_tokens": 200, "ignore_eos": True}),
        (8, "vanished", CHAT, own | stream | {"messages": asked, "max_tokens": 200}),
        (8, "long prompt", CHAT, own | stream | {"messages": [{"role": "user", "content": long}]}),
        (8, "JSON schema", CHAT,
         own | stream | {"messages": asked, "response_format": schema, "reasoning_effort": "none", "max_tokens": 80}),
        (4, "several answers", "/v1/completions", own | {"prompt": text, "n": 3, "logprobs": 2}),
        (8, "responses", "/v1/responses", stream | {"input": text, "max_output_tokens": few, "user": own["user"]}),
        (8, "messages", "/v1/messages",
         stream | {"messages": asked, "max_tokens": few, "metadata": {"user_id": own["user"]}}),
        (6, "Ollama chat", "/api/chat", {"messages": asked, "options": {"num_predict": few}}),
        (3, "Ollama generate", "/api/generate", {"prompt": text, "options": {"num_predict": few}}),
        (4, "embeddings", "/v1/embeddings", {"input": [text, text[:40]]}),
        (2, "tokenize", "/tokenize", {"content": long}),
        (1, "too long", CHAT, own | {"messages": [{"role": "user", "content": long * 40}]}),
    ]  # fmt: skip
    _, kind, path, body = choose.choices(kinds, [weight for weight, *_ in kinds])[0]
    return kind, path, body


class Connection:
    """Of a client, kept from request to request."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self, *, reset: bool = False) -> None:
        if self._streams:
            sock = self._streams[1].get_extra_info("socket")
            if reset and sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._streams[1].close()
            self._streams = None

    async def ask(self, kind: str, path: str, body: dict[str, Any], choose: random.Random) -> Result:
        result, started = Result(kind), time.perf_counter()
        try:
            async with asyncio.timeout(LIMIT_S):
                result.outcome = await self._ask(result, path, body, choose, started)
        except Exception as error:
            result.outcome = f"{type(error).__name__} {error}"[:80]
        if result.outcome:
            self.close()
        result.whole_s = time.perf_counter() - started
        return result

    async def _ask(
        self, result: Result, path: str, body: dict[str, Any], choose: random.Random, started: float
    ) -> str:
        self._streams = self._streams or await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {self._key}\r\nContent-Length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)
        if result.kind == "vanished":
            await asyncio.sleep(choose.choice((0, 0.01, 0.1)))
            self.close(reset=choose.random() < 0.5)
            return ""
        answered = await reader.readuntil(b"\r\n\r\n")
        status, got, tokens, most = int(answered.split()[1]), b"", 0, choose.randrange(1, 20)
        async for piece in _pieces(reader, answered):
            got += piece
            if found := len(_TOKEN.findall(piece)):
                tokens += found
                if result.first_s is None and (body.get("stream") or path.startswith("/api/")):
                    result.first_s = time.perf_counter() - started
                if result.kind == "cancelled" and tokens >= most:
                    self.close(reset=choose.random() < 0.5)
                    return ""
        if result.kind == "too long":
            return "" if status == 400 else f"status {status} in place of 400"
        if status != 200:
            return f"status {status}"
        if error := _ERROR.search(got):
            return f"error in the answer: {got[error.start() :][:60]!r}"
        if (body.get("stream") or path.startswith("/api/")) and not _END.search(got):
            return "a stream without an end"
        return ""


async def _pieces(reader: asyncio.StreamReader, head: bytes) -> Any:
    if length := re.search(rb"(?i)content-length: (\d+)", head):
        yield await reader.readexactly(int(length[1]))
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


def many(port: int, first: int, clients: int, ends: float, results: Any) -> None:
    """So many clients, in a process of their own, until the time `ends` (of time.time)."""

    async def one(number: int) -> None:
        choose, connection, count = random.Random(number), Connection(port, KEYS[0]), 0
        await asyncio.sleep(choose.random())
        while time.time() < ends:
            kind, path, body = request(choose, number * 1_000_000 + count)
            result = await connection.ask(kind, path, body, choose)
            results.put(result)
            count += 1
            if result.outcome:
                await asyncio.sleep(0.5)
        connection.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(one(first + i) for i in range(clients)))

    asyncio.run(all_of_them())


def other(port: int, ends: float, results: Any) -> None:
    """The client with a key of its own: a token, and a tenth of a second of rest, until the time `ends`."""

    async def all_of_them() -> None:
        connection, choose = Connection(port, KEYS[1]), random.Random(0)
        while time.time() < ends:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": True}
            results.put(await connection.ask("another key", CHAT, body, choose))
            await asyncio.sleep(0.1)
        connection.close()

    asyncio.run(all_of_them())


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    before_mib: int | None
    results: list[Result] = field(default_factory=list)

    def memory(self) -> tuple[int, int]:
        """Resident bytes: of the server, and of all that it has started."""
        own, *others = (resident_memory(pid) for pid in family(self.process.pid))
        return own.now_bytes if own else 0, sum(each.now_bytes for each in others if each)

    def row(self, seconds: float, results: list[Result]) -> str:
        of_server, of_engine = self.memory()
        failed = [r for r in results if r.outcome]
        firsts = [r.first_s * 1e3 for r in results if r.first_s is not None and r.kind != "another key"]
        others = [r.first_s * 1e3 for r in results if r.first_s is not None and r.kind == "another key"]
        cells = [f"{seconds:.0f}", str(len(results)), str(len(failed)), _times(firsts), _times(others)]
        cells += [f"{of_server >> 20}", f"{of_engine >> 20}", *self.device()]
        return "| " + " | ".join(cells) + " |"

    def say(self, seconds: float, results: list[Result]) -> None:
        """Prints a row, whatever fails: what was asked is of use without what it took."""
        try:
            print(self.row(seconds, results), flush=True)
        except Exception as error:
            print(f"{len(results)} requests in {seconds:.0f} s; no row: {error!r}", flush=True)

    def device(self) -> list[str]:
        """MiB: of the engine by nvidia-smi, of the engine by itself, and of all programs."""
        pids = set(family(self.process.pid))
        listed = _nvidia_smi("--query-compute-apps=pid,used_memory")
        own = [
            int(mib)
            for line in listed
            for pid, mib in [line.split(", ")]
            if int(pid) in pids and mib.isdigit()
        ]
        counted = re.search(r"(?m)^orin_chat_device_memory_bytes (\S+)", self._metrics())
        used = used_mib()
        return [
            str(sum(own)) if own else "-",
            f"{int(float(counted[1])) >> 20}" if counted else "-",
            "-" if used is None else str(used),
        ]

    def _metrics(self) -> str:
        address = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/metrics", headers={"X-Api-Key": KEYS[1]}
        )
        with (
            contextlib.suppress(OSError, HTTPException),
            urllib.request.urlopen(address, timeout=10) as answer,
        ):
            return str(answer.read().decode())
        return ""


def _times(ms: list[float]) -> str:
    """The median, 99 of 100 and the longest."""
    if len(ms) < 2:
        return "-"
    by_percent = statistics.quantiles(ms, n=100, method="inclusive")
    return f"{by_percent[49]:.0f}, {by_percent[98]:.0f}, {max(ms):.0f}"


def _nvidia_smi(query: str) -> list[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.splitlines()
    return []


def used_mib() -> int | None:
    """What all programs hold of the first GPU."""
    lines = _nvidia_smi("--query-gpu=memory.used")
    return int(lines[0]) if lines and lines[0].isdigit() else None


@contextlib.contextmanager
def serving(args: argparse.Namespace, folder: str) -> Iterator[Server]:
    before = used_mib()
    options = ["--plain", "--port", "0", "--model", args.model, "--backend", args.backend]
    options += ["--context", args.context, "--parallel", args.parallel, "--queue", args.queue]
    options += ["--api-key-env", "ORIN_KEY"]
    variables = os.environ | {"ORIN_KEY": ",".join(KEYS)}
    with Path(folder, "log").open("w") as log, subprocess.Popen(
        [sys.executable, "-m", "app", "serve", *map(str, options)],
        cwd=ROOT, env=variables, text=True, stdout=log, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stderr
        try:
            said = list[str]()
            for line in process.stderr:
                said.append(line)
                if address := line.partition("listening on ")[2].strip():
                    break
            else:
                raise RuntimeError("the server did not start: " + "".join(said))
            os.set_blocking(process.stderr.fileno(), False)
            server = Server(process, int(address.split(":")[-1].removesuffix("/v1")), before)
            until = time.monotonic() + START_S
            while not _healthy(server.port):
                assert time.monotonic() < until and process.poll() is None, "the model was not loaded"
                time.sleep(0.1)
            yield server
        finally:
            process.kill()


def _healthy(port: int) -> bool:
    with (
        contextlib.suppress(OSError, HTTPException),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
    ):
        return bool(answer.status == 200)
    return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=560, help="with the start of the server and its end")
    parser.add_argument("--every", type=float, default=30, help="seconds between two rows")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--queue", type=int, default=256)


def run(args: argparse.Namespace) -> None:
    started = time.time()
    with tempfile.TemporaryDirectory() as folder, serving(args, folder) as server:
        print(
            f"ready after {time.time() - started:.1f} s; {server.before_mib} MiB of the GPU before",
            flush=True,
        )
        head = ["s", "asked", "failed", "first token", "another key's", "server", "engine"]
        head += ["GPU: engine", "its count", "all"]
        print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
        server.say(0, [])
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
        try:
            _ask(args, server, started)
        finally:
            _print_kinds(server.results)
            _print_end(server)


def _ask(args: argparse.Namespace, server: Server, started: float) -> None:
    """Prints the rows while the clients ask. The server's start is part of the time, and so is its end."""
    spawn = multiprocessing.get_context("spawn")
    results, ends = spawn.Queue(), started + args.seconds - END_S
    shares = [len(range(i, args.clients, PROCESSES)) for i in range(PROCESSES)]
    processes = [
        spawn.Process(target=many, args=(server.port, 1000 * i, share, ends, results))
        for i, share in enumerate(shares)
    ]
    processes.append(spawn.Process(target=other, args=(server.port, ends, results)))
    for process in processes:
        process.start()
    since, due, first = time.time(), time.time() + args.every, 0
    try:
        while any(process.is_alive() for process in processes) and time.time() < ends + END_S / 2:
            with contextlib.suppress(queue.Empty):
                server.results.append(results.get(timeout=0.2))
            if time.time() >= due:
                server.say(time.time() - since, server.results[first:])
                due, first = due + args.every, len(server.results)
        with contextlib.suppress(queue.Empty):
            while True:
                server.results.append(results.get(timeout=0.2))
        server.say(time.time() - since, server.results[first:])
        if late := sum(process.is_alive() for process in processes):
            print(f"{late} processes of clients had not ended {END_S / 2:.0f} s later", flush=True)
    finally:
        for process in processes:
            process.kill()


def _print_kinds(results: list[Result]) -> None:
    print("\n| kind | asked | failed | first token | whole, median and longest | why |\n" + "|---" * 6 + "|")
    for kind in sorted({result.kind for result in results}):
        own = [result for result in results if result.kind == kind]
        why = Counter(result.outcome for result in own if result.outcome)
        whole = [result.whole_s * 1e3 for result in own]
        reasons = "; ".join(f"{count} {what}" for what, count in why.most_common(3))
        cells = [
            kind,
            str(len(own)),
            str(why.total()),
            _times([r.first_s * 1e3 for r in own if r.first_s is not None]),
        ]
        print(
            "| "
            + " | ".join([*cells, f"{statistics.median(whole):.0f}, {max(whole):.0f}", reasons or "-"])
            + " |"
        )


def _print_end(server: Server) -> None:
    pids = family(server.process.pid)
    stopped = time.time()
    server.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.communicate(timeout=END_S)
    took = time.time() - stopped
    left = [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]
    print(
        f"ended with {server.process.returncode} after {took:.1f} s; {len(left)} of {len(pids)} processes left"
    )
    time.sleep(1)
    print(f"{used_mib()} MiB of the GPU after, {server.before_mib} before", flush=True)
