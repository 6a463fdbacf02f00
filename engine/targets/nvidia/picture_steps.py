"""The kernels of an encoder of pictures for those of up to so many patches, in parts of the work, and their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from engine.description.encoder_input import Grid, Places, arranged, position_terms
from engine.description.sublayers import Vector
from engine.description.vision import (
    Activate,
    Activation,
    Affine,
    Limits,
    Linear,
    Merge,
    Norm,
    PatchAttention,
    PatchFeedForward,
    PatchSublayer,
    Projector,
    ProjectorStep,
    VisionSpec,
)
from engine.kernels.device_memory import device_zeros, overwrite, to_device
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.pictures.patch_attention import attend_patches, patch_tiling
from engine.targets.nvidia.kernels.pictures.patches import (
    ROWS,
    Form,
    NormShape,
    PatchHeads,
    Terms,
    activate_rows,
    embed_patches,
    merge_rows,
    norm_patches,
    patch_input,
    rotate_patches,
    scale_rows,
)
from engine.targets.nvidia.kernels.products.matmul import fragments_size, matmul, tiles_for
from engine.targets.nvidia.matrices import Matrix

_PART = 1 << 14  # patches, times sublayers, of a part of the work
_COPY = 1 << 20  # bytes that are copied to the device at a time
_UNLIMITED = 3e38


@dataclass(frozen=True)
class Rows:
    """Rows of patches or tokens on the device: partial sums of a product, and what is to be added; then `activation`,
    if there is one."""

    cols: int
    tensor: Tensor
    parts: int = 1
    bias: Tensor | None = None
    limits: Tensor | None = None
    activation: Activation | None = None

    @property
    def terms(self) -> Terms:
        return Terms(self.parts, self.bias is not None, self.limits is not None)


@dataclass(frozen=True)
class Stacked:
    """A product of some linears whose inputs have the same limits, `clamp`: a matrix with the rows of all. If they are
    `paired`, rows of gate and up alternate."""

    matrix: Matrix
    clamp: Tensor | None
    paired: bool = False


class Parameters(Protocol):
    """What the steps read of an encoder: its vectors, the matrices of its first product, and those of linears that read
    the same."""

    spec: VisionSpec
    vectors: dict[Vector, Tensor]
    kernels: list[Matrix]
    products: dict[tuple[Linear, ...], list[Stacked]]


class PictureSteps:
    """The kernels for pictures of up to `size` patches, and their memory, which `allocate` gives. `linears`: those of
    each part of the work. `results`: what each projector makes, plain rows."""

    def __init__(
        self, encoder: Parameters, size: int, allocate: Callable[[int, DType], Tensor] = device_zeros
    ) -> None:
        spec = encoder.spec
        self._allocate = allocate
        self._encoder, self._spec, self._size = encoder, spec, size
        self._merged = -(-size // spec.merge**2 // ROWS) * ROWS
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._counts = [allocate(4, dtypes.int32) for _ in range(2)]  # of patches, and of tokens
        self._pixels = allocate(3 * size * spec.patch**2, dtypes.uint8)
        positions, half = spec.positions, 0
        self._n_terms = position_terms(spec, positions.table.size // spec.dim) if positions else 0
        if spec.rotations:
            half = len(spec.rotations.by_row)
        self._table_rows = allocate(max(1, size * self._n_terms), dtypes.int32)
        self._shares = allocate(max(1, size * self._n_terms), dtypes.float32)
        self._turns = [allocate(size * half, dtypes.float32) for _ in range(2)] if half else []
        self._windows = allocate(2 * size, dtypes.int32) if spec.window else None
        self._rows, self._count = size, self._counts[0]
        sequences, made = [self._begun()], dict[Projector, Rows]()
        self._embed()
        at_once = max(1, _PART // size)
        for i, sublayer in enumerate(spec.sublayers):
            if i and i % at_once == 0:
                sequences.append(self._begun())
            self._sublayer(sublayer)
            for projector in spec.projectors_after(i + 1):
                made[projector] = self._project(projector)
        self.results = [made[projector] for projector in spec.projectors]
        self._sequences, self.linears = sequences, [sequence.linear for sequence in sequences]

    @functools.cached_property
    def parts(self) -> list[Callable[[], None]]:
        """The work, one part after the other. Compiles what is not compiled yet."""
        return [sequence.capture() for sequence in self._sequences]

    def begin(self, rgb: NDArray[np.uint8], grid: Grid, places: Places) -> None:
        """Copies a picture to the device."""
        tokens = grid.rows * grid.columns
        n_rows = tokens * self._spec.merge**2 + self._spec.summary_rows
        for tensor, n in zip(self._counts, (n_rows, tokens), strict=True):
            overwrite(tensor, np.array([n, grid.columns, 0, 0], np.int32))
        _copy(self._pixels, arranged(self._spec, rgb))
        if self._windows is not None and places.windows is not None:
            _copy(self._windows, places.windows)
        if self._n_terms:
            _copy(self._table_rows, places.rows)
            _copy(self._shares, places.shares)
        for tensor, values in zip(self._turns, (places.cos, places.sin), strict=False):
            assert values is not None
            _copy(tensor, values)

    # --- what steps consist of --------------------------------------------------------------------------

    def _begun(self) -> KernelSequence:
        sequence = KernelSequence()
        self._add = sequence.add
        return sequence

    def _buffer(self, name: str, n: int, dtype: DType = dtypes.float32) -> Tensor:
        if (name, n) not in self._buffers:
            self._buffers[name, n] = self._allocate(n, dtype)
        return self._buffers[name, n]

    def _fragments(self, name: str, cols: int) -> Tensor:
        """Scratch activations. Those of a width are not of another: what is no activation is zero."""
        n = fragments_size(self._rows, cols)
        return self._buffer(f"{name} of {cols} in {self._rows}", n, dtypes.float16)

    def _embed(self) -> None:
        spec, size = self._spec, self._size
        x = self._fragments("x", 3 * spec.patch**2)
        kernel = patch_input(
            size, spec.patch, spec.merge, spec.mean, spec.std, spec.summary_rows, spec.colours_last
        )
        self._add(kernel, out=x, pixels=self._pixels, count=self._count)
        sums = [self._product(m, x, f"patches{i}") for i, m in enumerate(self._encoder.kernels)]
        is_later = spec.positions is not None and spec.positions.after_norm
        made = self._placed(sums, spec.bias, "embedded" if spec.norm else "stream", not is_later)
        if spec.norm:
            made = self._normed(made, spec.norm, "normed" if is_later else "stream")
        self._stream = (self._placed([made], None, "stream", True) if is_later else made).tensor
        self._pending: tuple[Rows, Norm | None] | None = None

    def _placed(self, sums: Sequence[Rows], bias: Vector | None, name: str, is_placed: bool) -> Rows:
        """The sum of rows of patches, with a bias, and with their positions if it `is_placed`."""
        size, dim, positions = self._size, self._spec.dim, self._spec.positions if is_placed else None
        out, terms = self._buffer(name, size * dim), self._n_terms if positions else 0
        self._add(
            embed_patches(size, dim, tuple(s.parts for s in sums), bias is not None, terms),
            stream=out, sums=[s.tensor for s in sums], bias=self._vector(bias),
            table=self._vector(positions.table) if positions else None,
            rows=self._table_rows if terms else None, shares=self._shares if terms else None, count=self._count,
        )  # fmt: skip
        return Rows(dim, out)

    def _sublayer(self, sublayer: PatchSublayer) -> None:
        operator = sublayer.operator
        if isinstance(operator, PatchAttention):
            result = self._attention(operator, sublayer.norm)
        else:
            result = self._feed_forward(operator, sublayer.norm)
        self._pending = result, sublayer.post_norm

    def _attention(self, a: PatchAttention, norm: Norm) -> Rows:
        size, linears = self._size, (a.q, a.k, a.v)
        sums = self._products(linears, norm)
        norms = [norm.eps if norm else None for norm in (a.q_norm, a.k_norm, a.v_norm)]
        heads = PatchHeads(
            a.heads,
            a.head_dim,
            (norms[0], norms[1], norms[2]),
            bool(self._turns),
            a.scale,
            a.sharing,
        )
        operands = self._buffer("operands", 3 * heads.size(size), dtypes.float16)
        bias, limits = self._biases(linears), self._limits(linears)
        weights = [n.weight for n in (a.q_norm, a.k_norm) if n and n.weight]
        runs = tuple(s.parts for s in sums), tuple(s.cols for s in sums)
        self._add(
            rotate_patches(heads, size, *runs, bias is not None, limits is not None),
            operands=operands, sums=[s.tensor for s in sums], bias=bias, limits=limits,
            cos=self._turns[0] if self._turns else None, sin=self._turns[1] if self._turns else None,
            norms=self._joined(weights) if weights else None, count=self._count,
        )  # fmt: skip
        clamp = self._clamp(a.o)
        x = self._fragments("attended", a.heads * a.head_dim)
        windows = self._windows if a.windowed else None
        window = (self._spec.window * self._spec.merge) ** 2 if a.windowed else 0
        kernel = attend_patches(heads, size, patch_tiling(heads), clamp is not None, window)
        self._add(kernel, out=x, operands=operands, clamp=clamp, windows=windows, count=self._count)
        return self._linear(a.o, x, "out")

    def _feed_forward(self, of: PatchFeedForward, norm: Norm) -> Rows:
        linears = (of.gate, of.up) if of.gate else (of.up,)
        first, clamp = self._encoder.products[linears][0], self._clamp(of.down)
        if first.paired and clamp is None and of.activation in ("silu", "gelu"):
            x = self._multiplied(first.matrix, norm, of.activation)
        elif not of.gate and clamp is first.clamp is of.up.outputs is None:
            x = self._multiplied(first.matrix, norm, of.activation, of.up)
        else:
            *gates, up = self._parts_of(linears, self._products(linears, norm))
            x = self._activated(up, "hidden", gates[0] if gates else None, clamp, of.activation)
        return self._linear(of.down, x, "down")

    def _multiplied(
        self, matrix: Matrix, norm: Norm, activation: Activation, alone: Linear | None = None
    ) -> Tensor:
        """activation(gate) * up of the normed stream, or activation(up) if up is `alone`, as fragments."""
        rows, cols = matrix.rows, matrix.cols
        x, out = self._fragments("x", cols), self._fragments("hidden", rows if alone else rows // 2)
        self._norm(norm, x, None)
        tiles = tiles_for(matrix.layout, self._rows, rows, cols, chip(), True)
        bias = self._vector(alone.bias) if alone else None
        if alone:
            kernel = matmul(
                matrix.layout,
                self._rows,
                rows,
                cols,
                tiles,
                False,
                "up",
                has_bias=bias is not None,
                ungated=activation,
            )
        else:
            assert activation in ("silu", "gelu")
            kernel = matmul(matrix.layout, self._rows, rows, cols, tiles, True, "gate_up", activation)
        self._add(kernel, out=out, x=x, prompt=self._count, bias=bias, planes=matrix.planes)
        return out

    def _project(self, projector: Projector) -> Rows:
        """The steps of a projector; returns the rows of the last one."""
        self._flush()
        of_patches = self._rows, self._count
        x = Rows(self._spec.dim, self._stream)
        *others, last = projector.steps
        for i, step in enumerate(others):
            x = self._projected(step, x, f"projected{i}")
        name = f"after {projector.sublayers}"  # of its own: it is read when all is done
        x = self._plain(self._projected(last, x, name), f"embeddings {name}")
        self._rows, self._count = of_patches
        return x

    def _projected(self, step: ProjectorStep, x: Rows, name: str) -> Rows:
        spec = self._spec
        match step:
            case Norm():
                return self._normed(self._plain(x, f"{name} of"), step, name)
            case Linear():
                inputs = self._activated(x, f"{name} of", None, self._clamp(step))
                return self._linear(step, inputs, name)
            case PatchFeedForward(gate=gate, up=up, down=down, activation=activation):
                inputs = self._activated(x, f"{name} of", None, None)
                gates = self._linear(gate, inputs, f"{name} gates") if gate else None
                hidden = self._linear(up, inputs, f"{name} hidden")
                return self._linear(
                    down, self._activated(hidden, f"{name} activated", gates, None, activation), name
                )
            case Activate(activation=activation):
                return replace(x, activation=activation)
            case Affine(factor=factor, minus=minus, times=times):
                x = self._plain(x, f"{name} of")
                out = self._buffer(name, self._rows * x.cols)
                kernel = scale_rows(self._rows, x.cols, factor, minus is not None, times is not None)
                tensors = {"minus": self._vector(minus), "times": self._vector(times)}
                self._add(kernel, out=out, rows=x.tensor, count=self._count, **tensors)
                return Rows(x.cols, out)
            case Merge(how=how):
                x = self._plain(x, f"{name} of")
                cols = x.cols if how == "mean" else x.cols * spec.merge**2
                out = self._buffer(name, self._merged * cols)
                kernel = merge_rows(self._merged, x.cols, spec.merge, how)
                self._rows, self._count = self._merged, self._counts[1]
                self._add(kernel, out=out, rows=x.tensor, count=self._count)
                return Rows(cols, out)
        raise AssertionError(step)

    # --- kernels ----------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Adds the pending result to the stream."""
        if self._pending:
            self._norm(None, None, None)

    def _norm(self, norm: Norm | None, x: Tensor | None, clamp: Tensor | None) -> None:
        """Adds the pending result to the stream, and norms it to fragments."""
        rows, post = self._pending or (None, None)
        shape = rows.terms if rows else None, _shape(post), _shape(norm), clamp is not None
        added = {"sums": rows.tensor, "bias": rows.bias, "limits": rows.limits} if rows else {}
        if post:
            added |= {"post_weight": self._vector(post.weight), "post_bias": self._vector(post.bias)}
        if norm:
            added |= {"weight": self._vector(norm.weight), "norm_bias": self._vector(norm.bias)}
        kernel = norm_patches(self._size, self._spec.dim, *shape)
        self._add(kernel, x=x, stream=self._stream, clamp=clamp, count=self._count, **added)
        self._pending = None

    def _normed(self, x: Rows, norm: Norm, name: str) -> Rows:
        """Plain rows after a norm."""
        out = self._buffer(name, self._rows * x.cols)
        kernel = norm_patches(self._rows, x.cols, norm=_shape(norm), form="rows")
        vectors = {"weight": self._vector(norm.weight), "norm_bias": self._vector(norm.bias)}
        self._add(kernel, x=out, stream=x.tensor, count=self._count, **vectors)
        return Rows(x.cols, out)

    def _plain(self, x: Rows, name: str) -> Rows:
        """Rows with nothing to be added."""
        if x.terms == Terms() and not x.activation:
            return x
        return Rows(
            x.cols,
            self._activate(x, self._buffer(name, self._rows * x.cols), "rows", None, None, x.activation),
        )

    def _activated(
        self,
        x: Rows,
        name: str,
        gate: Rows | None,
        clamp: Tensor | None,
        activation: Activation | None = None,
    ) -> Tensor:
        """Fragments of rows, after their activation."""
        out = self._fragments(name, x.cols)
        return self._activate(x, out, "fragments", gate, clamp, activation or x.activation)

    def _activate(
        self,
        x: Rows,
        out: Tensor,
        form: Form,
        gate: Rows | None,
        clamp: Tensor | None,
        activation: Activation | None,
    ) -> Tensor:
        kernel = activate_rows(
            self._rows, x.cols, x.terms, gate.terms if gate else None, activation, clamp is not None, form
        )
        gates = {"gate_sums": gate.tensor, "gate_bias": gate.bias, "gate_limits": gate.limits} if gate else {}
        self._add(
            kernel, out=out, up_sums=x.tensor, up_bias=x.bias, up_limits=x.limits, clamp=clamp, count=self._count,
            **gates,
        )  # fmt: skip
        return out

    def _products(self, linears: tuple[Linear, ...], norm: Norm) -> list[Rows]:
        """The normed stream times the matrices of some linears: the sums of each product."""
        made, x, known = [], None, None
        for i, product in enumerate(self._encoder.products[linears]):
            if x is None or product.clamp is not known:
                x, known = self._fragments("x", self._spec.dim), product.clamp
                self._norm(norm, x, known)
            made.append(self._product(product.matrix, x, f"sums{i}"))
        return made

    def _parts_of(self, linears: tuple[Linear, ...], sums: Sequence[Rows]) -> list[Rows]:
        """The products of linears whose sums are each of one of them."""
        limits = [self._limits((linear,)) for linear in linears]
        return [
            replace(s, bias=self._vector(linear.bias), limits=own)
            for s, linear, own in zip(sums, linears, limits, strict=True)
        ]

    def _linear(self, linear: Linear, x: Tensor, name: str) -> Rows:
        (product,) = self._encoder.products[linear,]
        made = self._product(product.matrix, x, name)
        return replace(made, bias=self._vector(linear.bias), limits=self._limits((linear,)))

    def _product(self, matrix: Matrix, x: Tensor, name: str) -> Rows:
        rows, cols = matrix.rows, matrix.cols
        tiles = tiles_for(matrix.layout, self._rows, rows, cols, chip(), False)
        out = self._buffer(name, tiles.parts * self._rows * rows)
        kernel = matmul(matrix.layout, self._rows, rows, cols, tiles, False, "patches")
        self._add(kernel, out=out, x=x, prompt=self._count, planes=matrix.planes)
        return Rows(rows, out, tiles.parts)

    # --- parameters -------------------------------------------------------------------------------------

    def _vector(self, vector: Vector | None) -> Tensor | None:
        return self._encoder.vectors[vector] if vector else None

    def _joined(self, vectors: Sequence[Vector]) -> Tensor:
        return to_device(np.concatenate([self._encoder.vectors[v].numpy() for v in vectors]))

    def _biases(self, linears: Sequence[Linear]) -> Tensor | None:
        if not any(linear.bias for linear in linears):
            return None
        vectors = [
            self._encoder.vectors[linear.bias].numpy()
            if linear.bias
            else np.zeros(linear.weight.rows, np.float32)
            for linear in linears
        ]
        return to_device(np.concatenate(vectors))

    def _limits(self, linears: Sequence[Linear]) -> Tensor | None:
        return limits_of([linear.outputs for linear in linears])

    def _clamp(self, linear: Linear) -> Tensor | None:
        return limits_of([linear.inputs])


def limits_of(limits: Sequence[Limits | None]) -> Tensor | None:
    """float32 (count, 2), None if there are none."""
    if not any(limits):
        return None
    bounded = [own or (-_UNLIMITED, _UNLIMITED) for own in limits]
    return to_device(np.clip(np.array(bounded, np.float32), -_UNLIMITED, _UNLIMITED))


def _shape(norm: Norm | None) -> NormShape | None:
    return (
        None
        if norm is None
        else NormShape(norm.eps, norm.weight is not None, norm.bias is not None, norm.centred)
    )


def _copy(tensor: Tensor, values: NDArray[np.generic]) -> None:
    """Copies numbers to the beginning of a device tensor, in pieces."""
    flat = np.ascontiguousarray(values).reshape(-1)
    n = _COPY // flat.itemsize
    for first in range(0, flat.size, n):
        overwrite(tensor, flat[first : first + n], first)
