"""When each model file was last used here, and how fast it was: for lists of models, and to compare with what
the memory allows."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import platformdirs
from msgspec.structs import replace

from engine.events import EngineOptions, Event, Finished, Ready, decode_rate

if TYPE_CHECKING:
    from engine.client import LocalEngine

LEAST_TOKENS = 16
"""A shorter reply says little of the speed."""


class Use(msgspec.Struct, frozen=True):
    """The last use of a model file. `used_at` in seconds since 1970; `tokens_per_s` is the decode speed of
    the last reply of some length, on `backend` (None: there was none)."""

    used_at: float
    tokens_per_s: float | None = None
    backend: str = ""


def uses() -> dict[Path, Use]:
    """The last uses, by file. Links are followed, so that a file is one whatever it is called."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        stored = msgspec.json.decode(_path().read_bytes(), type=dict[str, Use])
        return {Path(path): use for path, use in stored.items()}
    return {}


def note_use(model: Path, backend: str = "", tokens: int = 0, tokens_per_s: float = 0.0) -> None:
    """`model` is used now; where it has just answered, it did so with `tokens` tokens, at `tokens_per_s`, on
    `backend`. A state folder that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError, UnicodeEncodeError):
        stored = {path: use for path, use in uses().items() if path.exists()}
        path = model.resolve()
        speed = stored.get(path, Use(0))
        if tokens >= LEAST_TOKENS and tokens_per_s > 0:
            speed = Use(0, tokens_per_s, backend)
        stored[path] = replace(speed, used_at=time.time())
        _path().parent.mkdir(parents=True, exist_ok=True)
        new = _path().with_suffix(f".{os.getpid()}.tmp")
        new.write_bytes(msgspec.json.encode({str(path): use for path, use in stored.items()}))
        new.replace(_path())


def recorded(options: EngineOptions) -> LocalEngine:
    """An engine whose speed is noted after each of its replies."""
    from engine.client import LocalEngine

    engine = LocalEngine(options)
    engine.on_event = _Recorder(Path(options.model_path))
    return engine


class _Recorder:
    def __init__(self, model: Path) -> None:
        self._model = model
        self._backend = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Ready):
            self._backend = event.backend
            note_use(self._model)
        elif isinstance(event, Finished):
            rate = decode_rate(event.predicted_n, event.predicted_ms)
            note_use(self._model, self._backend, event.predicted_n, rate)


def _path() -> Path:
    return platformdirs.user_state_path("orin-chat", appauthor=False) / "speeds.json"
