"""Every kernel that an NVIDIA GPU would run, compiled for it: registers, spills, shared memory, resident blocks.

    python -m tools.measure chip_kernels [MODEL ...] [--as sm_87] [--parallel N] [--kv q8_0] [--nv]

No GPU is needed: the engine chooses its kernels as on such a GPU (an Orin by default), tinygrad renders them, and
CUDA's runtime compiler compiles them, each release that is on this machine (the packages nvidia-cuda-nvrtc-cu12 and
nvidia-cuda-nvrtc bring it, `--nvrtc` names another). A MODEL is a GGUF file, whose weights are not read. Without one
they are a model of each type of weights, one of each architecture, and, with the test data beside the checkout, models
of full size. The exit code is 1 if a kernel spills registers, if a block has too much shared memory or too many
registers to run, or if a kernel has instructions of later chips.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

from engine.devices.cpus import allowed_cpus
from engine.errors import BackendError
from tests.paths import SHARED
from tools.measure.chip_compiler import (
    LIMITS,
    STATIC_SHARED,
    RuntimeCompiler,
    Use,
    included,
    runtime_compilers,
)
from tools.measure.engine_process import alone

CONTEXT = 16384
_TOGETHER = 24  # kernels that are compiled as one text
_LAYERS: dict[str, Any] = {"architecture": "qwen3", "dim": 2048, "heads": 16, "kv_heads": 8, "ffn": 6144}
FULL_SIZE = (
    "llama3.2:1b", "llama3.2:3b", "qwen3:0.6b", "qwen3:1.7b", "qwen3:8b", "qwen3:30b-a3b", "qwen3.5:4b", "qwen3.5:9b",
    "qwen3.5:35b-a3b", "gemma3:4b", "gemma4:e2b", "gemma4:26b-a4b", "gpt-oss:20b", "olmoe:7b", "phi3.5:3.8b",
    "ministral3:3b", "smollm3:3b", "granite3.3:2b",
)  # fmt: skip
ENCODERS: dict[str, tuple[str, dict[str, int]]] = {
    "Qwen 3.5 4B": ("qwen3vl_merger", {"dim": 1024, "width": 4096, "heads": 16, "patch": 16, "out": 2560}),
    "Qwen 3.5 9B": ("qwen3vl_merger", {"dim": 1152, "width": 4304, "heads": 16, "patch": 16, "out": 4096}),
    "Gemma 3 4B": (
        "gemma3",
        {"dim": 1152, "width": 4304, "heads": 16, "patch": 14, "out": 2560, "side": 896},
    ),
    "Gemma 4 E2B": ("gemma4v", {"dim": 768, "width": 3072, "heads": 12, "patch": 16, "out": 1536}),
    "Ministral 3 3B": (
        "pixtral",
        {"dim": 1024, "width": 4096, "heads": 16, "patch": 14, "out": 3072, "side": 1540},
    ),
}
_LATER = re.compile(r"griddepcontrol|cp\.async\.bulk|wgmma|mbarrier|setmaxnreg")  # of 9.0 and later


@dataclass(frozen=True)
class KernelText:
    """A kernel in CUDA C. `dynamic_shared`: the shared memory that its launch gives a block; `least`: how many blocks
    it wants on a multiprocessor."""

    name: str
    source: str
    threads: int
    dynamic_shared: int
    least: int


# ---- the kernels of a model -----------------------------------------------------------------------------


def kernels_of(path: str, chip: str, parallel: int, kv: str, is_nv: bool) -> list[KernelText]:
    """All kernels that the engine would compile for a model. To be called in a process of its own."""
    gc.disable()  # a fifth of the time that kernels take to render
    os.environ |= {"DEV": f"NULL:NVCC:{chip}", "PARALLEL": "0", "NULL_ALLOW_COPYOUT": "1"}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # kernels that are cached would not be rendered
        return _render(path, parallel, kv, is_nv)


def _render(path: str, parallel: int, kv: str, is_nv: bool) -> list[KernelText]:
    from tinygrad import Device, UOp, codegen
    from tinygrad.runtime.support import compiler_cuda

    from engine.description.architectures import read_spec
    from engine.description.vision_reader import is_encoder
    from engine.fixes import dynamic_shared, index_lowering, slice_shapes
    from engine.formats.gguf import GGUF
    from engine.formats.kv_format import KVFormat
    from engine.loading.weights import Weights
    from engine.targets.nvidia.runner import NvidiaRunner
    from engine.targets.nvidia.sublayers import attention
    from engine.targets.nvidia.weights import GPUModel

    stock, programs = codegen.do_to_program, list[UOp]()

    def keep(*arguments: Any) -> UOp:
        programs.append(stock(*arguments))
        return programs[-1]

    filled = Future[None]()
    filled.set_result(None)
    Device[Device.DEFAULT].allocator.free_cache = lambda: None  # which only devices with memory have
    for fix in (dynamic_shared, index_lowering, slice_shapes):
        fix.apply()
    with (
        mock.patch.object(compiler_cuda.NVCCCompiler, "compile_cached", lambda self, source: b"nothing"),
        mock.patch.object(codegen, "do_to_program", keep),
        mock.patch.object(GPUModel, "begin_fill", lambda self, weights: filled),
        mock.patch.object(attention, "shared_limit", lambda: STATIC_SHARED if is_nv else 99 << 10),
    ):
        file = GGUF(path)
        if is_encoder(file):
            _take_encoder(file)
            return _texts(programs)
        spec = read_spec(file)
        context = min(CONTEXT, spec.trained_context)
        runner = NvidiaRunner(Weights(file, spec, lambda _: None), context, parallel, KVFormat.parse(kv))
        for size in runner.chunk_sizes:
            runner.prepare(size)
        for count in runner.row_counts:
            runner.prepare_rows(count)
    return _texts(programs)


def _take_encoder(file: Any) -> None:
    """Takes the steps of an encoder of pictures, of all sizes."""
    from engine.description.vision_reader import read_vision
    from engine.loading.weights import FileWeights
    from engine.targets.nvidia import vision

    spec = read_vision(file)
    with mock.patch.object(vision, "fill", lambda weights, matrices: None):
        encoder = vision.NvidiaEncoder(FileWeights(file, list(spec.weights()), lambda _: None), spec)
        for prepare in encoder.preparations():
            prepare()


def _texts(programs: Sequence[Any]) -> list[KernelText]:
    from engine.kernels.launch_hints import hints_of

    found = {}
    for program in programs:
        name, hints, source = program.src[0].arg.name, hints_of(program), str(program.src[2].arg)
        x, y, z = program.arg.local_size
        found[source] = KernelText(_plain(name), source, x * y * z, hints.shared_bytes, hints.min_blocks)
    return list(found.values())


def _plain(name: str) -> str:
    """Without the colours that tinygrad gives its own kernels."""
    return re.sub(r"\x1b\[\d+m", "", name)


def _kernels(
    folder: Path, how: tuple[str, int, str, bool], name: str, model: str | Callable[[Path], None]
) -> list[KernelText]:
    """The kernels of a model file, or of a model that is written for it."""
    if isinstance(model, str):
        return alone(kernels_of, model, *how)
    path = folder / f"{name}.gguf".replace(":", "-")
    model(path)
    try:
        return alone(kernels_of, str(path), *how)
    finally:
        path.unlink()


# ---- models without weights -----------------------------------------------------------------------------


def usual_models() -> Mapping[str, Callable[[Path], None]]:
    """What writes a file of each, by name: its weights are zeros or holes."""
    from engine.formats.quantization import READ_TYPES, read_as
    from tests import generated_families, generated_model

    known = {int(kind) for kind in generated_model.Type}  # to the package that writes files
    types = [generated_model.Type(n).name for n in {read_as(n): n for n in READ_TYPES if n in known}.values()]
    models = {f"matrices of {name}": partial(_written, quant=name, **_LAYERS) for name in types}
    for name in generated_families.ARCHITECTURES:
        models[f"small {name}"] = partial(_written, architecture=name, quant="Q8_0", layers=4, dim=256)
    models |= {f"encoder of {name}": partial(_encoder, name) for name in ENCODERS}
    return models | {name: partial(_sparse, name) for name in (FULL_SIZE if SHARED.exists() else ())}


def _encoder(name: str, path: Path) -> None:
    """A layer of an encoder of full size."""
    from tests import generated_encoder

    kind, shape = ENCODERS[name]
    generated_encoder.write(path, kind, half=True, **shape)


def _written(path: Path, **shape: Any) -> None:
    from tests import generated_model

    generated_model.write(path, weights=_zeros, **shape)


def _zeros(_: object, rows: int, cols: int, kind: Any) -> Any:
    """A matrix as the file stores it."""
    import gguf
    import numpy as np

    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    if block == 1:
        return gguf.quantize(np.zeros((rows, cols), np.float32), kind)
    return np.zeros((rows, cols // block * n_bytes), np.uint8)


def _sparse(name: str, path: Path) -> None:
    """A model of full size."""
    import gguf

    maker = [sys.executable, str(SHARED / "models/make_model.py"), name, str(path), "--sparse"]
    subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.startswith("rope_f"):  # a frequency of 0 would be a mistake of the file
            tensor.data[:] = 1


# ---- the table ------------------------------------------------------------------------------------------


def fault(kernel: KernelText, use: Use, chip: str) -> str:
    """Why a kernel does not do on a chip; "" if it does."""
    resident = use.resident(kernel.threads, kernel.dynamic_shared, LIMITS[chip])
    if use.spilled:
        return f"spills {use.spilled} bytes"
    if use.shared > STATIC_SHARED:
        return f"declares {use.shared:,} bytes of shared memory"
    if not resident:
        return "does not fit on a multiprocessor"
    if int(chip[3:]) < 90 and _LATER.search(kernel.source):
        return "has instructions of later chips"
    return f"{resident} blocks fit, not {kernel.least}" if resident < kernel.least else ""


def texts(kernels: Sequence[KernelText]) -> list[list[KernelText]]:
    """Those that are compiled as one text: they include the same headers, so that each would compile alone."""
    headers: Callable[[KernelText], tuple[str, ...]] = lambda kernel: included(kernel.source)
    alike = [[*group] for _, group in groupby(sorted(kernels, key=headers), headers)]
    return [group[i : i + _TOGETHER] for group in alike for i in range(0, len(group), _TOGETHER)]


def _uses(path: Path, kernels: Sequence[KernelText], chip: str) -> list[Use]:
    return RuntimeCompiler(path).uses([kernel.source for kernel in kernels], chip)


def report(compiler: str, kernels: Sequence[KernelText], uses: Sequence[Use], chip: str) -> list[str]:
    """Prints a line for each kernel, and returns those that do not do."""
    faults = []
    print(f"{'kernel':58} threads registers spilled  shared blocks", flush=True)
    for kernel, use in sorted(zip(kernels, uses, strict=True), key=lambda pair: pair[0].name):
        shared = use.shared + kernel.dynamic_shared
        blocks = use.resident(kernel.threads, kernel.dynamic_shared, LIMITS[chip])
        numbers = f"{kernel.threads:7} {use.registers:9} {use.spilled:7} {shared:7} {blocks:6}"
        why = fault(kernel, use, chip)
        print(f"{kernel.name[:58]:58} {numbers}{'  ' * bool(why)}{why}")
        faults += [f"{kernel.name}: {why}"] if why else []
    most = max(use.registers for use in uses)
    shared = max(u.shared + k.dynamic_shared for k, u in zip(kernels, uses, strict=True))
    print(
        f"{len(kernels)} kernels for {chip} by {compiler}: at most {most} registers and {shared:,} bytes of "
        f"shared memory; {len(faults)} do not do\n",
        flush=True,
    )
    return faults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="GGUF files")
    parser.add_argument("--as", dest="chip", default="sm_87", choices=LIMITS)
    parser.add_argument("--parallel", type=int, default=1, help="conversations at once")
    parser.add_argument("--kv", default="f16", help="the format of the KV cache")
    parser.add_argument("--nv", action="store_true", help="the kernels of NV, which has less shared memory")
    parser.add_argument("--nvrtc", action="append", type=Path, help="a libnvrtc; again for one more")
    parser.add_argument("--processes", type=int, default=len(allowed_cpus()), help="at once (all CPUs)")
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this in their names")


def run(given: argparse.Namespace) -> None:
    compilers = {path: RuntimeCompiler(path).name for path in given.nvrtc or runtime_compilers()}
    if not compilers:
        raise BackendError("There is no libnvrtc here.", "Install it: pip install nvidia-cuda-nvrtc-cu12")
    seen, faults = set[str](), list[str]()
    models = {Path(path).name: path for path in given.models} or usual_models()
    chosen = [name for name in models if given.only in name]
    how = given.chip, given.parallel, given.kv, given.nv
    new_pool = partial(ProcessPoolExecutor, given.processes, multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, new_pool() as rendering, new_pool() as compiling:
        made = [rendering.submit(_kernels, Path(folder), how, name, models[name]) for name in chosen]
        for name, found in zip(chosen, (future.result() for future in made), strict=True):
            parts = texts([kernel for kernel in found if kernel.source not in seen])
            new = [kernel for part in parts for kernel in part]
            seen.update(kernel.source for kernel in new)
            for path, compiler in compilers.items():
                each = partial(_uses, path, chip=given.chip)
                uses = [use for part in compiling.map(each, parts) for use in part]
                print(f"{name}: {len(found)} kernels, {len(new)} of them new")
                told = report(compiler, new, uses, given.chip) if new else []
                faults += [f"{name}, {compiler}: {why}" for why in told]
    print(f"{len(seen)} kernels in all.", *faults, sep="\n")
    if faults:
        sys.exit(1)
