"""Writes the CUDA source of every kernel that a model on an NVIDIA GPU takes into one file, and their names.

    DEV=NULL:NVCC:sm_87 python -m tests.kernels.gpu.rendered FILE

tinygrad's NULL device stands in for the GPU: it renders kernels, and runs none.
"""

import sys
import tempfile
from pathlib import Path

from tinygrad import Device, UOp, dtypes
from tinygrad.codegen import to_program
from tinygrad.runtime.support.compiler_cuda import NVCCCompiler

from engine.formats.gguf import GGUF
from engine.kernels.gpu.matmul import fragments_size
from engine.kernels.gpu.matvec import Stack, Store, activate, matvec
from engine.kernels.gpu.packing import UNIT, Packing, permuted_size
from engine.kernels.gpu.prefill import activate_prompt
from engine.kernels.gpu.schedules import matvec_schedule
from engine.model.config import ModelConfig
from engine.model.fused import FusedRunner
from engine.model.weights import Weights
from tests import generated_model

sources: list[str] = []
F, H = dtypes.float32, dtypes.float16


def keep(_, source):
    sources.append(source)
    return b"a program"


def model(folder, **shape):
    """All that a model compiles when it is loaded: packing, decode of short and long contexts, drawing, prefill."""
    path = generated_model.write(folder / "model.gguf", layers=3, heads=4, kv_heads=2, **shape)
    file = GGUF(path)
    FusedRunner(Weights(file, ModelConfig.from_gguf(file), lambda _: None), 600)


def kernel(body, *buffers):
    placeholders = [UOp.placeholder((n,), dtype, slot=k) for k, (n, dtype) in enumerate(buffers)]
    to_program(body(*placeholders), Device[Device.DEFAULT].renderer)


def joined():
    """One file of all sources: each in a namespace of its own, what they include before them."""
    parts, heads = [], {}
    for i, source in enumerate(dict.fromkeys(sources)):
        lines = source.splitlines()
        heads.update((line, None) for line in lines if line.startswith("#include"))
        text = "\n".join(line for line in lines if not line.startswith("#include"))
        parts.append(f"namespace k{i} {{\n{text}\n}}")
    undefined = "\n#undef INFINITY\n#undef NAN\n"
    return "\n".join(heads) + undefined + "\n".join(parts).replace('extern "C" __global__', "__global__")


if __name__ == "__main__":
    NVCCCompiler.compile = keep
    with tempfile.TemporaryDirectory() as folder:
        model(Path(folder), architecture="qwen3", quant="Q6_K", dim=256, ffn=256)
    # what only models of mixed types, or with biases, take
    for ggml_type in (8, 12, 13):
        p, rows, cols = Packing(ggml_type), 512, 2048
        stack = Stack.of(p, rows, cols)
        body = matvec(stack, matvec_schedule(stack), Store(True), "biased", 64, 1e-5)
        kernel(body, (rows, F), (permuted_size(cols), F), (64, F), (rows, F), *p.shapes(rows, cols))
    stack = Stack(((Packing(12), 256), (Packing(14), 128)), 2048)
    body = matvec(stack, matvec_schedule(stack), Store(), "mixed", 64, 1e-5)
    planes = [shape for p, n in stack.matrices for shape in p.shapes(n, 2048)]
    kernel(body, (384, F), *[(permuted_size(2048), F)] * 2, (64, F), *planes)
    kernel(activate(512), (permuted_size(512), F), (1024, F), (UNIT, F))
    halves = (fragments_size(64, 512), H), (64 * 512 * 2, F), (64 * 512 * 2, F)
    kernel(activate_prompt(64, 512, (2, 2)), *halves)
    Path(sys.argv[1]).write_text(joined())
