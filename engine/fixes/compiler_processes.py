"""tinygrad 0.14.0: processes that compile kernels start fast, and apply our fixes.

tinygrad compiles kernels, above all the candidates of a search (BEAM, JITBEAM), in a pool of processes. It spawns each
one anew, which takes a second or two of imports, and replaces it after 16 kernels. The new processes do not have our
changes to tinygrad. The engine itself cannot be forked, because it has a GPU open and several threads.

With this fix the processes are forked from a server process that has imported tinygrad and opened no device
(multiprocessing's "forkserver"), which takes a hundredth of the time. They apply the fixes that the engine had applied
when the pool started, and have its environment variables. As in tinygrad, they do not run the engine's main module
again.

The threads of a pool see bytes only (`engine.kernels.compilers`).
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.pool import Pool
from typing import Any, TypeVar

import tinygrad.engine.worker as compile_workers

from engine.fixes import applied, once
from engine.kernels import compiler_server
from engine.kernels.compilers import called, failures

T = TypeVar("T")


@once("How compiler processes start")
def apply() -> None:
    """Changes tinygrad in this process."""
    compile_workers._WorkerContext = _Context


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
        compiler_server.start(applied())
        set_up = applied(), dict(os.environ), initializer
        return _Pool(processes, _initialize, set_up, tasks_each, self.get_context())


class _Pool(Pool):
    def imap_unordered(  # type: ignore[override]
        self, func: Callable[[Any], T], iterable: Iterable[Any], chunksize: int = 1
    ) -> Iterator[T]:
        """As tinygrad calls it."""
        tasks = [pickle.dumps((func, (task,))) for task in iterable]
        return map(pickle.loads, super().imap_unordered(called, tasks, chunksize))


def _initialize(fixes: list[str], variables: Mapping[str, str], initializer: Callable[[], None]) -> None:
    gc.disable()  # a quarter of the time that a kernel takes; a process ends after some kernels
    os.environ.update(variables)
    try:
        for name in fixes:
            import_module(name).apply()
        initializer()
    except Exception as error:
        failures.append(error)
