"""Pictures through the server, as the clients of OpenAI and Anthropic and an Ollama client send them:

    python -m tools.measure picture_clients MODEL [--mmproj FILE] [--backend cuda] [--at-once 16]

Starts `orin-chat serve` and asks about a picture of its own with each request, `--at-once` of them at the same time.
Prints for each protocol how many were answered, and the shortest and the longest time. Then it asks for what the server
has to refuse, 100 megapixels, an address, a damaged file, and prints the answers. Exits with 1 if a request was not
answered, or was not refused. Needs the clients (`pip install openai anthropic`).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.measure.picture_rates import picture

KEY = "sk-measured"
START_S = 300.0
QUESTION = "What is in this picture?"
TOKENS = 8


def data_url(data: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def chat_body(url: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "m", "max_tokens": TOKENS, "messages": [{"role": "user", "content": parts}]}


def asks(server: str) -> dict[str, Callable[[bytes], int]]:
    """By protocol a function that asks about a picture, and returns the tokens of the reply."""
    import anthropic
    import openai

    of_openai = openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0, timeout=600)
    of_anthropic = anthropic.Anthropic(base_url=server, api_key=KEY, max_retries=0, timeout=600)

    def chat(data: bytes) -> int:
        reply: Any = of_openai.chat.completions.create(**chat_body(data_url(data)))
        return int(reply.usage.completion_tokens)

    def responses(data: bytes) -> int:
        content = [
            {"type": "input_text", "text": QUESTION},
            {"type": "input_image", "image_url": data_url(data)},
        ]
        asked: Any = [{"role": "user", "content": content}]
        reply: Any = of_openai.responses.create(model="m", max_output_tokens=TOKENS, input=asked)
        return int(reply.usage.output_tokens)

    def messages(data: bytes) -> int:
        source = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(data).decode()}
        content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
        asked: Any = [{"role": "user", "content": content}]
        reply: Any = of_anthropic.messages.create(model="m", max_tokens=TOKENS, messages=asked)
        return int(reply.usage.output_tokens)

    def ollama(data: bytes) -> int:
        message = {"role": "user", "content": QUESTION, "images": [base64.b64encode(data).decode()]}
        body = {"model": "m", "stream": False, "options": {"num_predict": TOKENS}, "messages": [message]}
        status, reply = posted(server, "/api/chat", body)
        assert status == 200, reply
        return int(json.loads(reply)["eval_count"])

    return {"chat completions": chat, "responses": responses, "messages": messages, "ollama": ollama}


def posted(server: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the body of an answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(server + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def measure(server: str, side: int, at_once: int) -> bool:
    """Prints what came of all requests. Whether each was answered or refused as it should be."""
    is_right, number = True, iter(range(10_000))
    print(f"{'pictures at once':18}{'answered':>10}  {'shortest':>9}  {'longest':>9}")
    for name, ask in asks(server).items():

        def timed(data: bytes, ask: Callable[[bytes], int] = ask) -> float | Exception:
            started = time.perf_counter()
            try:
                assert ask(data) > 0
            except Exception as error:
                return error
            return time.perf_counter() - started

        pictures = [picture(side, next(number)) for _ in range(at_once)]
        with ThreadPoolExecutor(at_once) as threads:
            ends = list(threads.map(timed, pictures))
        times = [end for end in ends if isinstance(end, float)]
        failed = [end for end in ends if isinstance(end, Exception)]
        is_right &= not failed
        spread = f"{min(times):7.2f} s  {max(times):7.2f} s" if times else ""
        print(f"{name:18}{len(times):5} of {at_once}  {spread}  {failed[0] if failed else ''}", flush=True)
    refused = {
        "100 megapixels": data_url(picture(10_000, 1)),
        "an address": "https://example.org/a.jpg",
        "a file": "file:///etc/hostname",
        "a damaged one": data_url(picture(64, 1)[:300]),
    }
    for name, url in refused.items():
        status, reply = posted(server, "/v1/chat/completions", chat_body(url))
        is_right &= status == 400
        print(
            f"{name:18}{status}: {json.loads(reply).get('error', {}).get('message', reply[:100])}", flush=True
        )
    return is_right


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--mmproj", metavar="FILE")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--side", type=int, default=448, help="pixels of a picture's sides")
    parser.add_argument("--at-once", type=int, default=16)


def run(given: argparse.Namespace) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "app", "serve", "--plain", "--model", given.model, "--backend", given.backend,
        "--context", str(given.context), "--parallel", "4", "--port", str(port), "--api-key-env", "MEASURED_KEY",
        *(["--mmproj", given.mmproj] if given.mmproj else []),
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "MEASURED_KEY": KEY}, text=True
        )
        try:
            _wait(port, server, Path(log.name))
            is_right = measure(f"http://127.0.0.1:{port}", given.side, given.at_once)
        finally:
            server.terminate()
            server.wait()
    raise SystemExit(0 if is_right else 1)


def _wait(port: int, server: subprocess.Popen[str], log: Path) -> None:
    """Until the server accepts connections and has loaded its model."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"The server does not answer:\n{log.read_text()[-2000:]}")
