"""The kernels of an encoder of pictures for those of up to so many patches, in parts of the work, and their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

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
    Linear,
    Merge,
    Neighbours,
    Norm,
    PatchAttention,
    PatchFeedForward,
    PatchSublayer,
    Projector,
    ProjectorStep,
    QueryAttention,
    Reduction,
)
from engine.kernels.device_memory import device_zeros, overwrite, to_device
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.pictures.patch_attention import attend_patches, patch_tiling
from engine.targets.nvidia.kernels.pictures.patches import (
    ROWS,
    MergeHow,
    PatchHeads,
    embed_patches,
    merge_rows,
    neighbour_rows,
    norm_patches,
    patch_input,
    place_rows,
    rotate_patches,
    scale_rows,
)
from engine.targets.nvidia.kernels.products.matmul import matmul, tiles_for
from engine.targets.nvidia.matrices import Matrix
from engine.targets.nvidia.picture_kernels import Parameters, PictureKernels, Rows, norm_shape

_PART = 1 << 14  # patches, times sublayers, of a part of the work
_COPY = 1 << 20  # bytes that are copied to the device at a time


class PictureSteps(PictureKernels):
    """The kernels for pictures of up to `size` patches, and their memory, which `allocate` gives. `linears`: those of
    each part of the work. `results`: what each projector makes, plain rows."""

    def __init__(
        self, encoder: Parameters, size: int, allocate: Callable[[int, DType], Tensor] = device_zeros
    ) -> None:
        super().__init__(encoder, allocate)
        spec, self._size = encoder.spec, size
        # How many patches there are, and below of rows that a token has side x side of.
        self._patches = allocate(4, dtypes.int32)
        sides = {
            1,
            spec.last_merge,
            *(s.side // s.stride for s in spec.projector_steps if isinstance(s, Neighbours)),
        }
        self._counts = {side: allocate(4, dtypes.int32) for side in sorted(sides)}
        self._pixels = allocate(3 * size * spec.patch**2, dtypes.uint8)
        positions, half = spec.positions, 0
        self._n_terms = position_terms(spec, positions.table.size // spec.dim) if positions else 0
        if spec.rotations:
            half = len(spec.rotations.by_row)
        self._table_rows = allocate(max(1, size * self._n_terms), dtypes.int32)
        self._shares = allocate(max(1, size * self._n_terms), dtypes.float32)
        self._turns = [allocate(size * half, dtypes.float32) for _ in range(2)] if half else []
        self._windows = allocate(2 * size, dtypes.int32) if spec.has_windows else None
        self._wave_rows = allocate(2 * size, dtypes.int32) if encoder.fixed_queries else None
        self._rows, self._count, self._side = size, self._patches, spec.merge
        sequences, made = [self._begun()], dict[Projector, Rows]()
        self._embed()
        self._keep(0)
        at_once = max(1, _PART // size)
        for i, sublayer in enumerate(spec.sublayers):
            if i and i % at_once == 0:
                sequences.append(self._begun())
            self._sublayer(sublayer)
            if spec.reduction and i + 1 == spec.reduction.sublayers:
                self._reduce(spec.reduction)
            self._keep(i + 1)
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
        counts = [(tensor, tokens * side**2) for side, tensor in self._counts.items()]
        counts.append((self._patches, tokens * self._spec.merge**2 + self._spec.summary_rows))
        for tensor, n in counts:
            overwrite(tensor, np.array([n, grid.columns, 0, 0], np.int32))
        if self._wave_rows is not None and (fixed := self._encoder.fixed_queries):
            _copy(self._wave_rows, fixed.places_of(grid))
        _copy(self._pixels, arranged(self._spec, rgb))
        if self._windows is not None and places.windows is not None:
            _copy(self._windows, places.windows)
        if self._n_terms:
            _copy(self._table_rows, places.rows)
            _copy(self._shares, places.shares)
        for tensor, values in zip(self._turns, (places.cos, places.sin), strict=False):
            assert values is not None
            _copy(tensor, values)

    def _embed(self) -> None:
        spec, size = self._spec, self._size
        x = self._fragments("x", 3 * spec.patch**2)
        kernel = patch_input(
            size,
            spec.patch,
            spec.merge,
            spec.mean,
            spec.std,
            spec.summary_rows,
            spec.colours_last,
            spec.square,
        )
        self._add(kernel, out=x, pixels=self._pixels, count=self._count)
        sums = [self._product(m, x, f"patches{i}") for i, m in enumerate(self._encoder.kernels)]
        is_later = spec.positions is not None and spec.positions.after_norm
        made = self._placed(sums, spec.bias, "embedded" if spec.norm else "stream", not is_later)
        if spec.norm:
            made = self._normed(made, spec.norm, "normed" if is_later else "stream")
        self._stream = (self._placed([made], None, "stream", True) if is_later else made).tensor

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
        linears = a.q, a.k, a.v
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
        bias, limits = self._biases(linears), self._limits(linears)
        weights = [n.weight for n in (a.q_norm, a.k_norm) if n and n.weight]
        norms_of = self._joined(weights) if weights else None
        x = self._attended(heads, sums, bias, limits, norms_of, self._clamp(a.o), a.windowed)
        return self._linear(a.o, x, "out")

    def _attended(
        self,
        heads: PatchHeads,
        sums: Sequence[Rows],
        bias: Tensor | None = None,
        limits: Tensor | None = None,
        norms: Tensor | None = None,
        clamp: Tensor | None = None,
        is_windowed: bool = False,
    ) -> Tensor:
        """Attention of queries to keys and values, which come in runs of sums, as fragments."""
        spec, size = self._spec, self._rows
        operands = self._buffer("operands", 3 * heads.size(size), dtypes.float16)
        runs = tuple(s.parts for s in sums), tuple(s.cols for s in sums)
        cos, sin = self._turns if heads.turns else (None, None)
        self._add(
            rotate_patches(heads, size, *runs, bias is not None, limits is not None),
            operands=operands, sums=[s.tensor for s in sums], bias=bias, limits=limits, cos=cos, sin=sin,
            norms=norms, count=self._count,
        )  # fmt: skip
        x = self._fragments("attended", heads.count * heads.dim)
        window = ((spec.window * spec.merge) or spec.square) ** 2 if is_windowed else 0
        kernel = attend_patches(heads, size, patch_tiling(heads), clamp is not None, window)
        windows = self._windows if is_windowed else None
        self._add(kernel, out=x, operands=operands, clamp=clamp, windows=windows, count=self._count)
        return x

    def _reduce(self, of: Reduction) -> None:
        """Makes the squares of patches the stream."""
        self._flush()
        patches = Rows(self._spec.dim, self._stream)
        self._make_fewer(of.side)
        mean, joined = (self._merged(patches, of.side, how, f"{how} of squares") for how in ("mean", "join"))
        self._stream = mean.tensor
        x = self._fragments("normed squares", joined.cols)
        self._add(
            norm_patches(self._rows, joined.cols, norm=norm_shape(of.norm)), x=x, stream=joined.tensor,
            count=self._count, weight=self._vector(of.norm.weight), norm_bias=self._vector(of.norm.bias),
        )  # fmt: skip
        hidden = self._linear(of.feed_forward.up, x, "hidden squares")
        x = self._activated(hidden, "activated squares", None, None, of.feed_forward.activation)
        self._pending = self._linear(of.feed_forward.down, x, "down squares"), None

    def _make_fewer(self, by: int) -> None:
        """From now on, rows are those of squares of `by` x `by` rows."""
        self._side //= by
        self._rows = -(-self._size // (self._spec.merge // self._side) ** 2 // ROWS) * ROWS
        self._count = self._counts[self._side]

    def _merged(self, x: Rows, side: int, how: MergeHow, name: str) -> Rows:
        """Rows of `side` x `side` others."""
        cols = x.cols if how == "mean" else x.cols * side**2
        out = self._buffer(name, self._rows * cols)
        self._add(merge_rows(self._rows, x.cols, side, how), out=out, rows=x.tensor, count=self._count)
        return Rows(cols, out)

    def _keep(self, done: int) -> None:
        """Keeps the stream after so many sublayers, if a projector reads it later."""
        for projector in self._spec.projectors:
            parts = *projector.earlier, projector.sublayers
            if projector.earlier and done in parts:
                self._flush()
                cols, dim = self._spec.dim * len(parts), self._spec.dim
                kept = self._buffer(f"kept for {projector.sublayers}", self._rows * cols)
                kernel = place_rows(self._rows, dim, cols, parts.index(done) * dim)
                self._add(kernel, out=kept, rows=self._stream, count=self._count)

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
        of_patches = self._rows, self._count, self._side
        x = Rows(self._spec.dim, self._stream)
        if projector.earlier:
            cols = self._spec.dim * (len(projector.earlier) + 1)
            x = Rows(cols, self._buffer(f"kept for {projector.sublayers}", self._rows * cols))
        *others, last = projector.steps
        for i, step in enumerate(others):
            x = self._projected(step, x, f"projected{i}")
        name = f"after {projector.sublayers}"  # of its own: it is read when all is done
        x = self._plain(self._projected(last, x, name), f"embeddings {name}")
        self._rows, self._count, self._side = of_patches
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
                self._make_fewer(spec.last_merge)
                return self._merged(x, spec.last_merge, how, name)
            case Neighbours(kernel=k, stride=stride, side=side):
                x = self._plain(x, f"{name} of")
                self._make_fewer(stride)
                out = self._buffer(name, self._rows * x.cols * k**2)
                kernel = neighbour_rows(self._rows, x.cols, k, stride, side, side == spec.merge)
                self._add(kernel, out=out, rows=x.tensor, count=self._count)
                return Rows(x.cols * k**2, out)
            case QueryAttention():
                return self._queried(step, self._plain(x, f"{name} of"), name)
        raise AssertionError(step)

    def _queried(self, of: QueryAttention, x: Rows, name: str) -> Rows:
        """Attention of fixed queries, which take the places of the first patches. Of the results only theirs are
        read."""
        fixed, size = self._encoder.fixed_queries, self._rows
        assert fixed

        def gathered(sums: list[Rows], table: Tensor, rows: Tensor | None, terms: int, cols: int) -> Rows:
            """The sum of some rows, and of `terms` rows of a table."""
            out, shares = (
                self._buffer(f"{name} of {terms}", size * cols),
                to_device(np.ones(size * terms, np.float32)),
            )
            self._add(
                embed_patches(size, cols, tuple(s.parts for s in sums), False, terms),
                stream=out, sums=[s.tensor for s in sums], table=table, rows=rows, shares=shares, count=self._count,
            )  # fmt: skip
            return Rows(cols, out)

        which = to_device(np.minimum(np.arange(size), of.count - 1).astype(np.int32), dtypes.int32)
        sums = [gathered([], fixed.queries, which, 1, of.heads * of.head_dim)]
        for i, (linear, rows) in enumerate(
            ((of.k, gathered([x], fixed.waves, self._wave_rows, 2, x.cols)), (of.v, x))
        ):
            made = self._linear(linear, self._activated(rows, f"{name} of", None, None), f"{name} sums{i}")
            sums.append(self._plain(made, f"{name} rows{i}"))
        heads = PatchHeads(of.heads, of.head_dim, (None, None, None), False, of.head_dim**-0.5)
        attended = self._attended(heads, sums)
        self._rows, self._count = -(-of.count // ROWS) * ROWS, fixed.count
        return self._linear(of.o, attended, name)


def _copy(tensor: Tensor, values: NDArray[np.generic]) -> None:
    """Copies numbers to the beginning of a device tensor, in pieces."""
    flat = np.ascontiguousarray(values).reshape(-1)
    n = _COPY // flat.itemsize
    for first in range(0, flat.size, n):
        overwrite(tensor, flat[first : first + n], first)
