"""An encoder of pictures on a CPU: kernels that the pool of threads runs, on weights quantized as in the file.

A picture's patches go through a sublayer in chunks of whole tiles, each a job of the pool, so that what is between two
products stays in the caches, and other work can be done between two jobs. The kernels read the number of patches from
memory: they are compiled once, when the encoder is opened, for pictures of all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import product as product_of

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.description.encoder_input import Floats, Grid, as_read, encoder_input, normed, waves
from engine.description.vision import (
    Activate,
    Activation,
    Affine,
    ConvolutionNet,
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
    VisionSpec,
    WindowQueries,
)
from engine.loading.fixed_rows import fixed_rows
from engine.loading.weights import FileWeights
from engine.runtime.pictures import Pixels, Progress, part_by_part
from engine.targets.cpu.convolution_net import CPUNet
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.kernels.patch_attention import HIDDEN, attend
from engine.targets.cpu.kernels.patches import PatchHeads, add_rows, split_heads, stride_of
from engine.targets.cpu.kernels.rounded_attention import attend_rounded, round_queries, round_values, rounds
from engine.targets.cpu.picture_chunks import chunks_of
from engine.targets.cpu.picture_kernels import PictureKernels, Rows, row_norm
from engine.targets.cpu.picture_weights import PictureMatrix


class CPUEncoder:
    """Implements `PictureEncoder`. Its parts are the jobs."""

    def __init__(self, weights: FileWeights, spec: VisionSpec) -> None:
        """Raises ModelFileError."""
        self.spec, self._kernels, self._fixed = spec, PictureKernels(weights, spec), fixed_rows(weights, spec)
        self._lanes, self._vectors = self._kernels.lanes, self._kernels.vectors
        self._x = Rows(self._kernels.whole("x", stride_of(spec.dim)), spec.dim, whole=True)
        self._tiles = memory.zeros(2, dtypes.int32)
        self._hidden = self._kernels.whole("hidden", 1)
        half = len(spec.rotations.by_row) if spec.rotations else 0
        self._turns = [self._kernels.whole(name, half) for name in ("cos", "sin")] if half else []
        types = {"firsts": dtypes.int32, "windows": dtypes.float32} if spec.has_windows else {}
        self._windows = [self._kernels.whole(name, 1, type) for name, type in types.items()]
        sequences = [list(self._kernels_of(sublayer)) for sublayer in spec.sublayers]
        inner = [spec.reduction.feed_forward] if spec.reduction else []
        steps = [*(Linear(kernel) for kernel in spec.kernels), *inner, *spec.projector_steps]
        activations = [step.activation if isinstance(step, Activate) else None for step in steps]
        linears = {}
        for step, activation in zip(steps, [None, *activations], strict=False):
            if isinstance(step, Linear):
                linears[step] = self._linear_kernels(step, activation)
            elif isinstance(step, PatchFeedForward):
                for linear in filter(None, (step.gate, step.up)):
                    linears[linear] = self._linear_kernels(linear, activation)
                linears[step.down] = self._linear_kernels(step.down, step.activation, step.gate is not None)
            elif isinstance(step, QueryAttention):
                linears |= {of: self._linear_kernels(of, None) for of in (step.q, step.k, step.v, step.o)}
        self._net = (
            CPUNet(spec.stem, spec.patch * spec.stem.side, self._kernels)
            if isinstance(spec.stem, ConvolutionNet)
            else None
        )
        every = [s for of in sequences for s in of] + [s for _, s, _ in linears.values()]
        every += self._net.sequences if self._net else []
        # All at once, which is faster.
        self._kernels.pool.compile([kernel for sequence in every for kernel in sequence.kernels])
        self._sequences = [[sequence.compile() for sequence in of] for of in sequences]
        self._linears = {step: (rows, s.compile(), out) for step, (rows, s, out) in linears.items()}

    def encode(self, rgbs: Sequence[Pixels]) -> Generator[Progress, None, Floats]:
        """See `PictureEncoder`."""
        return part_by_part([self._encode(rgb) for rgb in rgbs])

    def _encode(self, rgb: NDArray[np.uint8]) -> Generator[Progress, None, Floats]:
        spec = self.spec
        grid = Grid.of(spec, rgb.shape[1], rgb.shape[0])
        of = encoder_input(spec, rgb, self._vectors.__getitem__)
        chunks = list(chunks_of(len(of.patches), self._lanes))
        total = self._n_parts(len(of.patches))
        yield Progress(0, total)
        if self._net:
            x = yield from self._net.run(of.patches, total)
        else:
            first, *more = (self._linear(Linear(kernel), of.patches) for kernel in spec.kernels)
            x = sum(more, start=first)
        if spec.bias:
            x += self._vectors[spec.bias]
        is_later = spec.positions is not None and spec.positions.after_norm
        if of.added is not None and not is_later:
            x += of.added
        x = self._norm(x, spec.norm) if spec.norm else x
        if of.added is not None and is_later:
            x += of.added
        self._set_rows(x, chunks)
        for turns, angles in zip(self._turns, (of.cos, of.sin), strict=False):
            assert angles is not None
            memory.view(turns)[: angles.size] = angles.reshape(-1)
        self._set_windows(of.windows, chunks[-1].stop)
        done, parts, earlier = (
            self._net.count if self._net else 0,
            dict[Projector, Floats](),
            dict[int, Floats](),
        )
        for sublayers, sequences in enumerate([[], *self._sequences]):
            for sequence, chunk in product_of(sequences, chunks):
                if done:  # the first part had the patches
                    yield Progress(done, total)
                self._kernels.run(sequence, chunk)
                done += 1
            if spec.reduction and sublayers == spec.reduction.sublayers:
                x = self._reduced(spec.reduction, self._rows(len(x)))
                chunks = list(chunks_of(len(x), self._lanes))
                self._set_rows(x, chunks)
            used = self._rows(len(x) - spec.summary_rows)
            if any(sublayers in projector.earlier for projector in spec.projectors):
                earlier[sublayers] = used.copy()
            for projector in spec.projectors_after(sublayers):
                yield Progress(done, total)
                stacked = [*(earlier[i] for i in projector.earlier), used]
                parts[projector] = self._project(projector, np.concatenate(stacked, axis=1), grid)
        embeddings = np.concatenate([parts[projector] for projector in spec.projectors], axis=1)
        return as_read(spec, embeddings, grid, self._fixed.__getitem__)

    def preparations(self) -> Sequence[Callable[[], None]]:
        """None: all kernels were compiled when the encoder was opened."""
        return ()

    def _n_parts(self, n: int) -> int:
        """The parts of the work of n patches: sublayers by chunks, and the first projector."""
        before = self.spec.reduction.sublayers if self.spec.reduction else len(self._sequences)
        of = (n, self._sequences[:before]), (n // self.spec.square**2, self._sequences[before:])
        of_layers = sum(len([*chunks_of(k, self._lanes)]) * sum(map(len, sequences)) for k, sequences in of)
        return 1 + of_layers + (self._net.count if self._net else 0)

    def _rows(self, n: int) -> Floats:
        """The first n rows of the stream."""
        rows: Floats = memory.view(self._x.data).reshape(-1, stride_of(self.spec.dim))[:n, : self.spec.dim]
        return rows

    def _set_rows(self, x: Floats, chunks: Sequence[range]) -> None:
        """Makes x the stream, which sublayers read in `chunks`."""
        n, end = len(x), chunks[-1].stop
        self._rows(n)[:] = x
        memory.view(self._x.data).reshape(-1, stride_of(self.spec.dim))[n:end] = 0
        memory.view(self._tiles)[:] = end // self._lanes
        memory.view(self._hidden)[:end] = np.where(np.arange(end) < n, 0, HIDDEN)

    def _reduced(self, of: Reduction, x: Floats) -> Floats:
        """See `Reduction`."""
        squares = x.reshape(-1, of.side**2, self.spec.dim)
        joined = self._norm(squares.reshape(len(squares), -1), of.norm)
        mean: Floats = squares.mean(1, dtype=np.float32)
        return mean + self._feed_forward_of(of.feed_forward, joined)

    def _feed_forward_of(self, of: PatchFeedForward, x: Floats) -> Floats:
        """The feed-forward layer of all rows at once."""
        return self._linear(of.down, *(self._linear(linear, x) for linear in (of.gate, of.up) if linear))

    def _set_windows(self, windows: NDArray[np.int32] | None, n: int) -> None:
        """Sets the windows of a picture's patches, of which there are up to n: see `KeyTiles`."""
        if windows is None:
            return
        lanes = self._lanes
        numbers, ends = np.pad(windows, ((0, n - len(windows)), (0, 0)), "edge").T
        first, end = numbers[::lanes] // lanes, -(-ends[lanes - 1 :: lanes] // lanes)
        count = (end - first).max()
        memory.view(self._windows[0])[: 1 + n // lanes] = [count, *np.minimum(first, n // lanes - count)]
        memory.view(self._windows[1])[:n] = numbers

    # --- the kernels of sublayers ------------------------------------------------------------------------

    def _kernels_of(self, sublayer: PatchSublayer) -> Iterator[KernelSequence]:
        operator = sublayer.operator
        if isinstance(operator, PatchAttention):
            yield from self._attention(sublayer, operator)
        else:
            yield self._feed_forward(sublayer, operator)

    def _attention(self, sublayer: PatchSublayer, a: PatchAttention) -> Iterator[KernelSequence]:
        heads = PatchHeads(
            a.heads, a.head_dim, a.scale, row_norm(a.q_norm), row_norm(a.v_norm), bool(self._turns),
            any(linear.outputs for linear in (a.q, a.k, a.v)), self._lanes, a.sharing,
        )  # fmt: skip
        q, keys = (
            self._kernels.whole(name, n * a.head_dim)
            for name, n in (("q", a.heads), ("keys", heads.kv_heads))
        )
        v = self._kernels.whole("values", heads.kv_heads * heads.padded_dim)
        sequence, joined = self._kernels.sequence(), self._kernels.chunk("joined", 3 * heads.width)
        last = None
        for i, linear in enumerate((a.q, a.k, a.v)):
            matrix = self._kernels.weights.matrix(linear)
            inputs = matrix.inputs, linear.inputs
            if inputs != last:
                self._kernels.prepare(
                    sequence, matrix, self._x, sublayer.norm, limits=(None, None, linear.inputs)
                )
            self._kernels.product(
                sequence, linear.bias, matrix, joined, i * heads.width, 3 * heads.width, inputs == last
            )
            last = inputs
        norms = [v for norm in (a.q_norm, a.k_norm, a.v_norm) for v in self._kernels.vectors_of(norm)]
        limits = self._kernels.limits([linear.outputs for linear in (a.q, a.k, a.v)])
        sequence.add(
            split_heads(heads), q, keys, v, self._tiles, self._kernels.state, joined, *self._turns, *norms, *limits,
            parts=self._kernels.parts,
        )  # fmt: skip
        is_rounded = rounds(heads) and self._kernels.rounds_attention
        if is_rounded:
            floats = q, keys, v
            q, keys, v = (
                self._kernels.whole(f"rounded {i}", x.max_numel() // self._kernels.most_rows, dtypes.int16)
                for i, x in enumerate(floats)
            )
            scales = [self._kernels.whole(f"scales {i}", a.heads) for i in range(3)]
            rounding = round_queries(heads), round_queries(heads.of_keys), round_values(heads)
            for kernel, out, scale, floating in zip(rounding, (q, keys, v), scales, floats, strict=True):
                sequence.add(
                    kernel, out, scale, floating, self._tiles, self._kernels.state,
                    parts=self._kernels.parts, concurrent=kernel is not rounding[0],
                )  # fmt: skip
        yield sequence
        sequence, width = self._kernels.sequence(), a.heads * a.head_dim
        out = self._kernels.chunk("attended", heads.width)
        scratch, of_keys = [self._kernels.whole("scores", self._kernels.parts * self._lanes)], [q, keys, v]
        if is_rounded:
            scratch.append(self._kernels.whole("weights", self._kernels.parts * self._lanes, dtypes.int16))
            scratch.append(self._kernels.whole("weight scales", self._kernels.parts))
            of_keys += scales
        sequence.add(
            (attend_rounded if is_rounded else attend)(heads, a.windowed), out, *scratch, *of_keys, self._hidden,
            self._tiles, self._kernels.state, *(self._windows if a.windowed else ()), parts=self._kernels.parts,
        )  # fmt: skip
        matrix = self._kernels.weights.matrix(a.o)
        self._kernels.prepare(sequence, matrix, Rows(out, width), limits=(None, None, a.o.inputs))
        self._finish(sequence, sublayer, a.o, matrix)
        yield sequence

    def _feed_forward(self, sublayer: PatchSublayer, of: PatchFeedForward) -> KernelSequence:
        sequence, last = self._kernels.sequence(), None
        hidden: list[Rows] = []
        for linear in (of.gate, of.up) if of.gate else (of.up,):
            matrix = self._kernels.weights.matrix(linear)
            inputs = matrix.inputs, linear.inputs
            if inputs != last:
                self._kernels.prepare(
                    sequence, matrix, self._x, sublayer.norm, limits=(None, None, linear.inputs)
                )
            rows = Rows(self._kernels.chunk(f"hidden {len(hidden)}", matrix.stride), matrix.rows)
            self._kernels.product(sequence, linear.bias, matrix, rows.data, concurrent=inputs == last)
            hidden, last = [*hidden, rows], inputs
        down = self._kernels.weights.matrix(of.down)
        outputs = (of.gate.outputs, of.up.outputs) if of.gate else (of.up.outputs, None)
        self._kernels.prepare(
            sequence, down, *hidden, activation=of.activation, limits=(*outputs, of.down.inputs)
        )
        self._finish(sequence, sublayer, of.down, down)
        return sequence

    def _finish(
        self, sequence: KernelSequence, sublayer: PatchSublayer, linear: Linear, matrix: PictureMatrix
    ) -> None:
        """The last product of a sublayer, and its sum with the picture's rows."""
        out, norm = self._kernels.chunk("out", matrix.stride), sublayer.post_norm
        self._kernels.product(sequence, linear.bias, matrix, out)
        sequence.add(
            add_rows(row_norm(norm), bool(linear.outputs), self._lanes),
            self._x.data, self._kernels.row_sizes(self.spec.dim), self._kernels.state, out,
            *self._kernels.vectors_of(norm), *self._kernels.limits([linear.outputs]), parts=self._kernels.parts,
        )  # fmt: skip

    # --- the products outside sublayers ------------------------------------------------------------------

    def _linear_kernels(
        self, linear: Linear, activation: Activation | None, is_gated: bool = False
    ) -> tuple[list[Tensor], KernelSequence, Tensor]:
        """The memory of the input, and of what it is multiplied by if it is gated; the kernels; and the memory of the
        result."""
        sequence, matrix = self._kernels.sequence(), self._kernels.weights.matrix(linear)
        rows = [self._kernels.chunk(name, matrix.cols) for name in ["rows", "factors"][: 1 + is_gated]]
        out = self._kernels.chunk("out", matrix.stride)
        how = [Rows(of, matrix.cols) for of in rows]
        self._kernels.prepare(
            sequence, matrix, *how, activation=activation, limits=(None, None, linear.inputs)
        )
        self._kernels.product(sequence, linear.bias, matrix, out)
        return rows, sequence, out

    def _linear(self, linear: Linear, x: Floats, *factors: Floats) -> Floats:
        rows, sequence, out = self._linears[linear]
        weight = linear.weight
        cols, n = (weight.rows, weight.cols) if linear.transposed else (weight.cols, weight.rows)
        sources = [memory.view(of).reshape(-1, stride_of(cols)) for of in rows]
        result = memory.view(out).reshape(-1, stride_of(n))
        y = np.empty((len(x), n), np.float32)
        for chunk in chunks_of(len(x), self._lanes):
            for source, of in zip(sources, (x, *factors), strict=True):
                part = of[chunk.start : chunk.stop]
                source[: len(part), :cols], source[: len(part), cols:] = part, 0
            self._kernels.run(sequence, chunk)
            y[chunk.start : chunk.stop] = result[: len(part), :n]
        low, high = linear.outputs or (-np.inf, np.inf)
        clipped: Floats = np.clip(y, np.float32(low), np.float32(high), out=y)
        return clipped

    def _project(self, projector: Projector, x: Floats, grid: Grid) -> Floats:
        for step in projector.steps:
            x = self._projected(step, x, grid)
        return x

    def _projected(self, step: ProjectorStep, x: Floats, grid: Grid) -> Floats:
        match step:
            case QueryAttention():
                return self._queried(step, x, grid)
            case WindowQueries():
                raise AssertionError("`lacks` says so")
            case Neighbours():
                return self._around(step, x, grid)
            case Norm():
                return self._norm(x, step)
            case Linear():
                return self._linear(step, x)
            case PatchFeedForward():
                return self._feed_forward_of(step, x)
            case Activate():  # by the product that follows
                return x
            case Affine(factor=factor, minus=minus, times=times):
                x = x * np.float32(factor)
                x = x - self._vectors[minus] if minus else x
                return x * self._vectors[times] if times else x
            case Merge(how=how):
                x = x.reshape(-1, self.spec.last_merge**2, x.shape[-1])
                if how == "mean":
                    mean: Floats = x.mean(1, dtype=np.float32)
                    return mean
                x = x.transpose(0, 2, 1) if how == "channels" else x
                return x.reshape(len(x), -1)

    def _around(self, of: Neighbours, x: Floats, grid: Grid) -> Floats:
        m, dim, k = of.side, x.shape[1], of.kernel
        if m == self.spec.merge:  # the patches of a token follow each other
            x = x.reshape(grid.rows, grid.columns, m, m, dim).transpose(0, 2, 1, 3, 4)
        x = x.reshape(grid.rows * m, grid.columns * m, dim)
        padded = np.pad(x, (*[(k // 2, k // 2)] * 2, (0, 0)))
        around = np.lib.stride_tricks.sliding_window_view(padded, (k, k), (0, 1))
        return np.ascontiguousarray(around[:: of.stride, :: of.stride]).reshape(-1, dim * k * k)

    def _queried(self, of: QueryAttention, x: Floats, grid: Grid) -> Floats:
        queries = self._norm(self._vectors[of.queries].reshape(of.count, -1), of.norm)
        keys = x + waves(grid, x.shape[1])
        q, k, v = (
            self._linear(linear, rows).reshape(len(rows), of.heads, -1).transpose(1, 0, 2)
            for linear, rows in ((of.q, queries), (of.k, keys), (of.v, x))
        )
        scores = q @ k.transpose(0, 2, 1) * np.float32(of.head_dim**-0.5)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        rows = shares @ v / shares.sum(-1, keepdims=True)
        return self._linear(of.o, rows.transpose(1, 0, 2).reshape(of.count, -1))

    def _norm(self, x: Floats, norm: Norm) -> Floats:
        return normed(x, norm, self._vectors.__getitem__)
