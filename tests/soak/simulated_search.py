"""`orin-chat` with an engine on a GPU that is only played: tinygrad's NULL device, whose kernels are built and not run.

python -m tests.soak.simulated_search ARGUMENTS is the command line; with "worker FD" it is the engine's process. Times
of steps are drawn, and by their names some schedules fail, hang, end the process or compute something else within a
search, and others in the next start. So `orin-chat tune` has all that it meets, in whole processes.
"""

from __future__ import annotations

import functools
import os
import random
import runpy
import sys
import time
import zlib
from concurrent.futures import Future
from unittest import mock

MODULE = "tests.soak.simulated_search"
DEVICE = "NULL:NVCC:sm_90"
_TRIAL_S = 1.5
_FAILS, _HANGS, _ENDS, _DIFFERS, _FAILS_LATER = (
    range(12),
    range(12, 18),
    range(18, 24),
    range(24, 60),
    range(990, 1000),
)
"""Of a thousand schedules."""


def _draw(name: str, what: str) -> int:
    return zlib.crc32(f"{what} {name}".encode()) % 1000


def _worker() -> None:
    import engine.backends

    nothing = lambda *_: None
    replaced = {
        "prepare": _prepare,
        "install": _install,
        "ask_driver": nothing,
        "open_device": lambda _: nothing,
    }
    for name, function in replaced.items():
        setattr(engine.backends, name, function)
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("engine.protocol.worker", run_name="__main__", alter_sys=True)


def _prepare(*_: object) -> str:
    os.environ |= {"NULL_ALLOW_COPYOUT": "1", "DEV": DEVICE, "PARALLEL": "0"}
    return DEVICE


def _install(_: str) -> None:
    from engine.fixes import library_search

    library_search.apply()
    from tinygrad import Device
    from tinygrad.runtime.support import compiler_cuda

    from engine.fixes import (
        codegen_threads,
        dynamic_shared,
        graph_nodes,
        graph_rewrites,
        index_lowering,
        slice_shapes,
    )
    from engine.model import open_runner

    for fix in (codegen_threads, graph_nodes, graph_rewrites, dynamic_shared, index_lowering, slice_shapes):
        fix.apply()
    Device[Device.DEFAULT].allocator.free_cache = lambda: None
    compiler_cuda.NVCCCompiler.compile_cached = lambda *_: b"nothing"
    open_runner.import_runner = lambda _: _play_the_gpu()
    open_runner.runs_as_graph_because = lambda *_: ""
    open_runner.target_of = lambda *_: "nvidia"


def _play_the_gpu() -> None:
    import numpy as np

    from engine.targets.nvidia import runner, schedule_search
    from engine.targets.nvidia.kernels import device
    from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
    from engine.targets.nvidia.kernels.products.schedules import matvec_schedule
    from engine.targets.nvidia.matrices import Product
    from engine.targets.nvidia.step_trials import StepTrials
    from engine.targets.nvidia.weights import GPUModel

    products, names, searching = list[Product](), dict[object, set[str]](), list[bool]()
    filled: Future[None] = Future()
    filled.set_result(None)

    def add(made: Product, stock=Product.__post_init__) -> None:
        stock(made)
        products.append(made)

    def begin(sequence: KernelSequence, *arguments, stock=KernelSequence.__init__) -> None:
        """Names what is not as nobody tuned it: only that may fail."""
        stock(sequence, *arguments)
        found = [p for p in products if p.schedule != matvec_schedule(p.stack, device.chip(), p.place)]
        sequence.drawn = {f"{p.stack.name} {p.schedule.name}" for p in found}

    def capture(sequence: KernelSequence):
        for how in (_draw(name, "fault") for name in sequence.drawn):
            if how in _FAILS or (how in _FAILS_LATER and not searching):
                raise RuntimeError("a kernel that fails")
            if how in _HANGS:
                time.sleep(600)
            if how in _ENDS:
                os._exit(139)
        run = functools.partial(int)
        names[run] = sequence.drawn
        return run

    def logits(_: StepTrials, run: object):
        return np.ones((1, 8)) * (2 if any(_draw(name, "fault") in _DIFFERS for name in names[run]) else 1)

    def seconds(_: StepTrials, run: object) -> float:
        time.sleep(0.01)
        factors = (0.9 + _draw(name, "time") / 5000 for name in names[run])
        return functools.reduce(float.__mul__, factors, 1e-3 * random.uniform(1, 1.001))

    def search(*arguments, stock=schedule_search.search) -> None:
        searching.append(True)
        stock(*arguments)
        searching.pop()

    device.launches_early, device.multiprocessors = lambda: True, lambda: 132
    schedule_search._TRIAL_S, runner.search = _TRIAL_S, search
    GPUModel.begin_fill = lambda *_: filled
    Product.__post_init__, StepTrials.logits, StepTrials.seconds = add, logits, seconds
    KernelSequence.__init__, KernelSequence.capture = begin, capture


def _program() -> int:
    from app.main import main
    from engine.protocol import client, launch
    from engine.system.child_process import module_command

    client.LocalEngine.__init__.__kwdefaults__["command"] = module_command(MODULE, "worker")
    with mock.patch.object(launch, "launch", lambda: None):
        return main()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        _worker()
    else:
        sys.exit(_program())
