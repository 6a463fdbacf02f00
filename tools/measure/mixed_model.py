"""Writes a model of full size and random weights whose matrices differ in type, as those of files that people download.

    python -m tools.measure mixed_model qwen3:8b OUT.gguf --mix Q5_K_M [--layers 4]

The shape is one of `make_model.py` of the test data beside the checkout, whose rows of weights repeat after a while. A
mix is a name that llama.cpp's quantizer knows, a type (all matrices are of it, but the head of Q6_K), or "UD": any type
for any matrix, drawn anew for each layer, so that gate and up, and queries, keys and values differ.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.generated_weights import random_matrix
from tests.paths import SHARED

_DRAWN = ("Q3_K", "Q4_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q8_0")
_UNIQUE_BYTES = 4 << 20  # of a type and a number of columns; the rest repeats them

Layer = Callable[[int, int], bool]
"""Whether the layer of this number, of so many, is one of a mix's better ones."""


def more_bits(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _first(share: int) -> Layer:
    return lambda i, n: i < n // share


_ALL: Layer = lambda i, n: True
MIXES: dict[str, tuple[str, dict[str, list[tuple[Layer, str]]]]] = {
    "Q2_K": (
        "Q2_K",
        {"attn_v": [(_ALL, "Q4_K")], "attn_output": [(_ALL, "Q3_K")], "ffn_down": [(_ALL, "Q3_K")]},
    ),
    "Q3_K_S": ("Q3_K", {}),
    "Q3_K_M": (
        "Q3_K",
        {
            "attn_v": [(lambda i, n: i < 2, "Q5_K"), (_ALL, "Q4_K")],
            "attn_output": [(_ALL, "Q4_K")],
            "ffn_down": [(_first(16), "Q5_K"), (more_bits, "Q4_K")],
        },
    ),
    "Q4_K_S": ("Q4_K", {"attn_v": [(lambda i, n: i < 4, "Q5_K")], "ffn_down": [(_first(8), "Q5_K")]}),
    "Q4_K_M": ("Q4_K", {"attn_v": [(more_bits, "Q6_K")], "ffn_down": [(more_bits, "Q6_K")]}),
    "Q5_K_S": ("Q5_K", {}),
    "Q5_K_M": ("Q5_K", {"attn_v": [(more_bits, "Q6_K")], "ffn_down": [(more_bits, "Q6_K")]}),
    "IQ4_XS": ("IQ4_XS", {"attn_v": [(_ALL, "Q5_K")], "ffn_down": [(_first(8), "Q5_K")]}),
}
"""The usual type, and of a kind of matrix that of the first layers that fit."""


def type_in(mix: str, tensor: str, layers: int) -> str:
    """The type of a matrix of a model of so many layers."""
    kind = tensor.removesuffix(".weight").rpartition(".")[2]
    if kind == "output":
        return "F16" if mix in ("F16", "BF16") else "F32" if mix == "F32" else "Q6_K"
    if mix == "UD":
        return random.Random(tensor).choice(_DRAWN)
    usual, better = MIXES.get(mix, (mix, {}))
    number = int(tensor.split(".")[1]) if tensor.startswith("blk.") else 0
    fits = (
        kind_of
        for is_better, kind_of in better.get(kind.removesuffix("_exps"), [])
        if is_better(number, layers)
    )
    return next(fits, usual)


def weights(_: np.random.Generator, rows: int, cols: int, kind: str, std: float) -> Any:
    """Random weights of a type, as a file holds them. `std` is ignored: each row has a norm of about 1."""
    data = unique_rows(cols, kind)
    return np.resize(data, (rows, data.shape[1]))


@functools.cache
def unique_rows(cols: int, kind: str) -> Any:
    import gguf

    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = max(1, _UNIQUE_BYTES // (cols // block * n_bytes))
    return random_matrix(np.random.default_rng(cols), rows, cols, gguf.GGMLQuantizationType[kind])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shape")
    parser.add_argument("out", type=Path)
    parser.add_argument("--mix", required=True, metavar="NAME")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has (0: as many)")


def run(given: argparse.Namespace) -> None:
    write(given.shape, given.out, given.mix, given.layers)


def write(model: str, out: Path, mix: str, layers: int = 0) -> None:
    """Writes a file of a model of the test data, in a mix, with other `layers` than it has if there are some."""
    import gguf

    from engine.formats.ggml_types import GGML_TYPES
    from engine.formats.quantization import READ_TYPES

    spec = importlib.util.spec_from_file_location("make_model", SHARED / "models/make_model.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    sys.modules["make_model"] = maker
    spec.loader.exec_module(maker)
    known = {int(kind) for kind in gguf.GGMLQuantizationType}
    types = [GGML_TYPES[n] for n in READ_TYPES if n in known]
    blocks = {t.name: (gguf.GGMLQuantizationType[t.name], t.block) for t in types}
    if layers:
        maker.SHAPES[model] = dataclasses.replace(maker.SHAPES[model], layers=layers)
    layers, stock = maker.SHAPES[model].layers, maker.tensor_quant

    def type_of(shape: Any, quant: str, tensor: Any, counters: Any) -> str:
        if stock(shape, "F16", tensor, counters) == "F32":
            return "F32"
        found = type_in(quant, tensor.name, layers)
        return found if tensor.shape[-1] % blocks[found][1] == 0 else "Q8_0"

    arguments = ["make_model", model, str(out), "--quant", mix]
    with (
        mock.patch.dict(maker.BLOCK, blocks | {mix: blocks.get(mix, ())}),
        mock.patch.dict(maker.BYTES, {t.name: t.block_bytes for t in types}),
        mock.patch.object(maker, "tensor_quant", type_of),
        mock.patch.object(maker, "random_weights", weights),
        mock.patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(sys.stderr),
    ):
        maker.main()
