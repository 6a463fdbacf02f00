"""An encoder of pictures as tensor graphs (`engine.description.vision`): every device that tinygrad supports.

A picture's patches fill a step of some more, one of few sizes, so that the steps are captured once. What fills it is
hidden from attention. A sublayer is a captured step of its own: other work can be done between two of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit, dtypes

from engine.description.encoder_input import (
    Grid,
    as_page,
    encoder_input,
    queries_of,
    row_by_row,
    waves,
    with_ends,
)
from engine.description.vision import (
    ConvolutionNet,
    Neighbours,
    PatchAttention,
    PatchSublayer,
    Projector,
    QueryAttention,
    VisionSpec,
    WindowQueries,
)
from engine.errors import PreemptedError
from engine.loading.fixed_rows import fixed_rows
from engine.loading.weights import FileWeights
from engine.runtime.pictures import Pixels, Progress, part_by_part
from engine.targets.graph.convolution_net import NetSteps
from engine.targets.graph.parts import load_matrix
from engine.targets.graph.picture_parts import Parameters, Parts, limits_of, shape_of
from engine.targets.graph.stem import StemSteps

_CAPTURED = 4  # sizes whose captured steps are kept
Floats = NDArray[np.float32]


class GraphEncoder:
    """Holds the weights, quantized as in the file. Activations are float32, and products of GPUs have float16 inputs,
    unless the weights are float32. Sublayers of the same shape share a captured step, which gets their weights."""

    def __init__(self, weights: FileWeights, spec: VisionSpec) -> None:
        """Raises ModelFileError."""
        self.spec = spec
        matrices = {weight: load_matrix(weights, weight) for weight in spec.weights()}
        self._host = {vector: weights.vector(vector) for vector in spec.vectors()}
        self._fixed = fixed_rows(weights, spec)
        on_host = {
            spec.summary,
            spec.positions and spec.positions.table,
            *(spec.own_queries.tables if spec.own_queries else ()),
            *(row.vector for row in self._fixed),
        }
        vectors = {v: Tensor(data).realize() for v, data in self._host.items() if v not in on_host}
        self._limits = {
            key: Tensor(np.array(limits, np.float32)).realize()
            for key, limits in limits_of((spec.sublayers, spec.reduction, spec.projector_steps))
        }
        self._is_gpu, self._is_used = not Device.DEFAULT.startswith("CPU"), False
        self._input = dtypes.float16 if self._is_gpu and not spec.is_float32 else dtypes.float32
        self._all = Parameters(matrices, vectors, self._limits)
        self._steps: OrderedDict[int, dict[Hashable, Callable[..., Tensor]]] = OrderedDict()
        self._before: StemSteps | NetSteps | None = None
        if isinstance(spec.stem, ConvolutionNet):
            self._before = NetSteps(spec.stem, self._all, self._input)
        elif spec.stem:
            self._before = StemSteps(spec.stem, spec.patch, self._all, self._input, self._host.__getitem__)

    def encode(self, rgbs: Sequence[Pixels]) -> Generator[Progress, None, Floats]:
        """See `PictureEncoder`."""
        self._is_used = True
        page = int(self.spec.whole_first) if self.spec.page and len(rgbs) > 1 else None
        works = [self._page(rgb) if i == page else self._encode(rgb) for i, rgb in enumerate(rgbs)]
        return part_by_part(works)

    def _page(self, rgb: NDArray[np.uint8]) -> Generator[Progress, None, Floats]:
        """All tiles of a picture, whose embeddings are read as one grid."""
        spec = self.spec
        assert spec.tiles and spec.page
        side = spec.tiles.side
        rows, columns = rgb.shape[0] // side, rgb.shape[1] // side
        tiles = rgb.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
        made = yield from part_by_part([self._embeddings(tile) for tile in tiles])
        return as_page(np.split(made, len(tiles)), rows, columns, self._fixed[spec.page])

    def _encode(self, rgb: NDArray[np.uint8]) -> Generator[Progress, None, Floats]:
        grid = Grid.of(self.spec, rgb.shape[1], rgb.shape[0])
        embeddings = yield from self._embeddings(rgb)
        return with_ends(self.spec, embeddings, grid, self._fixed.__getitem__)

    def _embeddings(self, rgb: NDArray[np.uint8]) -> Generator[Progress, None, Floats]:
        """The embeddings of the tokens of a picture, or of one tile, (tokens, width), row by row."""
        spec = self.spec
        grid = Grid.of(spec, rgb.shape[1], rgb.shape[0])
        of = encoder_input(spec, rgb, self._host.__getitem__)
        n = first_read = len(of.patches)
        queries, cos, sin, mask = None, of.cos, of.sin, None
        if spec.own_queries:
            queries, cos, sin, mask = queries_of(spec.own_queries, spec.dim, n, self._host.__getitem__)
            n *= 2
        before = self._before.count if self._before else 0
        total = before + len(spec.sublayers) + 1
        of_windows = any(isinstance(step, WindowQueries) for step in spec.projector_steps)
        size = _size_of(n, (spec.merge * spec.window if of_windows else spec.merge) ** 2)
        others = [_filled(a, size) for a in (cos, sin) if a is not None]
        hidden = _hidden(n, size, mask)
        others.append(hidden)
        if of.windows is not None:
            others.append(Tensor(np.pad(of.windows[:, 0], (0, size - n), "edge")).realize())
        if self._before:
            patches = yield from self._before.run(grid.rows, of.patches, total, self._captured)
            patches = patches.cat(Tensor(queries)) if queries is not None else patches
            stem = patches.pad(((0, size - patches.shape[0]), (0, 0))).contiguous().realize()
            of_stem, first = [stem], [stem]
        else:
            of_stem, first = [], [_filled(of.patches, size)]
        first += [_filled(of.added, size)] if of.added is not None else []
        is_embedded = not isinstance(spec.stem, ConvolutionNet) and not spec.own_queries
        x = self._captured(size, "embed", self._embed)(*first) if is_embedded else first[0]
        tokens, parts = spec.queries or grid.rows * grid.columns, dict[Projector, Floats]()
        of_keys = [hidden, _filled(waves(grid, spec.out), size)] if spec.queries else []
        earlier = dict[int, Tensor]()
        for done, sublayer in enumerate((None, *spec.sublayers)):
            if sublayer:
                yield Progress(before + done, total)
                shape = shape_of(sublayer)
                step = self._captured(size, shape, partial(self._sublayer, sublayer, len(others)))
                x = step(x, *others, *self._all.of(sublayer))
            if spec.reduction and done == spec.reduction.sublayers:
                x = self._captured(size, "reduce", self._reduce)(x)
                n, size = n // spec.square**2, size // spec.square**2
                others = [_hidden(n, size), Tensor(np.arange(size)).realize()]
            if any(done in projector.earlier for projector in spec.projectors):
                earlier[done] = x.clone().realize()  # the next step of this shape writes there
            for projector in spec.projectors_after(done):
                others_of = [
                    *(earlier[i] for i in projector.earlier),
                    *(of_stem if projector.reads_stem else []),
                    *of_keys,
                ]
                run = partial(self._project, projector, len(others_of), grid)
                is_of_grid = any(isinstance(step, Neighbours) for step in projector.steps)
                key = grid if is_of_grid else None, shape_of(replace(projector, sublayers=0))
                project = self._captured(size, key, run)
                made = project(x, *others_of, *self._all.of(projector)).numpy()
                parts[projector] = made[first_read:][:tokens] if spec.own_queries else made[:tokens]
        joined = np.concatenate([parts[projector] for projector in spec.projectors], axis=1)
        return row_by_row(spec, joined, grid)

    def preparations(self) -> Sequence[Callable[[], None]]:
        """On a GPU, if all pictures have one size, the parts of a blank one, until there is a picture: steps write into
        the same memory for all. Else none: steps are compiled when a picture needs them."""
        size, before = self.spec.size, self._before.count if self._before else 0
        if size.how != "square" or not self._is_gpu:
            return ()
        blank = np.zeros((size.most, size.most, 3), np.uint8)
        work = self._encode(blank)

        def go_on() -> None:
            nonlocal work
            if self._is_used:
                return
            try:
                next(work, None)
            except PreemptedError:
                work = self._encode(blank)
                raise

        return [go_on] * (before + len(self.spec.sublayers) + 2)

    def _captured(self, size: int, key: Hashable, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A step for so many patches; below 0 those before the encoder for so many rows."""
        steps = self._steps.setdefault(size, {})
        self._steps.move_to_end(size)
        while len(self._steps) > _CAPTURED:
            self._steps.popitem(last=False)
        if key not in steps:
            jit = TinyJit(run)
            jit.cnt = 1  # capture at the first call, not at the second
            steps[key] = cast(Callable[..., Tensor], jit)
        return steps[key]

    # --- steps: activations are float32 (patches, dim) ---------------------------------------------------

    def _embed(self, patches: Tensor, added: Tensor | None = None) -> Tensor:
        spec, parts = self.spec, Parts(self._all, self._input)
        x = patches
        if spec.kernels:
            first, *more = (parts.product(kernel, patches) for kernel in spec.kernels)
            x = sum(more, start=first)
        if spec.bias:
            x = x + self._all.vectors[spec.bias]
        is_later = spec.positions is not None and spec.positions.after_norm
        if added is not None and not is_later:
            x = x + added
        x = parts.norm(x, spec.norm) if spec.norm else x
        if added is not None and is_later:
            x = x + added
        return x.contiguous().realize()

    def _reduce(self, x: Tensor) -> Tensor:
        assert self.spec.reduction
        return Parts(self._all, self._input).reduced(self.spec.reduction, x).realize()

    def _sublayer(self, sublayer: PatchSublayer, n_others: int, x: Tensor, *inputs: Tensor) -> Tensor:
        """`inputs`: what all sublayers read, and the weights of the one that is computed in the shape of this."""
        others, own = inputs[:n_others], inputs[n_others:]
        parts, operator = Parts(self._all.replaced(sublayer, own), self._input), sublayer.operator
        h = parts.norm(x, sublayer.norm)
        if isinstance(operator, PatchAttention):
            *turns, hidden = others[:-1] if self.spec.has_windows else others
            y = parts.attention(operator, h, turns, hidden, others[-1] if operator.windowed else None)
        else:
            y = parts.feed_forward(operator, h)
        y = parts.norm(y, sublayer.post_norm) if sublayer.post_norm else y
        return (x + y).contiguous().realize()

    def _project(self, projector: Projector, n_others: int, grid: Grid, x: Tensor, *inputs: Tensor) -> Tensor:
        """`inputs`: x after earlier sublayers; what the stem made; for fixed queries, what is added to the scores of
        patches, and the waves of their places; and the weights of the projector that is computed in the shape of this
        one."""
        others, own = inputs[:n_others], inputs[n_others:]
        parts, count = Parts(self._all.replaced(projector, own), self._input), len(projector.earlier)
        earlier, of_stem, of_keys = others[:count], others[count:][: projector.reads_stem], others[count:]
        together = [*earlier, x, *of_stem]
        x = together[0].cat(*together[1:], dim=-1) if len(together) > 1 else x
        for step in projector.steps:
            if isinstance(step, QueryAttention):
                x = parts.queried(step, x, *of_keys)
            elif isinstance(step, WindowQueries):
                x = parts.asked_by_windows(step, x, self.spec)
            else:
                x = parts.projected(step, x, self.spec, grid)
        return x.contiguous().realize()


def _size_of(n: int, multiple: int) -> int:
    """The patches of the step for n: at most an eighth more, and whole tokens."""
    unit = max(64, 1 << max(0, n.bit_length() - 4))
    while unit % multiple and multiple % unit:  # a mean of 3 x 3 patches
        unit *= multiple
    return -(-n // unit) * unit


def _filled(a: Floats, size: int) -> Tensor:
    return Tensor(np.pad(a, ((0, size - len(a)), (0, 0)))).realize()


def _hidden(n: int, size: int, mask: Floats | None = None) -> Tensor:
    """What is added to scores of `size` keys, of which there are n: 0 or -inf, (size,). With a `mask` of all (n, n)
    scores, (size, size)."""
    hidden = np.where(np.arange(size) < n, 0, -np.inf).astype(np.float32)
    if mask is not None:
        hidden = np.tile(hidden, (size, 1))
        hidden[:n, :n] = mask
    return Tensor(hidden).realize()
