"""Several models behind one server. Engines die, loads fail, and clients vanish at random moments."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from app.serve.model_pool import ModelPool
from app.serve.routes import application
from app.serve.service import ModelFile, Service
from engine.protocol.events import Event, Failed, Generate
from tests import generated_model
from tests.app.fake_engine import READY, FakeEngine, reply
from tests.soak.counts import Counts
from tests.soak.server_attacks import HELLOS

CLIENTS, WAITING = 12, 8
LIMIT_S = 20.0
_NAMES = ("a", "b", "c", "d")


def run(tries: int, number: int = 0) -> Counts:
    """Each request ends in time: in an answer of the model that it names, or in a sentence. After all, every model
    answers, and no request is left open."""
    counts, choose = (
        Counts("several models behind one server, that die and do not load"),
        random.Random(number),
    )
    with tempfile.TemporaryDirectory() as folder:
        file = ModelFile.read(generated_model.write(Path(folder, "tiny.gguf"), architecture="qwen3"))
    asyncio.run(_all(file, tries, choose, counts))
    return counts


class _Engine(FakeEngine):
    """Loads with its first request and after it has ended; may die in any of these. A load takes memory from others."""

    def __init__(self, name: str, choose: random.Random) -> None:
        super().__init__(reply(f"I am {name}."))
        self._choose, self._is_loaded, self.is_spared = choose, False, False

    async def generate(self, request: Generate) -> AsyncIterator[Event]:
        chance = 2.0 if self.is_spared else self._choose.random()
        if not self._is_loaded:
            await asyncio.sleep(self._choose.choice((0, 0.001, 0.005)))
            if chance < 0.1:
                died = Failed(
                    kind="backend", message="There is not enough memory for this model and context."
                )
                self.on_event(died)
                yield died
                return
            self._is_loaded = True
            self.on_event(READY)
            yield READY
        async for event in super().generate(request):
            if 0.1 < chance < 0.2:
                self._is_loaded = False
                died = Failed(kind="backend", message="The engine process died (signal 9).")
                self.on_event(died)
                yield died
                return
            yield event
            await asyncio.sleep(0)
        self.requests.clear()

    async def close(self) -> None:
        self._is_loaded = False
        await asyncio.sleep(0)


async def _all(file: ModelFile, tries: int, choose: random.Random, counts: Counts) -> None:
    engines = {name: _Engine(name, choose) for name in _NAMES}
    services = {
        name: Service(engine, name, file, parallel=2, max_waiting=WAITING) for name, engine in engines.items()
    }
    for name, engine in engines.items():
        engine.on_event = services[name].observe
    others = {name: lambda name=name: services[name] for name in _NAMES[1:]}
    pool = ModelPool(services["a"], others, most_loaded=2)
    transport = httpx.ASGITransport(application(pool), raise_app_exceptions=False)
    left = iter(range(tries))

    async def ask(name: str) -> str:
        path = choose.choice([*HELLOS])
        response = await client.post(
            path, json=HELLOS[path] | {"model": name, "stream": choose.random() < 0.5}
        )
        if response.status_code == 200 and f"I am {name}." in "".join(response.text.split('","')):
            return "answered"
        said = response.text
        if "memory" in said or "died" in said:
            return "told"
        if response.status_code == 429:
            return "told to wait"
        return "answered" if response.status_code == 200 else f"lost: {response.status_code} {said[:80]}"

    async def client_of_many() -> None:
        for _ in left:
            started = time.perf_counter()
            task = asyncio.ensure_future(ask(choose.choice(_NAMES)))
            if choose.random() < 0.3:
                await asyncio.sleep(choose.choice((0, 0.0005, 0.003)))
                task.cancel()
            try:
                outcome = await asyncio.wait_for(task, LIMIT_S)
            except asyncio.CancelledError:
                outcome = "vanished"
            except TimeoutError:
                outcome = "lost: no end"
            (counts.lost if outcome.startswith("lost") else counts.survived)[outcome] += 1
            counts.took((time.perf_counter() - started) * 1e3)

    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await asyncio.gather(*(client_of_many() for _ in range(CLIENTS)))
        if any(service.open or service.processing for service in services.values()):
            counts.lost["requests are left open"] += 1
        for name, engine in engines.items():
            engine.is_spared = True
            if (last := await asyncio.wait_for(ask(name), LIMIT_S)) != "answered":
                counts.lost[f"at last {name}: {last}"] += 1
