"""Keeps the speeds measured on this machine, by model file and preset, from one run to the next."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import msgspec
import platformdirs
from msgspec.structs import replace

from engine.protocol.events import MIN_TOKENS, EngineOptions, Event, Finished, Ready, decode_rate
from engine.system.whole_file import read_file, write_whole

if TYPE_CHECKING:
    from engine.protocol.client import LocalEngine

MAX_RUNS = 8


class Run(msgspec.Struct, frozen=True):
    """The speeds of one answer in tokens/s (None: too few tokens). `at` is in seconds since 1970."""

    at: float
    decode: float | None = None
    prefill: float | None = None


class PresetSpeeds(msgspec.Struct, frozen=True):
    """The last `MAX_RUNS` runs of a model under one preset, oldest first."""

    runs: tuple[Run, ...] = ()

    def __str__(self) -> str:
        """decode 84.2 ± 0.6, prefill 1,200 tok/s (2026-05-07); "" without a run."""
        return next(iter(self.summaries), "")

    @property
    def summaries(self) -> tuple[str, ...]:
        """The same in ever fewer words, for narrow columns."""
        speeds = {
            "decode": [run.decode for run in self.runs if run.decode is not None],
            "prefill": [run.prefill for run in self.runs if run.prefill is not None],
        }
        parts = [f"{name} {_mean_and_deviation(values)}" for name, values in speeds.items() if values]
        if not parts:
            return ()
        date = f"({datetime.fromtimestamp(self.runs[-1].at):%Y-%m-%d})"
        summaries = f"{', '.join(parts)} tok/s {date}", f"{parts[0]} tok/s {date}", f"{parts[0]} tok/s"
        return tuple(dict.fromkeys(summaries))


class ModelRecord(msgspec.Struct, frozen=True):
    """What is known of a model file. `used_at` is in seconds since 1970. `tokens_per_s` is the decode speed of the
    last reply of at least `MIN_TOKENS`, under any preset, on `backend` (None: no such reply yet)."""

    used_at: float = 0.0
    tokens_per_s: float | None = None
    backend: str = ""
    presets: dict[str, PresetSpeeds] = {}


def model_records() -> dict[Path, ModelRecord]:
    """All records of this machine, by resolved path."""
    return {Path(path): record for path, record in _read().get(platform.node(), {}).items()}


def preset_speeds(model: Path) -> dict[str, PresetSpeeds]:
    """The speeds of a model on this machine, by name of preset."""
    return _record(model).presets


def record_run(model: Path, preset: str, *, decode: float | None, prefill: float | None) -> None:
    """Adds the speeds of an answer, in tokens/s, to those of `preset`."""
    if decode is None and prefill is None:
        return
    record = _record(model)
    runs = (*record.presets.get(preset, PresetSpeeds()).runs, Run(time.time(), decode, prefill))
    _store(model, replace(record, presets={**record.presets, preset: PresetSpeeds(runs[-MAX_RUNS:])}))


def record_use(model: Path, backend: str = "", tokens: int = 0, tokens_per_s: float = 0.0) -> None:
    """Records that `model` is used now and, after a reply of `tokens` tokens, its decode speed on `backend`."""
    record = _record(model)
    if tokens >= MIN_TOKENS and tokens_per_s > 0:
        record = replace(record, tokens_per_s=tokens_per_s, backend=backend)
    _store(model, replace(record, used_at=time.time()))


def recording_engine(
    options: EngineOptions, is_ready: Callable[[], None] = lambda: None, keep_warm_s: float = 0.0
) -> LocalEngine:
    """An engine that records each use of its model, and calls `is_ready` whenever it has started. `keep_warm_s`: see
    `LocalEngine`."""
    from engine.protocol.client import LocalEngine

    engine, model, backend = LocalEngine(options, keep_warm_s=keep_warm_s), Path(options.model_path), ""

    def record(event: Event) -> None:
        nonlocal backend
        if isinstance(event, Ready):
            backend = event.backend
            record_use(model)
            is_ready()
        elif isinstance(event, Finished):
            speed = decode_rate(event.predicted_n, event.predicted_ms)
            record_use(model, backend, event.predicted_n, speed)

    engine.on_event = record
    return engine


def _mean_and_deviation(values: list[float]) -> str:
    """84.2 ± 0.6; the lowest and the highest of speeds that are far apart, as on a machine that was busy at times."""
    middle, apart = mean(values), stdev(values) if len(values) > 1 else 0.0
    digits = 0 if middle >= 99.95 else 1
    if apart > middle / 2:
        return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"
    return f"{middle:,.{digits}f}" + (f" ± {apart:,.{digits}f}" if len(values) > 1 else "")


# --- the file: machine name -> resolved path -> record (several machines may share a home folder) -----------


def _path() -> Path:
    return platformdirs.user_state_path("orin-chat", appauthor=False) / "evidence.json"


def _read() -> dict[str, dict[str, ModelRecord]]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(read_file(_path()), type=dict[str, dict[str, ModelRecord]])
    return {}


def _record(model: Path) -> ModelRecord:
    return model_records().get(model.resolve(), ModelRecord())


def _store(model: Path, record: ModelRecord) -> None:
    """Writes the file anew. If that fails, the chat goes on without the record."""
    with contextlib.suppress(OSError, UnicodeEncodeError):
        machines = _read()
        machines.setdefault(platform.node(), {})[str(model.resolve())] = record
        write_whole(_path(), msgspec.json.encode(machines))
