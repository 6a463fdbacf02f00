"""A GPU of any chip that is not here: the engine chooses its kernels as on such a GPU, tinygrad's NULL device renders
them as CUDA C, and none runs.

What an engine on CUDA changes of tinygrad is changed here, and the chip's properties that kernels follow from are told:
so the sources are those that such a GPU's compiler would get. One process stands in for one chip.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest import mock

CONTEXT = 16384
_MULTIPROCESSORS = {"sm_75": 68, "sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90": 132}
"""Of the chips whose number the engine does not know itself."""
_OF_OTHERS = 148
_PIECE = 9  # tokens of a piece of a prompt that is run


@dataclass(frozen=True)
class KernelText:
    """A kernel in CUDA C. `dynamic_shared`: the shared memory that its launch gives a block; `least`: how many blocks
    it wants on a multiprocessor."""

    name: str
    source: str
    threads: int
    dynamic_shared: int
    least: int


def stand_in(chip: str, threads: int, is_nv: bool) -> list[Any]:
    """Sets this process up for a chip whose multiprocessors have so many `threads`, before tinygrad is imported, and
    returns the list to which each program is added that is rendered. `is_nv`: what NV runs, not CUDA."""
    gc.disable()  # a fifth of the time that kernels take to render
    os.environ |= {"DEV": f"NULL:NVCC:{chip}", "PARALLEL": "0", "NULL_ALLOW_COPYOUT": "1"}
    from tinygrad import Device, UOp, codegen
    from tinygrad.runtime.support import compiler_cuda

    from engine import backends
    from engine.targets.nvidia.weights import GPUModel

    backends.change_kernels("NV" if is_nv else "CUDA")
    _tell(chip, threads, is_nv)
    stock, programs = codegen.do_to_program, list[UOp]()

    def keep(*arguments: Any) -> UOp:
        programs.append(stock(*arguments))
        return programs[-1]

    filled = Future[None]()
    filled.set_result(None)
    Device[Device.DEFAULT].allocator.free_cache = lambda: None  # which only devices with memory have
    codegen.do_to_program = keep
    compiler_cuda.NVCCCompiler.compile_cached = lambda self, source: b"nothing"
    mock.patch.object(GPUModel, "begin_fill", lambda self, weights: filled).start()
    return programs


def _tell(chip: str, threads: int, is_nv: bool) -> None:
    """The properties by which kernels are chosen, as the driver of such a GPU tells them."""
    from engine.devices import cuda_driver
    from engine.kernels.launch_hints import STATIC_SHARED
    from engine.targets.nvidia.kernels import device, rates
    from engine.targets.nvidia.sublayers import attention

    number = int(chip[3:])
    count = device._KNOWN_COUNTS.setdefault(chip, _MULTIPROCESSORS.get(chip, _OF_OTHERS))
    cuda_driver.compute_capability = lambda: divmod(number, 10)
    if is_nv:
        mock.patch.object(attention, "shared_limit", lambda: STATIC_SHARED).start()
        return
    device.is_own_cuda = lambda: True
    device._attribute = lambda number: threads if number == device._THREADS else 0
    device.told_rates = lambda: rates.estimated(count)
    device.launches_early = lambda: number >= 90
    device._has_warpgroups = lambda: chip == device._WARPGROUPS


def take_model(file: Any, parallel: int, kv: str) -> None:
    """Takes all steps of a model on the target that CUDA has for it: prompts in pieces of all sizes, replies, both in
    one step, guesses that are checked, and its draft head; what the choice of a token may have beside; embeddings; and
    what copies blocks of the cache."""
    from engine.description.architectures import read_spec
    from engine.formats.kv_format import KVFormat
    from engine.loading.weights import Weights
    from engine.model import open_runner
    from engine.model.coverage import target_of
    from engine.targets.nvidia.runner import NvidiaRunner

    spec, kv_format = read_spec(file), KVFormat.parse(kv)
    weights, context = Weights(file, spec, lambda _: None), min(CONTEXT, spec.trained_context)
    as_cuda = lambda spec, _, kernels: target_of(spec, "CUDA", kernels)
    mock.patch.object(open_runner, "target_of", as_cuda).start()
    runner = open_runner.open_runner(weights, context, parallel=parallel, kv=kv_format)
    for size in runner.chunk_sizes:
        runner.prepare(size)
    for count in runner.row_counts:
        runner.prepare_rows(count)
    for count in runner.check_rows:
        runner.prepare_check(count)
    for want in ("hidden",) if spec.both_ways else ("hidden", "none", "last"):
        _run(runner, want)
    if isinstance(runner, NvidiaRunner) and spec.draft_head:
        runner.draft_head(Weights(file, spec.draft_head, lambda _: None), kv_format).prepare()
    if runner.export_layout:
        tables = [[0] * 8 for _ in runner.kv_groups]
        runner.import_blocks(tables, runner.export_blocks(tables))


def _run(runner: Any, want: Any) -> None:
    """Runs a piece of a text, or a token."""
    from engine.runtime.kv_blocks import KVBlocks
    from engine.runtime.model_runner import Slot

    tokens = (1,) * (1 if want == "last" else _PIECE)
    with KVBlocks(runner).room(_PIECE):
        runner.run([Slot(0, tokens, 0, want)])


def take_encoder(file: Any) -> None:
    """Takes the steps of an encoder of pictures, of all sizes."""
    from engine.description.vision_reader import read_vision
    from engine.loading.weights import FileWeights
    from engine.targets.nvidia import vision

    spec = read_vision(file)
    with mock.patch.object(vision, "fill", lambda weights, matrices: None):
        encoder = vision.NvidiaEncoder(FileWeights(file, list(spec.weights()), lambda _: None), spec)
        for prepare in encoder.preparations():
            prepare()


def texts_of(programs: Sequence[Any]) -> list[KernelText]:
    from engine.kernels.launch_hints import hints_of

    found = {}
    for program in programs:
        name, hints, source = program.src[0].arg.name, hints_of(program), str(program.src[2].arg)
        x, y, z = program.arg.local_size
        plain = re.sub(r"\x1b\[\d+m", "", name)  # without the colours that tinygrad gives its own kernels
        found[source] = KernelText(plain, source, x * y * z, hints.shared_bytes, hints.min_blocks)
    return list(found.values())
