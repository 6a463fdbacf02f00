"""Fills matrices on the GPU with what files hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial

from engine.loading.weights import FileWeights
from engine.targets.nvidia.kernels.weights.upload import Part, upload
from engine.targets.nvidia.kernels.weights.weight_repacking import (
    MatrixSpec,
    free_repacking_memory,
    prepare_repacking,
    repack,
)
from engine.targets.nvidia.matrices import Matrix


def piece_specs(matrices: Iterable[Matrix]) -> list[MatrixSpec]:
    """The kinds of pieces that are packed by kernels of their own."""
    return list({piece.spec: None for matrix in matrices for piece in matrix.pieces})


def fill(weights: FileWeights, all_matrices: Sequence[Matrix]) -> None:
    """Copies matrices to the device and packs them there. Those of a kind come together, because each kind has memory
    of its own to repack in. In another thread than the device's own only after `prepare_repacking`. Raises
    ModelFileError."""
    kinds: dict[MatrixSpec, list[Matrix]] = {}
    for matrix in all_matrices:
        kinds.setdefault(matrix.spec, []).append(matrix)
    by_kind = [[(m, piece) for m in matrices for piece in m.pieces] for matrices in kinds.values()]
    sources = [source for pieces in by_kind for _, piece in pieces for source in piece.sources]
    parts = (Part(weights.n_bytes(*source), partial(weights.read_into, *source)) for source in sources)
    with closing(upload(parts)) as uploaded:
        for pieces in by_kind:
            for matrix, piece in pieces:
                repack(piece.spec, uploaded, matrix.planes, piece.first)
                for weight, rows in piece.sources:
                    weights.release(weight, rows)
            free_repacking_memory()


def prepare(matrices: Iterable[Matrix]) -> None:
    """Compiles what `fill` needs of kernels."""
    prepare_repacking(piece_specs(matrices))
