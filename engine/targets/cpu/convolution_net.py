"""An encoder of convolutions (`engine.description.vision.ConvolutionNet`) on a CPU.

Its pictures are all of one size, and so is each of its images. Convolutions of single places are products, and those of
several places are products after these are gathered; what lies between two products goes chunk by chunk through the
caches. Only convolutions of single channels need a whole image before they begin.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from engine.description.encoder_input import Floats, normed
from engine.description.sublayers import Vector
from engine.description.vision import (
    Activation,
    ConvolutionNet,
    ImageAttention,
    ImageBlock,
    ImageStep,
    Norm,
)
from engine.runtime.pictures import Progress
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.images import convolve_channels, gather
from engine.targets.cpu.kernels.kernel_sequence import CompiledSequence, KernelSequence
from engine.targets.cpu.kernels.patch_attention import HIDDEN, attend
from engine.targets.cpu.kernels.patches import PatchHeads, RowNorm, Which, add_rows, split_heads, stride_of
from engine.targets.cpu.kernels.rounded_attention import attend_rounded, round_queries, round_values, rounds
from engine.targets.cpu.kernels.stream_size import UNIT
from engine.targets.cpu.picture_chunks import chunks_of
from engine.targets.cpu.picture_kernels import PictureKernels, Rows, row_norm

_SHARED = "stream 0", "stream 1", "inner 0", "inner 1"
"""Images that take turns in the same memory."""


@dataclass(frozen=True)
class _Image:
    """Rows of `channels`, float32 (side², stride), those of its last chunk included."""

    data: Tensor
    side: int
    channels: int

    @property
    def rows(self) -> Rows:
        return Rows(self.data, self.channels, whole=True)

    @property
    def view(self) -> Floats:
        rows: Floats = memory.view(self.data).reshape(-1, stride_of(self.channels))
        return rows[: self.side**2, : self.channels]


@dataclass(frozen=True)
class _Job:
    """What runs for each of its chunks."""

    sequence: KernelSequence
    chunks: tuple[range, ...]


@dataclass(frozen=True)
class _End:
    """What becomes of the last rows of a block: they are multiplied by `scale`, and added to an image, or become one of
    the `name`."""

    name: str
    scale: Vector | None = None
    added_to: _Image | None = None


_INNER = _End("inner")
Begin = Callable[[KernelSequence], Rows]
"""Adds what makes the rows of a chunk for the first product of several."""


class CPUNet:
    """`count`: parts of the work on a picture. `sequences`: of kernels, which may be compiled before it first runs."""

    def __init__(self, net: ConvolutionNet, side: int, kernels: PictureKernels) -> None:
        """`side`: of its pictures in pixels. Its first convolution is of the picture alone."""
        self._net, self._kernels, self._side = net, kernels, side
        self._largest, self._inner = largest_image(net, side, kernels.lanes), 0
        self._jobs = [list[_Job]() for _ in range(len(net.blocks) + 1)]
        self._compiled: list[list[tuple[CompiledSequence, tuple[range, ...]]]] = []
        (step,) = net.blocks[0].steps
        assert isinstance(step, ImageStep)
        self._first = step
        # What the first convolution reads of each place, as the columns of its weights are.
        image = self._around = self._image("around", -(-side // step.stride), step.weight.cols)
        self._read = list[_Image]()
        for i, block in enumerate(net.blocks):
            steps = (replace(step, kernel=1, stride=1),) if i == 0 else block.steps
            self._building = self._jobs[i]
            image = self._block(replace(block, steps=steps), image, f"stream {i % 2}")
            if i in net.read:
                self._read.append(image)
        self._joined = self._image("joined", self._read[0].side, sum(of.channels for of in self._read))
        self._building = self._jobs[-1]
        self._last = self._block(net.last, self._joined, "last")
        self.count = sum(len(job.chunks) for jobs in self._jobs for job in jobs)

    @property
    def sequences(self) -> list[KernelSequence]:
        return [job.sequence for jobs in self._jobs for job in jobs]

    def run(self, patches: Floats, total: int) -> Generator[Progress, None, Floats]:
        """See `engine.targets.graph.convolution_net.NetSteps`."""
        if not self._compiled:
            self._compiled = [[(job.sequence.compile(), job.chunks) for job in jobs] for jobs in self._jobs]
        self._around.view[:] = self._gathered(patches)
        done, read, joined = 0, iter(self._read), 0
        for number, jobs in enumerate(self._compiled):
            for sequence, chunk in ((sequence, chunk) for sequence, chunks in jobs for chunk in chunks):
                if done:
                    yield Progress(done, total)
                self._kernels.run(sequence, chunk)
                done += 1
            if number in self._net.read:
                joined = self._join(next(read), joined)
        last, net = self._last, self._net
        k = last.side // net.side
        squares = last.view.reshape(net.side, k, net.side, k, last.channels)
        x: Floats = squares.mean((1, 3), dtype=np.float32).reshape(net.side**2, last.channels)
        return normed(x, net.norm, self._kernels.vectors.__getitem__) if net.norm else x

    def _join(self, image: _Image, first: int) -> int:
        """Puts an image, enlarged, beside those before, which have `first` channels. How many these are then."""
        side, end = self._joined.side, first + image.channels
        k = side // image.side
        of = image.view.reshape(image.side, 1, image.side, 1, image.channels)
        for down, across in np.ndindex(k, k):
            whole = self._joined.view.reshape(image.side, k, image.side, k, -1)
            whole[:, down, :, across, first:end] = of[:, 0, :, 0]
        return end

    def _gathered(self, patches: Floats) -> Floats:
        """What the first convolution reads of each place of a picture: (side², 3 kernel²)."""
        step, side = self._first, self._side
        n = int((patches.shape[1] // 3) ** 0.5)
        squares = patches.reshape(side // n, side // n, 3, n, n).transpose(2, 0, 3, 1, 4)
        beyond = room(side, step)
        edges = beyond // 2, beyond - beyond // 2
        picture = np.pad(squares.reshape(3, side, side), ((0, 0), edges, edges))
        windows = np.lib.stride_tricks.sliding_window_view(picture, (step.kernel, step.kernel), (1, 2))
        windows = windows[:, :: step.stride, :: step.stride].transpose(1, 2, 0, 3, 4)
        return windows.reshape(self._around.side**2, -1)

    # --- blocks ------------------------------------------------------------------------------------------

    def _block(self, block: ImageBlock, x: _Image, name: str) -> _Image:
        """The image that a block makes, which is x itself if the block adds to it."""
        image, waiting = x, list[ImageStep]()
        for step in block.steps:
            if isinstance(step, ImageAttention) or step.deep or step.kernel * step.stride > 1:
                image, waiting = self._products(waiting, image, _INNER), []
            if isinstance(step, ImageAttention):
                image = self._attended(step, image)
            elif step.deep:
                image = self._of_channels(step, image)
            else:
                waiting.append(step)
        end = _End(name, block.scale, x if block.adds else None)
        if not waiting:
            return self._ended(image, None, None, end)
        # A scale comes after an activation; and chunks read places of those before, which must not have changed.
        is_scaled_late = waiting[-1].activates and (block.scale or block.adds)
        if is_scaled_late or (block.adds and waiting[0].kernel > 1):
            image = self._products(waiting, image, _INNER)
            return self._ended(image, None, None, end)
        return self._products(waiting, image, end)

    def _products(self, steps: Sequence[ImageStep], image: _Image, end: _End) -> _Image:
        """The image that products make of another one, chunk by chunk. Only the first step may be of several places."""
        if not steps:
            return image
        first, side = steps[0], -(-image.side // steps[0].stride)
        if first.kernel * first.stride == 1:
            return self._chain(lambda _: image.rows, steps, side, end)
        cols, shape = first.kernel**2 * stride_of(image.channels), self._shape(first, image)

        def begin(sequence: KernelSequence) -> Rows:
            out = self._kernels.chunk("around", cols)
            kernel = gather(first.kernel, self._kernels.lanes)
            self._add(sequence, kernel, out, shape, self._kernels.state, image.data)
            return Rows(out, cols)

        return self._chain(begin, steps, side, end)

    def _chain(self, begin: Begin, steps: Sequence[ImageStep], side: int, end: _End) -> _Image:
        kernels, sequence = self._kernels, self._kernels.sequence()
        rows, norm, activation = begin(sequence), None, None
        for step in steps:
            matrix = kernels.weights.convolution(step)
            kernels.prepare(sequence, matrix, rows, norm, activation=activation)
            rows = Rows(kernels.chunk("made", matrix.stride), matrix.rows)
            kernels.product(sequence, step.bias, matrix, rows.data)
            norm, activation = step.norm, _activation(step)
        return self._ended(_Image(rows.data, side, rows.cols), norm, activation, end, sequence)

    def _ended(
        self,
        rows: _Image,
        norm: Norm | None,
        activation: Activation | None,
        end: _End,
        sequence: KernelSequence | None = None,
    ) -> _Image:
        """The rows of chunks, or of a whole image if there is no `sequence`, after a norm and an activation."""
        kernels, of_chunk = self._kernels, sequence is not None
        sequence = sequence or kernels.sequence()
        image = end.added_to or self._image(end.name, rows.side, rows.channels)
        vectors = [kernels.vectors[v] for v in (norm.weight if norm else None, end.scale) if v]
        shape = RowNorm(norm.eps if norm else None, bool(vectors), False, False) if norm or vectors else None
        weight = (
            [memory.array(kernels.padded(reduce(np.multiply, vectors)), dtypes.float32)] if vectors else []
        )
        kernel = add_rows(shape, False, kernels.lanes, not end.added_to, activation, not of_chunk)
        sizes = kernels.row_sizes(rows.channels)
        self._add(sequence, kernel, image.data, sizes, kernels.state, rows.data, *weight)
        self._building.append(_Job(sequence, self._chunks(rows.side)))
        return image

    def _of_channels(self, step: ImageStep, image: _Image) -> _Image:
        kernels, norm = self._kernels, step.norm
        out = self._image(_INNER.name, -(-image.side // step.stride), image.channels)
        weights = memory.array(kernels.weights.of_channels(step), dtypes.float32)
        bias = (
            kernels.padded(kernels.vectors[step.bias]) if step.bias else np.zeros(stride_of(image.channels))
        )
        kernel = convolve_channels(step.kernel, row_norm(norm), _activation(step), kernels.lanes)
        sequence = kernels.sequence()
        self._add(
            sequence, kernel, out.data, self._shape(step, image), image.data, weights,
            memory.array(bias, dtypes.float32), *kernels.vectors_of(norm),
        )  # fmt: skip
        self._building.append(_Job(sequence, (range(kernels.lanes),)))
        return out

    # --- attention ---------------------------------------------------------------------------------------

    def _attended(self, of: ImageAttention, x: _Image) -> _Image:
        """Attention of all places of x to those of its keys and values: the image that the last product makes."""
        kernels, dim = self._kernels, of.k[-1].weight.rows
        x = self._ended(x, of.norm, None, _End("normed"))
        count = of.q.weight.rows // dim
        h = PatchHeads(count, dim, dim**-0.5, None, None, False, False, kernels.lanes, count)
        of_keys, is_rounded = h.of_keys, rounds(h) and kernels.rounds_attention
        keys, values = (self._source(steps, x, name) for steps, name in ((of.k, "keys"), (of.v, "values")))
        counts = [self._chunks(side)[-1].stop // kernels.lanes for side in (x.side, keys.side)]
        hidden = np.where(np.arange(counts[1] * kernels.lanes) < keys.side**2, 0, HIDDEN)
        dims = (h.heads * dim, dim, h.padded_dim)
        floats, rounded, scales = list[Tensor](), list[Tensor](), list[Tensor]()
        for name, cols, tiles in zip("qkv", dims, (counts[0], *counts[1:] * 2), strict=True):
            rows = tiles * kernels.lanes
            floats.append(kernels.buffer(name, rows * cols))
            rounded.append(kernels.buffer(f"rounded {name}", rows * cols, dtypes.int16))
            scales.append(kernels.buffer(f"scales {name}", rows * (h.heads if name == "q" else 1)))

        def split(
            heads: PatchHeads, which: Which, side: int, sources: Sequence[tuple[_Image, ImageStep]]
        ) -> None:
            made, tiles = (
                range(1) if which == "queries" else range(1, 3),
                kernels.ints(counts[which != "queries"]),
            )
            sequence, width = kernels.sequence(), heads.width * len(sources)
            joined = kernels.chunk(f"joined {which}", width)
            for i, (image, step) in enumerate(sources):
                matrix = kernels.weights.convolution(step)
                kernels.prepare(sequence, matrix, image.rows)
                kernels.product(sequence, step.bias, matrix, joined, i * heads.width, width)
            outs = [floats[i] for i in made]
            self._add(sequence, split_heads(heads, which), *outs, tiles, kernels.state, joined)
            for i in made if is_rounded else ():
                kernel = round_values(heads) if i == 2 else round_queries(heads)
                self._add(sequence, kernel, rounded[i], scales[i], floats[i], tiles, kernels.state)
            self._building.append(_Job(sequence, self._chunks(side)))

        split(h, "queries", x.side, [(x, of.q)])
        split(of_keys, "keys", keys.side, [(keys, of.k[-1]), (values, of.v[-1])])

        def begin(sequence: KernelSequence) -> Rows:
            n_scores, out = kernels.parts * counts[1] * kernels.lanes, kernels.chunk("attended", h.width)
            scratch, inputs = [kernels.buffer("scores", n_scores * kernels.lanes)], floats
            if is_rounded:
                scratch.append(kernels.buffer("weights", n_scores * kernels.lanes, dtypes.int16))
                scratch.append(kernels.buffer("weight scales", n_scores))
                inputs = rounded + scales
            shown = memory.array(hidden, dtypes.float32)
            kernel = attend_rounded(h) if is_rounded else attend(h)
            self._add(sequence, kernel, out, *scratch, *inputs, shown, kernels.ints(*counts), kernels.state)
            return Rows(out, h.heads * dim)

        return self._chain(begin, (of.o,), x.side, _INNER)

    def _source(self, steps: Sequence[ImageStep], x: _Image, name: str) -> _Image:
        """What the last of some steps reads."""
        return self._block(ImageBlock(tuple(steps[:-1])), x, name) if steps[1:] else x

    # --- memory ------------------------------------------------------------------------------------------

    def _image(self, name: str, side: int, channels: int) -> _Image:
        if name == _INNER.name:
            self._inner = 1 - self._inner
            name = f"{name} {self._inner}"
        n = rows_of(side, self._kernels.lanes) * stride_of(channels)
        return _Image(
            self._kernels.buffer(name, max(n, self._largest) if name in _SHARED else n), side, channels
        )

    def _chunks(self, side: int) -> tuple[range, ...]:
        return tuple(chunks_of(side**2, self._kernels.lanes))

    def _shape(self, step: ImageStep, image: _Image) -> Tensor:
        """The shape of a convolution of an image: see `SHAPE`."""
        side, channels = image.side, image.channels
        units = stride_of(channels) // UNIT
        return self._kernels.ints(
            side, -(-side // step.stride), step.stride, room(side, step) // 2, units, channels
        )

    def _add(self, sequence: KernelSequence, kernel: Callable[..., UOp], *buffers: Tensor) -> None:
        sequence.add(kernel, *buffers, parts=self._kernels.parts)


def room(side: int, step: ImageStep) -> int:
    """Places beyond the edges of an image that a convolution reads, of which half come before it."""
    return max((-(-side // step.stride) - 1) * step.stride + step.kernel - side, 0)


def rows_of(side: int, lanes: int) -> int:
    """Rows of an image, with those that fill its last chunk."""
    return max(chunk.stop for chunk in chunks_of(side**2, lanes))


def scratch_elements(net: ConvolutionNet, side: int, lanes: int) -> int:
    """At most what the images of a net take, float32, beside chunks of them."""
    sizes, last = list(_sizes(net, side)), net.last.steps
    attention = [(n, step) for _, n, step in sizes if isinstance(step, ImageAttention)]
    heads = max((rows_of(n, lanes) * stride_of(of.q.weight.rows) for n, of in attention), default=0)
    seen = max((rows_of(n, lanes) * stride_of(of.o.weight.rows) for n, of in attention), default=0)
    (_, first, step), joined = sizes[0], max(n for number, n, _ in sizes if number == net.read[0])
    assert isinstance(step, ImageStep)
    width = sum(stride_of(s.weight.cols) + stride_of(s.weight.rows) for s in last if isinstance(s, ImageStep))
    return (
        len(_SHARED) * largest_image(net, side, lanes)
        + rows_of(first, lanes) * stride_of(step.weight.cols)
        + rows_of(joined, lanes) * width
        + 4 * heads
        + 3 * seen
    )


def largest_image(net: ConvolutionNet, side: int, lanes: int) -> int:
    """Elements of the largest image of those that take turns in memory."""
    return max(
        rows_of(n, lanes) * stride_of(step.weight.rows)
        for _, n, step in _sizes(net, side)
        if isinstance(step, ImageStep)
    )


def _sizes(net: ConvolutionNet, side: int) -> Iterator[tuple[int, int, ImageStep | ImageAttention]]:
    """The steps of all blocks, with their block's number and the side of what they make."""
    for number, block in enumerate(net.blocks):
        for step in block.steps:
            side = -(-side // step.stride) if isinstance(step, ImageStep) else side
            yield number, side, step


def _activation(step: ImageStep) -> Activation | None:
    return "gelu" if step.activates else None
