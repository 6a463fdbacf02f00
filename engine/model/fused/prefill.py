"""The kernels of a prefill step: products on tensor cores, and norms, rotation and attention between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.kernels.gpu.device import multiprocessors
from engine.kernels.gpu.device_memory import device_zeros
from engine.kernels.gpu.embedding import embed_prompt
from engine.kernels.gpu.kernel_sequence import KernelSequence
from engine.kernels.gpu.kv_cache import Heads
from engine.kernels.gpu.matmul import fragments_size, matmul, tiles_for
from engine.kernels.gpu.prefill import activate_prompt, norm_prompt, rotate_prompt
from engine.kernels.gpu.prefill_attention import attend_prompt, prompt_tiling, tile_prompt
from engine.model.fused.packed_model import Matrix, PackedModel
from engine.model.fused.prescales import Prescales


class PrefillKernels:
    """Builds the kernels of prefill steps. A step reads its chunk of the prompt from `prompt`, int32 (position, number
    of tokens), and `ids`, int32 (chunk,)."""

    def __init__(
        self,
        model: PackedModel,
        heads: Heads,
        prescales: Prescales,
        rope_tables: tuple[Tensor, Tensor],
        chunk: int,
    ) -> None:
        self._model, self._heads, self._prescales, self._rope_tables = model, heads, prescales, rope_tables
        self.prompt, self.ids = device_zeros(2, dtypes.int32), device_zeros(chunk, dtypes.int32)
        self._scratch: dict[tuple[str, int], Tensor] = {}

    def step(self, tokens: int) -> KernelSequence:
        """The kernels for up to `tokens` tokens. Of the last layer they compute only keys and values."""
        model, config, step, heads = self._model, self._model.config, KernelSequence(), self._heads
        dim, query_size = config.dim, config.query_size
        h, x = self._buffer("h", tokens * dim), self._buffer("x", fragments_size(tokens, dim), dtypes.float16)
        queries = self._buffer("queries", tokens * query_size, dtypes.float16)
        attended = self._buffer("attended", fragments_size(tokens, query_size), dtypes.float16)
        activated = self._buffer("activated", fragments_size(tokens, config.ffn), dtypes.float16)
        embed = embed_prompt(model.embedding.single_matrix.layout, tokens, config.vocab, dim)
        step.add(embed, h, self.ids, *model.embedding.planes)

        def product(part: Matrix, x: Tensor, name: str) -> tuple[Tensor, int]:
            """Adds a product; returns its partial sums, and their number."""
            tiles = tiles_for(tokens, part.rows, part.cols, multiprocessors(), False)
            out = self._buffer(name, tiles.parts * tokens * part.rows)
            kernel = matmul(part.layout, tokens, part.rows, part.cols, tiles, False, name)
            step.add(kernel, out, x, self.prompt, *part.planes)
            return out, tiles.parts

        pending: list[tuple[Tensor, int]] = []  # partial sums that the next norm adds to the residual stream

        def norm(weight: NDArray[np.float32]) -> None:
            sums, parts = ([pending[0][0]], pending[0][1]) if pending else ([], 0)
            kernel = norm_prompt(tokens, dim, parts, config.norm_eps)
            step.add(kernel, x, h, *sums, self._prescales.norm_weight(weight, 0))
            pending.clear()

        for layer in model.layers:
            norm(layer.norms[0])
            runs = [product(part, x, f"qkv{i}") for i, part in enumerate(layer.qkv.matrices)]
            extra = [t for t in (layer.bias, layer.head_norms) if t is not None]
            sizes, counts = tuple(p.rows for p in layer.qkv.matrices), tuple(n for _, n in runs)
            rotate = rotate_prompt(heads, tokens, counts, sizes, layer.bias is not None)
            sums = [t for t, _ in runs]
            step.add(
                rotate, queries, layer.keys, layer.values, *sums, *self._rope_tables, self.prompt, *extra
            )
            if layer is model.layers[-1]:
                break
            attend = attend_prompt(heads, tokens, prompt_tiling(heads, tokens))
            step.add(tile_prompt(heads, multiprocessors()), *self.past, layer.keys, layer.values, self.prompt)
            step.add(attend, attended, queries, *self.past, self.prompt)
            pending.append(product(layer.o.single_matrix, attended, "o"))
            norm(layer.norms[1])
            if len(layer.gate_up.matrices) == 1:
                part = layer.gate_up.single_matrix
                tiles = tiles_for(tokens, part.rows, part.cols, multiprocessors(), True)
                kernel = matmul(part.layout, tokens, part.rows, part.cols, tiles, True, "gate_up")
                step.add(kernel, activated, x, self.prompt, *part.planes)
            else:
                runs = [product(p, x, f"gate_up{i}") for i, p in enumerate(layer.gate_up.matrices)]
                (gate, a), (up, b) = runs
                step.add(activate_prompt(tokens, config.ffn, (a, b)), activated, gate, up)
            pending.append(product(layer.down.single_matrix, activated, "down"))
        return step

    @property
    def past(self) -> list[Tensor]:
        """A layer's keys and values in the tiles that attention reads: float16 (`tile_prompt`)."""
        return [self._buffer(name, self._heads.tiles_size, dtypes.float16) for name in ("keys", "values")]

    def _buffer(self, name: str, n: int, dtype: DType = dtypes.float32) -> Tensor:
        """Scratch memory that all layers share."""
        if (name, n) not in self._scratch:
            self._scratch[name, n] = device_zeros(n, dtype)
        return self._scratch[name, n]
