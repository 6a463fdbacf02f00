"""What was measured under each preset, per model and machine: shown where one chooses."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev

import msgspec
import platformdirs

KEPT_RUNS = 8
LEAST_TOKENS = 32
"""Shorter replies and prompts say little of the speed."""


class Run(msgspec.Struct, frozen=True):
    """One answer: speeds in tok/s (None: too short to tell), `at` in seconds since 1970."""

    at: float
    decode: float | None = None
    prefill: float | None = None


class Evidence(msgspec.Struct, frozen=True):
    """The last runs of one model under one preset on one machine, oldest first."""

    runs: tuple[Run, ...] = ()

    def __str__(self) -> str:
        """decode 84.2 ± 0.6, prefill 1,200 tok/s (2026-05-07); "" where nothing was measured."""
        parts = [
            f"{name} {_spread(values)}"
            for name, values in (
                ("decode", [r.decode for r in self.runs if r.decode is not None]),
                ("prefill", [r.prefill for r in self.runs if r.prefill is not None]),
            )
            if values
        ]
        if not parts:
            return ""
        return f"{', '.join(parts)} tok/s ({datetime.fromtimestamp(self.runs[-1].at):%Y-%m-%d})"


def recall(model: Path) -> dict[str, Evidence]:
    """What is known of a model on this machine, by preset."""
    prefix = _key(model, "")
    return {key.removeprefix(prefix): found for key, found in _read().items() if key.startswith(prefix)}


def note(model: Path, preset: str, *, decode: float | None, prefill: float | None) -> None:
    """Keeps what an answer showed. A state folder that cannot be written is no reason to stop."""
    if decode is None and prefill is None:
        return
    with contextlib.suppress(OSError, UnicodeEncodeError):
        stored, key = _read(), _key(model, preset)
        runs = (*stored.get(key, Evidence()).runs, Run(time.time(), decode, prefill))
        stored[key] = Evidence(runs[-KEPT_RUNS:])
        _path().parent.mkdir(parents=True, exist_ok=True)
        new = _path().with_suffix(f".{os.getpid()}.tmp")
        new.write_bytes(msgspec.json.encode(stored))
        new.replace(_path())


def _spread(values: list[float]) -> str:
    digits = 0 if mean(values) >= 99.95 else 1
    deviation = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):,.{digits}f}{deviation}"


def _key(model: Path, preset: str) -> str:
    return "\n".join((platform.node(), str(model.resolve()), preset))


def _read() -> dict[str, Evidence]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_path().read_bytes(), type=dict[str, Evidence])
    return {}


def _path() -> Path:
    return platformdirs.user_state_path("orin-chat", appauthor=False) / "evidence.json"
