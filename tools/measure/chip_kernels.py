"""Every kernel that an NVIDIA GPU would run, compiled for it: registers, spills, shared memory, resident blocks.

    python -m tools.measure chip_kernels [MODEL ...] [--as sm_87] [--parallel N] [--kv q8_0] [--nv]

No GPU is needed: the engine chooses its kernels as on such a GPU (an Orin by default), tinygrad renders them, and
CUDA's runtime compiler compiles them, each release that is on this machine (the packages nvidia-cuda-nvrtc-cu12 and
nvidia-cuda-nvrtc bring it, `--nvrtc` names another). A MODEL is a GGUF file, whose weights are not read. Without one
they are a model of each type of weights, one of each architecture, and, with the test data beside the checkout, models
of full size. What has no kernels of ours runs as tensor graphs, whose kernels are compiled too. The exit code is 1 if a
kernel is not compiled, if one spills registers, if a block has too much shared memory or too many registers to run, or
if a kernel has instructions of later chips.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.devices.cpus import allowed_cpus
from engine.errors import BackendError
from tests.paths import SHARED
from tools.measure.chip_compiler import (
    LIMITS,
    STATIC_SHARED,
    RuntimeCompiler,
    Use,
    alike,
    runtime_compilers,
)
from tools.measure.engine_process import alone
from tools.measure.simulated_gpu import KernelText, stand_in, take_encoder, take_model, texts_of

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


# ---- the kernels of a model -----------------------------------------------------------------------------


def kernels_of(path: str, chip: str, parallel: int, kv: str, is_nv: bool) -> list[KernelText]:
    """All kernels that the engine would compile for a model. To be called in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # kernels that are cached would not be rendered
        programs = stand_in(chip, LIMITS[chip].threads, is_nv)
        from engine.description.vision_reader import is_encoder
        from engine.formats.gguf import GGUF

        file = GGUF(path)
        if is_encoder(file):
            take_encoder(file)
        else:
            take_model(file, parallel, kv)
        return texts_of(programs)


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
        dim = 64 if name in ("qwen4exp", "rwkv6") else 256  # others are no models of these
        models[f"small {name}"] = partial(_written, architecture=name, quant="Q8_0", layers=4, dim=dim)
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
    """Those that are compiled as one text."""
    kind: Callable[[KernelText], tuple[str, ...]] = lambda kernel: alike(kernel.source)
    groups = [[*group] for _, group in groupby(sorted(kernels, key=kind), kind)]
    return [group[i : i + _TOGETHER] for group in groups for i in range(0, len(group), _TOGETHER)]


def uses_of(path: Path, kernels: Sequence[KernelText], chip: str) -> list[Use | str]:
    """What each kernel takes, or why it is not compiled."""
    compiler = RuntimeCompiler(path)
    try:
        return [*compiler.uses([kernel.source for kernel in kernels], chip)]
    except BackendError as error:
        if len(kernels) == 1:
            return [error.message]
        return [use for kernel in kernels for use in uses_of(path, [kernel], chip)]


def report(
    compiler: str, kernels: Sequence[KernelText], uses: Sequence[Use | str], chip: str, verbose: bool
) -> list[str]:
    """Prints a line for each kernel, or for those that do not do, which it returns."""
    faults = []
    if verbose:
        print(f"{'kernel':58} threads registers spilled  shared blocks", flush=True)
    for kernel, use in sorted(zip(kernels, uses, strict=True), key=lambda pair: pair[0].name):
        numbers, why = f"{kernel.threads:7}", use
        if isinstance(use, Use):
            shared, why = use.shared + kernel.dynamic_shared, fault(kernel, use, chip)
            blocks = use.resident(kernel.threads, kernel.dynamic_shared, LIMITS[chip])
            numbers += f" {use.registers:9} {use.spilled:7} {shared:7} {blocks:6}"
        if verbose or why:
            print(f"{kernel.name[:58]:58} {numbers}{'  ' * bool(why)}{why}", flush=True)
        faults += [f"{kernel.name}: {why}"] if why else []
    compiled = [(kernel, use) for kernel, use in zip(kernels, uses, strict=True) if isinstance(use, Use)]
    most = max((use.registers for _, use in compiled), default=0)
    most_shared = max((use.shared + kernel.dynamic_shared for kernel, use in compiled), default=0)
    print(
        f"{len(kernels)} kernels for {chip} by {compiler}: at most {most} registers and {most_shared:,} bytes of "
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
    parser.add_argument(
        "--quiet", action="store_true", help="print the kernels that do not do, and no others"
    )
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
        for name, rendered in zip(chosen, made, strict=True):
            try:
                found = rendered.result()
            except Exception as error:  # the other models go on
                print(f"{name} is not opened: {error!r}")
                faults.append(f"{name}: {type(error).__name__}: {error}")
                continue
            parts = texts([kernel for kernel in found if kernel.source not in seen])
            new = [kernel for part in parts for kernel in part]
            seen.update(kernel.source for kernel in new)
            for path, compiler in compilers.items():
                each = partial(uses_of, path, chip=given.chip)
                uses = [use for part in compiling.map(each, parts) for use in part]
                print(f"{name}: {len(found)} kernels, {len(new)} of them new")
                told = report(compiler, new, uses, given.chip, not given.quiet) if new else []
                faults += [f"{name}, {compiler}: {why}" for why in told]
    print(f"{len(seen)} kernels in all.", *faults, sep="\n")
    if faults:
        sys.exit(1)
