"""The process from which those are forked that compile kernels (multiprocessing's "forkserver"). It takes half a second
to import tinygrad, so it starts before this process does so."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from multiprocessing import forkserver

_PRELOADED = ["tinygrad.codegen.opt.search", "tinygrad.engine.realize", "engine.fixes.program_cache"]


def start(modules: Iterable[str] = ()) -> None:
    """Starts it, unless it runs or PARALLEL says that there are to be no such processes. It imports what compiling
    takes, and these modules. To be called after `engine.backends.prepare` has set the environment."""
    if int(os.environ.get("PARALLEL", "0")):
        multiprocessing.set_forkserver_preload([*_PRELOADED, *modules])
        forkserver.ensure_running()
