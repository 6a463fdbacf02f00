"""The models of a server. One or a few are loaded at a time, each in an engine process of its own; the others are
loaded when they are asked for, in place of the one that was used least recently."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from app.serve.errors import ApiError
from app.serve.service import Service

IDLE_CHECK_S = 5.0


class ModelPool:
    """`default` is the model of requests that name none. If it is the only one, all names mean it."""

    def __init__(
        self,
        default: Service,
        others: Mapping[str, Callable[[], Service]] = {},
        *,
        most_loaded: int = 1,
        idle_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`others`: makes the services of the other models, by name; it may take seconds, and raise OrinError. A model
        that was not asked for `idle_s` is unloaded (None: only for another one)."""
        self.default = default
        self._makers = dict(others)
        self._services = {default.model: default}
        self._most_loaded, self._idle_s, self._clock = most_loaded, idle_s, clock
        self._loaded: dict[str, float] = {default.model: clock()}
        """When each model that is loaded was asked last. The first is loaded by who runs the server."""
        self.on_made: Callable[[Service], object] = lambda _: None
        """Hears of services that are made."""
        self._queued = Counter[str]()  # requests that wait until their model may be loaded
        self._making, self._loading, self._ended = asyncio.Lock(), asyncio.Lock(), asyncio.Event()
        if others:
            self._manage(default)

    @property
    def names(self) -> Sequence[str]:
        return [self.default.model, *self._makers]

    @property
    def known(self) -> Sequence[Service]:
        """The services whose files have been read."""
        return [*self._services.values()]

    def is_loaded(self, name: str) -> bool:
        return name in self._loaded

    async def named(self, name: str | None) -> Service:
        """The service of a model. Raises ApiError if there is none of this name."""
        if not name or not self._makers:
            return self.default
        return await self.found(name)

    async def found(self, name: str) -> Service:
        """As `named`, for a name that has to be right."""
        name = name.removesuffix(":latest") if name not in self.names else name
        async with self._making:
            if name not in self._services:
                if name not in self._makers:
                    message = f"There is no model of this name. There are: {', '.join(self.names)}."
                    raise ApiError(404, message, "not_found_error", param="model", code="model_not_found")
                service = await asyncio.to_thread(self._makers[name])
                self._services[name] = service
                self._manage(service)
                self.on_made(service)
            return self._services[name]

    async def unload_idle(self) -> None:
        """Unloads models as their time ends, for ever."""
        while self._idle_s is not None:
            await asyncio.sleep(min(IDLE_CHECK_S, self._idle_s))
            before = self._clock() - self._idle_s
            for name in [name for name, used in self._loaded.items() if used < before]:
                if self._is_idle(name):
                    await self._unload(name)

    def _manage(self, service: Service) -> None:
        async def make_room() -> None:
            await self._make_room(service)

        service.make_room, service.on_ended, service.shown_name = make_room, self._ended.set, service.model

    async def _make_room(self, service: Service) -> None:
        """Waits until the model of a request is loaded, or may be. Who comes while another model waits for its turn
        waits behind it."""
        if service.model not in self._loaded or self._loading.locked():
            self._queued[service.model] += 1
            try:
                async with self._loading:
                    await self._load(service)
            finally:
                self._queued[service.model] -= 1
        self._loaded[service.model] = self._clock()

    async def _load(self, service: Service) -> None:
        while service.model not in self._loaded and len(self._loaded) >= self._most_loaded:
            self._ended.clear()
            if idle := [name for name in self._loaded if self._is_idle(name)]:
                await self._unload(min(idle, key=self._loaded.__getitem__))
            else:
                await self._ended.wait()
        self._loaded[service.model] = self._clock()

    def _is_idle(self, name: str) -> bool:
        """Whether the engine of a model has nothing to do: requests that wait for their turn do not count."""
        return self._services[name].open == self._queued[name]

    async def _unload(self, name: str) -> None:
        service = self._services[name]
        self._loaded.pop(name, None)
        service.ready = service.slots = None
        with suppress(OSError):
            await service.engine.close()
