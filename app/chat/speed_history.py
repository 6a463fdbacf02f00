"""What was measured on this machine, per model file and preset: for lists of models, and where one chooses how
the engine is set up."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import msgspec
import platformdirs
from msgspec.structs import replace

from engine.events import EngineOptions, Event, Finished, Ready, decode_rate

if TYPE_CHECKING:
    from engine.client import LocalEngine

KEPT_RUNS = 8
LEAST_TOKENS = 32
"""Shorter replies and prompts say little of the speed."""


class Run(msgspec.Struct, frozen=True):
    """One answer: speeds in tok/s (None: too short to tell), `at` in seconds since 1970."""

    at: float
    decode: float | None = None
    prefill: float | None = None


class Evidence(msgspec.Struct, frozen=True):
    """The last runs of a model under a preset, oldest first."""

    runs: tuple[Run, ...] = ()

    def __str__(self) -> str:
        """decode 84.2 ± 0.6, prefill 1,200 tok/s (2026-05-07); "" where nothing was measured."""
        return next(iter(self.phrasings), "")

    @property
    def phrasings(self) -> tuple[str, ...]:
        """The same in fewer and fewer words, for narrow places."""
        speeds = {
            "decode": [r.decode for r in self.runs if r.decode is not None],
            "prefill": [r.prefill for r in self.runs if r.prefill is not None],
        }
        said = [f"{name} {_spread(values)}" for name, values in speeds.items() if values]
        if not said:
            return ()
        date = f"({datetime.fromtimestamp(self.runs[-1].at):%Y-%m-%d})"
        phrasings = f"{', '.join(said)} tok/s {date}", f"{said[0]} tok/s {date}", f"{said[0]} tok/s"
        return tuple(dict.fromkeys(phrasings))


class Use(msgspec.Struct, frozen=True):
    """What is known of a model file. `used_at` in seconds since 1970; `tokens_per_s` is the decode speed of the
    last reply of some length, whatever the preset, on `backend` (None: there was none)."""

    used_at: float = 0.0
    tokens_per_s: float | None = None
    backend: str = ""
    presets: dict[str, Evidence] = {}


def uses() -> dict[Path, Use]:
    """What is known here, by file. Links are followed, so that a file is one whatever it is called."""
    return {Path(path): use for path, use in _read().get(platform.node(), {}).items()}


def recall(model: Path) -> dict[str, Evidence]:
    """What is known of a model on this machine, by preset."""
    return uses().get(model.resolve(), Use()).presets


def note(model: Path, preset: str, *, decode: float | None, prefill: float | None) -> None:
    """Keeps what an answer under `preset` showed."""
    if decode is None and prefill is None:
        return
    known = uses().get(model.resolve(), Use())
    runs = (*known.presets.get(preset, Evidence()).runs, Run(time.time(), decode, prefill))
    _keep(model, replace(known, presets={**known.presets, preset: Evidence(runs[-KEPT_RUNS:])}))


def note_use(model: Path, backend: str = "", tokens: int = 0, tokens_per_s: float = 0.0) -> None:
    """`model` is used now; where it has just answered, it did so with `tokens` tokens, at `tokens_per_s`, on
    `backend`."""
    known = uses().get(model.resolve(), Use())
    if tokens >= LEAST_TOKENS and tokens_per_s > 0:
        known = replace(known, tokens_per_s=tokens_per_s, backend=backend)
    _keep(model, replace(known, used_at=time.time()))


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


def _spread(values: list[float]) -> str:
    digits = 0 if mean(values) >= 99.95 else 1
    deviation = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):,.{digits}f}{deviation}"


# --- the file: by the machine's name, since a home folder may be that of several ------------------------


def _path() -> Path:
    return platformdirs.user_state_path("orin-chat", appauthor=False) / "evidence.json"


def _read() -> dict[str, dict[str, Use]]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_path().read_bytes(), type=dict[str, dict[str, Use]])
    return {}


def _keep(model: Path, use: Use) -> None:
    """A state folder that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError, UnicodeEncodeError):
        stored = _read()
        stored.setdefault(platform.node(), {})[str(model.resolve())] = use
        _path().parent.mkdir(parents=True, exist_ok=True)
        new = _path().with_suffix(f".{os.getpid()}.tmp")
        new.write_bytes(msgspec.json.encode(stored))
        new.replace(_path())
