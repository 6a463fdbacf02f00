"""Servers of tools that break the rules: they hang, die, print, send too much or what acts on a terminal, and imitate
the tools of others. Between them, a good server must answer."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

from app.tools.messages import Server
from app.tools.toolbox import Toolbox
from tests.app.hostile_text import acting
from tests.soak.counts import Counts

FAULTS = (
    "hangs", "hangs at the start", "dies", "dies at the start", "dies while it answers", "is killed", "sends 100 MB",
    "sends 100 MB without an end", "prints", "answers another call", "sends no JSON", "sends sequences",
    "imitates names", "offers 100,000 tools", "writes 100 MB of errors", "leaves a child", "has pages without end",
    "nests schemas", "asks back", "notifies 12,000 times", "answers ten times", "has wrong results", "has wrong types",
    "sends surrogates", "nests results", "sends 100,000 parts", "has invalid tools",
    "floods", "floods when it is called", "sends 30,000 resources",
    "stops reading", "answers without an end", "changes its tools",
)  # fmt: skip
SCRIPT = Path(__file__).with_name("bad_tool_server.py")
TIMEOUT_S = 1.0
LIMIT_S = 60.0
NAMES_A_ROUND = 6


def run(tries: int, number: int = 0) -> Counts:
    """A try is a bad server beside a good one, which is called before and after. Six bad ones at a time share the
    process of the servers. Lost: a call that does not end in words in time, text that acts on a terminal, a name
    that is another's, and a good server that does not answer."""
    counts = Counts("a server of tools hangs, dies, floods, prints or imitates another")
    asyncio.run(_all(tries, random.Random(number), counts))
    return counts


async def _all(tries: int, choose: random.Random, counts: Counts) -> None:
    while counts.tries < tries:
        faults = [choose.choice(FAULTS) for _ in range(min(NAMES_A_ROUND, tries - counts.tries))]
        bad = {f"bad{i}": _server(fault, timeout_s=TIMEOUT_S) for i, fault in enumerate(faults)}
        box = Toolbox({"good": _server("none"), **bad})
        try:
            async with asyncio.timeout(LIMIT_S):
                await box.start()
                await _good(box)
                ends = await asyncio.gather(*(_suffer(box, f"bad{i}") for i in range(len(faults))))
                await _good(box)
            for fault, ms in zip(faults, ends, strict=True):
                counts.survived[fault] += 1
                counts.took(ms)
        except Exception as error:
            counts.lost[f"{', '.join(faults)}: {type(error).__name__} {error}"] += len(faults)
        finally:
            await box.close()


def _server(fault: str, **options: float) -> Server:
    return Server(command=sys.executable, args=("-S", "-E", str(SCRIPT), fault), **options)


async def _good(box: Toolbox) -> None:
    returned = await box.call(box.tools["good.echo"], json.dumps({"text": "hello"}))
    if returned.text != "hello" or returned.is_error:
        raise RuntimeError(f"the good server said {returned.text[:100]}")


async def _suffer(box: Toolbox, name: str) -> float:
    """Calls each tool of a bad server. Milliseconds of the longest call."""
    names = [tool for tool in box.tools if tool.startswith(f"{name}.")]
    texts, longest = [box.states[name].text, *names], 0.0
    for tool in names[:3]:
        if tool in box.tools:  # a call may have ended the server
            started = time.perf_counter()
            returned = await box.call(box.tools[tool], json.dumps({"text": "hello"}))
            longest = max(longest, (time.perf_counter() - started) * 1e3)
            texts += returned.text, box.states[name].text
    if acts := acting("\n".join(texts)):
        raise RuntimeError(f"{acts!r} reached the screen")
    if "good.echo" in names or not all(each.isascii() for each in names):
        raise RuntimeError(f"names of {names[:5]}")
    if longest > (TIMEOUT_S + 4) * 1e3:
        raise RuntimeError(f"a call took {longest:.0f} ms")
    return longest
