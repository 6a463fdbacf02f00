"""A model in this process as an engine: no worker has to start."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from engine.protocol.events import Failed, Finished, Generate
from tests.app.fake_engine import READY
from tests.reference_model import ReferenceModel


class ModelEngine:
    name = "model"

    def __init__(self, path: Path) -> None:
        self._model = ReferenceModel(path, 256)
        self._busy = threading.Lock()
        self._stop = threading.Event()

    async def start(self):
        yield READY

    async def generate(self, request: Generate):
        loop, events, stop = asyncio.get_running_loop(), asyncio.Queue(), threading.Event()

        def report(event):
            loop.call_soon_threadsafe(events.put_nowait, event)

        def work():
            try:
                with self._busy:
                    report(self._model.generate(request, report, stop.is_set))
            except Exception as error:
                report(Failed.from_error(error, request.request_id))

        working = loop.run_in_executor(None, work)
        try:
            while not isinstance(event := await events.get(), Finished | Failed):
                yield event
            yield event
        finally:
            stop.set()
            await working

    async def stop(self):
        pass

    async def close(self):
        pass
