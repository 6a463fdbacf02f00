"""How soon a question about a picture is answered, beside llama-server with the same files:

    python -m tools.measure picture_rates MODEL MMPROJ [--backend cuda] [--llama-server PROGRAM] [--side 896]

The time to encode is the engines' own figure, llama-server's from its log. The times to the first token are of a new
picture, of a second question about it, and of a question without a picture that has as many tokens as the words of the
others; llama-server's go through HTTP, which takes it less than 1 ms. Medians; a first picture of each is left out.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.protocol.events import Chat, Message, Picture
from tools.measure.engine_process import alone, first_token, warm_model

TOKENS = 4
ASKED = "What is in this picture?", "And which colours has it?"
Times = dict[str, list[float]]
_LOGGED = re.compile(
    r"^(\d+)\.(\d+)\.(\d+)\.(\d+) .*(encoding mtmd batch|decoding image batch)", re.MULTILINE
)


def picture(side: int, seed: int) -> bytes:
    """A JPEG of clouds of colour."""
    from PIL import Image

    rng, file = np.random.default_rng(seed), io.BytesIO()
    small = Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8))
    small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def measured(ask: Callable[[str, bytes | None], tuple[float, float]], side: int, repetitions: int) -> Times:
    """Milliseconds. `ask`: of a question and a picture, milliseconds to encode and to the first token."""
    times: Times = {"encode": [], "new picture": [], "second question": [], "no picture": []}
    for i in range(repetitions + 1):
        data = picture(side, i)
        encoded, first = ask(ASKED[0], data)
        _, second = ask(ASKED[1], data)
        _, text = ask(f"{ASKED[i % 2]} It is number {i}.", None)
        if i:
            for name, ms in zip(times, (encoded, first, second, text), strict=True):
                times[name].append(ms)
    return times


def ours(path: str, mmproj: str, backend: str, chip: str, context: int, side: int, repetitions: int) -> Times:
    """To be called in a process of its own."""
    model = warm_model(path, backend, context, mmproj=mmproj, chip=chip, prefix_cache_bytes=0)

    def ask(text: str, data: bytes | None) -> tuple[float, float]:
        pictures = (Picture(data=data),) if data else ()
        messages = (Message(role="user", content=text, pictures=pictures),)
        seconds, _, end = first_token(model, Chat(messages=messages, think=False), TOKENS)
        return end.pictures_ms, seconds * 1e3

    return measured(ask, side, repetitions)


def of_llama(
    program: str, path: str, mmproj: str, on_cpu: bool, context: int, side: int, repetitions: int
) -> Times:
    """The times of llama-server."""
    with socket.socket() as probe, tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [
            program, "-m", path, "--mmproj", mmproj, "-c", str(context), "-np", "1", "--flash-attn", "on",
            "--host", "127.0.0.1", "--port", str(port), "--offline", "--no-webui", "-lv", "4",
            *(["-ngl", "0", "-t", str(len(os.sched_getaffinity(0)))] if on_cpu else ["-ngl", "99"]),
        ]  # fmt: skip
        with Path(log.name).open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            return measured(lambda text, data: _asked(port, log.name, text, data), side, repetitions)
        finally:
            process.terminate()
            process.wait()


def _asked(port: int, log: str, text: str, data: bytes | None) -> tuple[float, float]:
    content: list[dict[str, object]] = [{"type": "text", "text": text}]
    if data:
        url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    body = {
        "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "stream": True, "temperature": 0,
        "ignore_eos": True, "cache_prompt": True, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    before = Path(log).stat().st_size
    for _ in range(600):
        started = time.perf_counter()
        try:
            reply = urllib.request.urlopen(request, timeout=600)
            break
        except OSError:  # it loads its model
            time.sleep(0.2)
    else:
        raise SystemExit(f"llama-server does not answer:\n{Path(log).read_text()[-2000:]}")
    first = 0.0
    with reply:
        for line in reply:
            said = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            delta = said["choices"][0]["delta"] if said.get("choices") else {}
            if not first and (delta.get("content") or delta.get("reasoning_content")):
                first = (time.perf_counter() - started) * 1e3
    with Path(log).open() as file:
        file.seek(before)
        said_in_log = _LOGGED.findall(file.read())
    at_ms = {
        what: 6e4 * float(m) + 1e3 * float(s) + float(ms) + float(us) / 1e3
        for m, s, ms, us, what in reversed(said_in_log)
    }
    return (at_ms["decoding image batch"] - at_ms["encoding mtmd batch"] if at_ms else 0.0), first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("mmproj", metavar="MMPROJ")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--as", dest="chip", default="", metavar="CHIP", help="take the kernels of sm_87, …")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--side", type=int, default=896, help="pixels of a picture's sides")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=5)


def run(given: argparse.Namespace) -> None:
    how = given.context, given.side, given.repetitions
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as the engine's process has it
    times = {"ours": alone(ours, given.model, given.mmproj, given.backend, given.chip, *how)}
    if given.llama_server:
        on_cpu = given.backend.upper() == "CPU"
        times["llama-server"] = of_llama(given.llama_server, given.model, given.mmproj, on_cpu, *how)
    print(f"{Path(given.mmproj).stem}, {given.side} x {given.side}, ms   " + "   ".join(times["ours"]))
    for name, of in times.items():
        print(f"{name:14}" + "".join(f"{statistics.median(ms):14.1f}" for ms in of.values()), flush=True)
    if "llama-server" in times:
        ratios = (
            statistics.median(times["llama-server"][k]) / statistics.median(v)
            for k, v in times["ours"].items()
        )
        print("llama : ours  " + "".join(f"{ratio:14.2f}" for ratio in ratios), flush=True)
