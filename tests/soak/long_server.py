"""A server that runs for long: requests of eight kinds, no two of them alike, and the memory that is held meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

from tests.generated_model import PASSAGE
from tests.soak.counts import Counts
from tests.soak.server_attacks import CHAT, KEY, Target, server

AT_ONCE = 6
MOST_MS = 10_000.0
MOST_GROWTH_BYTES = 5 << 20
WARM = 40
"""One part in so many of the requests comes before the measure is taken: 5,000 of 200,000."""
_WORDS = sorted(set(re.findall(r"[a-z]+", PASSAGE.lower())))


def run(tries: int, number: int = 0) -> Counts:
    """All are answered, and server and engine hold no more than `MOST_GROWTH_BYTES` more at the end than after the
    first part in `WARM`. Prints what they hold on the way."""
    counts = Counts("requests of eight kinds to a server that runs for long")
    with server(real=True) as (process, port, log):
        asyncio.run(_all(Target(process, port, log, random.Random(number)), tries, counts))
    return counts


async def _all(target: Target, tries: int, counts: Counts) -> None:
    numbers = iter(range(tries))
    held: dict[int, tuple[int, int]] = {}
    marks = {round(tries / WARM * times): times for times in (1, 2, 4, 6, 8, 10, 15, 20, 25, 30, 35, WARM)}

    async def client(k: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        for i in numbers:
            started = time.perf_counter()
            path, body = _request(target.choose, i)
            try:
                status = await asyncio.wait_for(_ask(reader, writer, path, body), MOST_MS / 1e3)
                assert status == 200, f"status {status}"
                counts.survived["answered"] += 1
            except Exception as error:
                counts.lost[f"{path}: {type(error).__name__} {str(error)[:80]}"] += 1
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            counts.took((time.perf_counter() - started) * 1e3)
            if counts.tries in marks:
                held[counts.tries] = of_server, of_engine = target.resident_bytes()
                print(
                    f"{counts.tries} requests: {of_server >> 10} KiB server, {of_engine >> 10} KiB engine",
                    flush=True,
                )
        writer.close()

    await asyncio.gather(*map(client, range(AT_ONCE)))
    first, last = (sum(held[n]) for n in (min(held), max(held)))
    if last > first + MOST_GROWTH_BYTES:
        counts.lost[f"memory: {first >> 20} MiB, then {last >> 20} MiB"] += 1


def _request(choose: random.Random, i: int) -> tuple[str, dict[str, Any]]:
    """One of eight kinds, with a text and perhaps a user that no other has."""
    text = f"{i} " + " ".join(choose.choices(_WORDS, k=choose.choice((5, 20, 40))))
    messages = [{"role": "user", "content": text}]
    shared: dict[str, Any] = {"stream": choose.random() < 0.5}
    if choose.random() < 0.3:
        shared["user"] = f"user{i}"
    schema = {"type": "object", "properties": {f"field{i}": {"type": "integer"}}, "required": [f"field{i}"]}
    few = choose.choice((1, 2))
    match i % 8:
        case 0:
            return CHAT, shared | {"messages": messages, "max_tokens": few}
        case 1:
            format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            thoughtless = {"reasoning_effort": "none", "response_format": format}
            return CHAT, shared | thoughtless | {"messages": messages, "max_tokens": few}
        case 2:
            return "/v1/completions", shared | {"prompt": text, "max_tokens": few}
        case 3:
            return "/v1/messages", shared | {"messages": messages, "max_tokens": few}
        case 4:
            return "/v1/responses", shared | {"input": text, "max_output_tokens": few}
        case 5:
            return "/api/chat", shared | {"messages": messages, "options": {"num_predict": few}}
        case 6:
            return "/tokenize", {"content": text}
        case _:
            return "/v1/embeddings", {"input": text}


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]
) -> int:
    """The status, once all of the answer has come. This costs little beside what the server does."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    answered = await reader.readuntil(b"\r\n\r\n")
    if length := re.search(rb"(?i)content-length: (\d+)", answered):
        await reader.readexactly(int(length[1]))
    else:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    return int(answered.split()[1])
