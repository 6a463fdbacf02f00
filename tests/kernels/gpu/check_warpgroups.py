"""Products of prompts by warpgroups, and a prompt that has them."""

import math
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from tinygrad import dtypes

from engine.formats.quantization import FORMATS
from engine.runtime.kv_blocks import KVBlocks
from engine.runtime.model_runner import Slot
from engine.targets.nvidia import prefill
from engine.targets.nvidia.kernels.device import chip, is_own_cuda
from engine.targets.nvidia.kernels.products import prompt_products, tensor_maps
from engine.targets.nvidia.kernels.products.copied_matmul import CopiedTiles, halves_index
from engine.targets.nvidia.kernels.products.eights import eights_index
from engine.targets.nvidia.kernels.products.matmul import fragments_size
from engine.targets.nvidia.kernels.products.prompt_products import prompt_product
from engine.targets.nvidia.kernels.products.tensor_maps import MAP_WORDS
from engine.targets.nvidia.kernels.products.warpgroup_matmul import WarpgroupTiles
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from engine.targets.nvidia.runner import NvidiaRunner
from tests import generated_model
from tests.kernels.gpu.buffers import buffer, close, packed, prompt_index, prompt_state, rng, run, zeros
from tests.kernels.gpu.check_products import gated
from tests.opened import opened
from tests.reference import Reference, divergence
from tests.tier import THOROUGH


def check_warpgroup_products() -> None:
    """Of floats and of quantized types, with rows and steps left over, parts, and blocks without tokens; gate and up,
    the last rows in a launch of their own."""
    tokens, n = 32, 11
    for ggml_type, rows, cols, paired, tiles in (
        *[(12, 139, 512, False, WarpgroupTiles(32, 1, 2, 2))] * THOROUGH,
        (8, 64, 832, False, WarpgroupTiles(16, 1, 1, 2, 4)),
        *[(8, 640, 64, True, WarpgroupTiles(16, 2, 1, 1, rest=(512, WarpgroupTiles(32, 1, 1, 1))))]
        * THOROUGH,
        *[(1, 130, 64, True, WarpgroupTiles(16, 2, 1, 1, rest=(128, WarpgroupTiles(32, 1, 2, 1))))]
        * THOROUGH,
        *((kind, 64, 512, False, WarpgroupTiles(16, 1, 1, 2)) for kind in (0, *FORMATS) if THOROUGH),
    ):
        layout = WeightLayout(ggml_type)
        planes, weights = packed(ggml_type, rows, cols)
        scale = 4 / np.abs(weights).max()  # so that no product is beyond half precision
        x = (rng.standard_normal((tokens, cols)) * scale).astype(np.float16)
        own = np.zeros(fragments_size(tokens, cols), np.float16)
        own[prompt_index(lambda m, e, cols=cols: eights_index(m, e, cols), tokens, cols)] = x
        wanted = x[:n].astype(np.float64) @ weights.T.astype(np.float64)
        size = (
            (fragments_size(tokens, rows // 2), dtypes.float16) if paired else (tiles.parts * tokens * rows,)
        )
        out, state = zeros(*size), prompt_state(tokens, (0, 0, n, 0))
        for kernel, _ in prompt_product(layout, tokens, rows, cols, tiles, paired, "t"):
            run(kernel, out, buffer(own), state, *planes)
        if paired:
            place = prompt_index(lambda m, e, rows=rows: eights_index(m, e, rows // 2), n, rows // 2)
            close(out.numpy()[place], gated(wanted[:, 0::2], wanted[:, 1::2], "silu"), 2e-3)
        else:
            close(out.numpy().reshape(tiles.parts, tokens, rows).sum(0)[:n], wanted, 1e-3)


def described(address, sizes, strides, tile):
    """A descriptor as the simulated board reads it (tests/driver/cuda.hpp)."""
    pitch, rows = (strides[0], sizes[1]) if len(sizes) == 2 else (strides[1], sizes[3] * 16)
    words = address & 0xFFFFFFFF, address >> 32, pitch, rows, math.prod(tile[1:])
    return np.array([*words, *[0] * (MAP_WORDS - len(words))], np.uint32).tobytes()


@contextmanager
def simulated_maps():
    """The board's own descriptors, where a GPU has its driver's."""
    if is_own_cuda():
        yield
        return
    address = lambda tensor: tensor.uop.base.buffer._buf.va_addr
    with (
        mock.patch.object(tensor_maps, "described", described),
        mock.patch.object(tensor_maps, "address_of", address),
    ):
        yield


def check_copied_products() -> None:
    """Of float16: rows left over, parts of unlike length, blocks without tokens; gate and up, the last rows in a launch
    of their own."""
    layout, n = WeightLayout(1), 11
    for tokens, rows, cols, paired, tiles in (
        (32, 144, 320, False, CopiedTiles(16, 1, 1, 2, 3)),
        (32, 160, 130, True, CopiedTiles(16, 1, 2, 1, 1, rest=(128, CopiedTiles(32, 1, 1, 1, 2)))),
    ):
        planes, weights = packed(1, rows, cols)
        x = rng.standard_normal((tokens, cols)).astype(np.float16)
        own = np.zeros(fragments_size(tokens, cols), np.float16)
        own[prompt_index(lambda m, e, cols=cols: halves_index(m, e, cols), tokens, cols)] = x
        wanted = x[:n].astype(np.float64) @ weights.T.astype(np.float64)
        size = (
            (fragments_size(tokens, rows // 2), dtypes.float16) if paired else (tiles.parts * tokens * rows,)
        )
        out, activations, state = zeros(*size), buffer(own), prompt_state(tokens, (0, 0, n, 0))
        for kernel, of in prompt_product(layout, tokens, rows, cols, tiles, paired, "t"):
            with simulated_maps():
                made = tensor_maps.operand_maps(
                    planes[0], rows, activations, tokens, cols, (of.width, of.tokens)
                )
            run(kernel, out, activations, state, tensor_maps.on_device(made), *planes)
        if paired:
            place = prompt_index(lambda m, e, rows=rows: halves_index(m, e, rows // 2), n, rows // 2)
            close(out.numpy()[place], gated(wanted[:, 0::2], wanted[:, 1::2], "silu"), 2e-3)
        else:
            close(out.numpy().reshape(tiles.parts, tokens, rows).sum(0)[:n], wanted, 1e-3)


def check_a_prompt_by_warpgroups() -> None:
    """In steps of 128 tokens, and of 64."""
    for quant in ("Q8_0", "F16"):
        _check_prompt(quant)


def _check_prompt(quant: str) -> None:
    tokens = list(map(int, np.random.default_rng(0).integers(0, 100, 150)))
    shape = {"dim": 96, "heads": 2, "kv_heads": 1, "ffn": 64, "layers": 2}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(prefill, "chip", lambda: replace(chip(), has_warpgroups=True)),
        mock.patch.object(prompt_products, "copied_tiles", lambda *shape: CopiedTiles(64, 1, 1, 1, 1)),
        simulated_maps(),
    ):
        path = generated_model.write(Path(folder) / "model.gguf", architecture="qwen3", quant=quant, **shape)
        wanted = Reference(path).logits(tokens)
        runner = NvidiaRunner(opened(path), 256)
        KVBlocks(runner).reserve(0, 160)
        runner.run([Slot(0, tuple(tokens[:100]), 0, "none")])
        runner.run([Slot(0, tuple(tokens[100:-1]), 100, "none")])
    runner.run([Slot(0, (tokens[-1],), len(tokens) - 1)])
    assert divergence(wanted[-1], runner.logits()[0]) < 1e-6
