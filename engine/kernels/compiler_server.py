"""The process from which those are forked that compile kernels (multiprocessing's "forkserver"). It takes half a second
to import tinygrad, so it starts before this process does so."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable

from engine.cache.disk_cache import lasting_cache
from engine.cache.sources import STEP_SOURCES, source_digest

_STARTS = "starts"
_PRELOADED = ["tinygrad.codegen.opt.search", "tinygrad.engine.realize", "engine.fixes.program_cache"]


def begin(options: object, modules: Iterable[str]) -> bool:
    """Starts it, unless an earlier start of the engine with these options and this source has compiled all kernels.
    Returns whether one has. Reads all sources, so that they need not be read later."""
    source_digest(*STEP_SOURCES)
    is_known = bool(lasting_cache().get(_STARTS, _key(options)))
    if not is_known:
        start(modules)
    return is_known


def remember(options: object) -> None:
    """Keeps that a start with these options has compiled all kernels."""
    lasting_cache().put(_STARTS, _key(options), True)


def _key(options: object) -> tuple[str, object]:
    return source_digest(), options


def start(modules: Iterable[str] = ()) -> None:
    """Starts it, unless it runs or PARALLEL says that there are to be no such processes. It imports what compiling
    takes, and these modules. To be called after `engine.backends.prepare` has set the environment."""
    if int(os.environ.get("PARALLEL", "0")):
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload([*_PRELOADED, *modules])
        forkserver.ensure_running()
