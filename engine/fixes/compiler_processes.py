"""tinygrad 0.14.0: how the processes start that compile kernels, a search's candidates above all.

A search (BEAM, JITBEAM) compiles each candidate in a process of a pool. tinygrad starts each of them anew, which
takes a second or two of imports, and replaces it after 16 kernels; and they know nothing of the changes made to
tinygrad here. Forking the engine instead is no way out: it has a GPU open and several threads.

With this fix they are forked from a process that has imported tinygrad and opened nothing ("forkserver"), so that
one is there in a hundredth of the time, and they apply the changes that the engine has applied when the pool
starts. As in tinygrad, the engine's own main module is not run again in them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.pool import Pool
from typing import Any

import tinygrad.engine.worker as compile_workers

from engine.fixes import applied, once

_PRELOADED = [
    "tinygrad.codegen.opt.search",
    "tinygrad.engine.realize",
    "engine.fixes.matvec_heuristic",
    "engine.fixes.launch_bounds",
    "engine.fixes.program_cache",
]


@once("How compiler processes start")
def apply() -> None:
    """Changes tinygrad in this process."""
    compile_workers._WorkerContext = _Context


def dismiss() -> None:
    """Ends the processes that there are. Where kernels are compiled again, others start."""
    if compile_workers.worker_pool is not None:
        compile_workers.worker_pool.terminate()
        compile_workers.worker_pool = None


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with compile_workers._without_main():
            return ForkServerProcess._Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process

    def Pool(  # type: ignore[override]
        self, processes: int, initializer: Callable[[], None], initargs: tuple[()], tasks_each: int
    ) -> Pool:
        multiprocessing.set_forkserver_preload(_PRELOADED)
        return super().Pool(processes, _begin, (applied(), initializer), tasks_each)


def _begin(fixes: list[str], initializer: Callable[[], None]) -> None:
    for name in fixes:
        import_module(name).apply()
    initializer()
