"""An encoder of pictures on our kernels for NVIDIA GPUs (`engine.description.vision`).

Products are those of prompts, on weights as the file has them; activations between them are float16, and the stream is
float32. All kernels of a picture are made for a size, up to so many patches, of which there are few: so few are
compiled. A part of the work is a graph of the device's.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from engine.description.encoder_input import Floats, Grid, Places, as_read, places_of, position_table
from engine.description.sublayers import Weight
from engine.description.vision import (
    Linear,
    PatchAttention,
    PatchFeedForward,
    QueryAttention,
    Stem,
    VisionSpec,
    WindowQueries,
)
from engine.formats.dequantize import HOST_TYPES
from engine.formats.ggml_types import TYPES
from engine.kernels.compilation import compile_in_turns, compile_once
from engine.kernels.device_memory import to_device, unallocated
from engine.loading.fixed_rows import fixed_rows, host_matrix
from engine.loading.weights import FileWeights
from engine.runtime.pictures import Pixels, Progress, part_by_part
from engine.targets.nvidia.filling import fill, prepare
from engine.targets.nvidia.fixed_queries import FixedQueries
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.pictures.patches import (
    ROWS,
)
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from engine.targets.nvidia.kernels.weights.weight_repacking import MatrixSpec, TensorRows
from engine.targets.nvidia.matrices import Matrix, matrices_of
from engine.targets.nvidia.picture_kernels import Rows, Stacked, limits_of
from engine.targets.nvidia.picture_steps import PictureSteps

_CAPTURED = 2  # sizes whose graphs and memory are kept
_PLACES = 8  # grids whose places are kept
_HALF = 1  # ggml's number of float16
_LEAST_PART = 4
"""Long pictures of fixed queries have a part of a square's patches, this or more of them (`SizeRule`, "mean")."""


def lacks(spec: VisionSpec) -> str:
    """What these kernels do not compute of an encoder, in words; "" if nothing. Their products round to float16, which
    would be less than float32 weights are for."""
    if spec.is_float32:
        return "weights in float32"
    turned = (step.weight for step in spec.projector_steps if isinstance(step, Linear) and step.transposed)
    if any(TYPES[weight.type].name not in HOST_TYPES for weight in turned):
        return "a quantized matrix with a row for each input"
    asking = [step for step in spec.projector_steps if isinstance(step, QueryAttention)]
    if any(TYPES[step.q.weight.type].name not in HOST_TYPES for step in asking):
        return "a quantized matrix of fixed queries"
    if _LEAST_PART * spec.queries > (spec.size.most // spec.patch) ** 2:
        return "more fixed queries than a picture may have patches"
    if spec.stem:
        return "an encoder before the encoder" if isinstance(spec.stem, Stem) else "a net of convolutions"
    if any(isinstance(step, WindowQueries) for step in spec.projector_steps):
        return "queries of windows"
    if spec.pixel_norm:
        return "a norm of pixels"
    attention = [s.operator for s in spec.sublayers if isinstance(s.operator, PatchAttention)]
    if any(a.norms_all_heads for a in attention):
        return "a norm over all heads"
    return "heads of more than 256 elements" if any(a.head_dim > 256 for a in attention) else ""


class _Work:
    """The work on a picture of so many tokens. `done`: parts of it. `result`: its embeddings, float32 (tokens, width),
    once all are."""

    def __init__(self, steps: PictureSteps, tokens: int) -> None:
        self._steps, self._tokens = steps, tokens
        self.done = 0
        self.result: Floats | None = None

    def run(self) -> Floats | None:
        """The result, after the next part if it is not there."""
        if self.result is None:
            self._steps.parts[self.done]()
            self.done += 1
            if self.done == len(self._steps.parts):
                self.result = np.concatenate([self._rows(x) for x in self._steps.results], axis=1)
        return self.result

    def finish(self) -> None:
        while self.run() is None:
            pass

    def _rows(self, x: Rows) -> Floats:
        """What a projector made of the tokens, float32 (tokens, out)."""
        used = x.tensor.uop.base.buffer.view(self._tokens * x.cols, dtypes.float32, 0)
        rows: Floats = used.ensure_allocated().numpy().reshape(self._tokens, x.cols)
        return rows


class NvidiaEncoder:
    """Implements `PictureEncoder`. Holds the weights, quantized as in the file."""

    def __init__(self, weights: FileWeights, spec: VisionSpec) -> None:
        """Raises ModelFileError."""
        self.spec = spec
        self.vectors = {vector: to_device(weights.vector(vector)) for vector in spec.vectors()}
        if spec.positions and spec.summary and (table := position_table(spec, weights.vector)) is not None:
            self.vectors[spec.positions.table] = to_device(table.reshape(-1))
        self._fixed, self.fixed_queries = fixed_rows(weights, spec), FixedQueries.of(weights, spec)
        self.products: dict[tuple[Linear, ...], list[Stacked]] = {}
        for linears in _read_together(spec):
            self.products[linears] = stack(weights, linears)
        self.kernels = [matrices_of([kernel])[0] for kernel in spec.kernels]
        made = [product.matrix for products in self.products.values() for product in products]
        turned = {
            step.weight for step in spec.projector_steps if isinstance(step, Linear) and step.transposed
        }
        to_fill = self.kernels + [matrix for matrix in made if matrix.weights[0] not in turned]
        prepare(to_fill)
        fill(weights, to_fill)
        self.table_rows = spec.positions.table.size // spec.dim if spec.positions else 0
        self._steps: OrderedDict[int, PictureSteps] = OrderedDict()
        self._places: OrderedDict[Grid, Places] = OrderedDict()
        self._work: _Work | None = None  # what is under way

    def encode(self, rgbs: Sequence[Pixels]) -> Generator[Progress, None, Floats]:
        """See `PictureEncoder`."""
        return part_by_part([self._encode(rgb) for rgb in rgbs])

    def _encode(self, rgb: NDArray[np.uint8]) -> Generator[Progress, None, Floats]:
        spec = self.spec
        grid = Grid.of(spec, rgb.shape[1], rgb.shape[0])
        tokens = grid.rows * grid.columns
        size = size_of(spec, tokens * spec.merge**2 + spec.summary_rows)
        if size not in self._steps:
            yield Progress(0, 1, compiles=True)
        steps = self.steps(size)
        for done, total in compile_in_turns(steps.linears):
            yield Progress(done, total, compiles=True)
        if self._work:
            self._work.finish()  # its memory is needed
        steps.begin(rgb, grid, self._places_of(grid))
        work = self._work = _Work(steps, spec.queries or tokens)
        while work.run() is None:
            yield Progress(work.done, len(steps.parts))
        if self._work is work:
            self._work = None
        assert work.result is not None
        return as_read(spec, work.result, grid, self._fixed.__getitem__)

    def preparations(self) -> Sequence[Callable[[], None]]:
        """Large pictures come first: most that people have are."""
        return [functools.partial(self._prepare, size) for size in reversed(sizes_of(self.spec))]

    def _prepare(self, size: int) -> None:
        build = lambda: PictureSteps(self, size, unallocated).linears
        compile_once(("pictures", self.spec, size, chip().rates), build)

    def steps(self, size: int) -> PictureSteps:
        """The kernels for pictures of up to so many patches (`size_of`)."""
        if size not in self._steps:
            while len(self._steps) >= _CAPTURED:
                self._steps.popitem(last=False)
            self._steps[size] = PictureSteps(self, size)
        self._steps.move_to_end(size)
        return self._steps[size]

    def _places_of(self, grid: Grid) -> Places:
        if grid not in self._places:
            while len(self._places) >= _PLACES:
                self._places.popitem(last=False)
            self._places[grid] = places_of(self.spec, grid, self.table_rows)
        self._places.move_to_end(grid)
        return self._places[grid]


def sizes_of(spec: VisionSpec) -> list[int]:
    """The sizes for which there are kernels: patches, ascending."""
    most, size = _rounded(spec.most_patches), 2 * ROWS
    sizes = []
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]


def size_of(spec: VisionSpec, patches: int) -> int:
    """The size of the kernels for a picture: the next of a few."""
    return next((size for size in sizes_of(spec) if patches <= size), _rounded(patches))


def _rounded(patches: int) -> int:
    return -(-patches // ROWS) * ROWS


def stack(weights: FileWeights, linears: Sequence[Linear]) -> list[Stacked]:
    """The products of linears with the same input: queries, keys and values, gate and up, or one alone."""
    products = []
    if len(linears) == 2 and _is_plain(*linears):
        matrices = matrices_of([linear.weight for linear in linears], alternate=True)
        return [Stacked(matrices[0], None, paired=True)]
    for limits, same in groupby(linears, lambda linear: linear.inputs):
        group, clamp = list(same), limits_of([limits])
        if group[0].transposed:
            made = [_turned(weights, linear.weight) for linear in group]
        elif len(linears) == 2:
            made = [matrices_of([linear.weight])[0] for linear in group]
        else:
            made = matrices_of([linear.weight for linear in group])
        products += [Stacked(matrix, clamp) for matrix in made]
    return products


def _is_plain(gate: Linear, up: Linear) -> bool:
    """Whether the two are nothing but products with matrices of the same type."""
    others = (part for linear in (gate, up) for part in (linear.bias, linear.inputs, linear.outputs))
    return gate.weight.type == up.weight.type and not any(others)


def _turned(weights: FileWeights, weight: Weight) -> Matrix:
    """The transpose of a matrix, in float16."""
    values = host_matrix(weights, weight).T.astype(np.float16)
    layout = WeightLayout(_HALF)
    matrix = Matrix([weight], MatrixSpec(layout, (TensorRows(weight.cols),), weight.rows))
    host = Tensor(np.ascontiguousarray(values).view(np.uint8).reshape(-1))
    matrix.planes = [plane.realize() for plane in layout.planes_of(host, weight.cols, weight.rows)]
    return matrix


def _read_together(spec: VisionSpec) -> list[tuple[Linear, ...]]:
    """The linears of an encoder, those of the same input in one."""
    found: list[tuple[Linear, ...]] = []
    for sublayer in spec.sublayers:
        operator = sublayer.operator
        if isinstance(operator, PatchAttention):
            found += [(operator.q, operator.k, operator.v), (operator.o,)]
        else:
            found += [(operator.gate, operator.up) if operator.gate else (operator.up,), (operator.down,)]
    if spec.reduction:
        found += [(spec.reduction.feed_forward.up,), (spec.reduction.feed_forward.down,)]
    for step in spec.projector_steps:
        if isinstance(step, Linear):
            found.append((step,))
        elif isinstance(step, PatchFeedForward):
            found += [(linear,) for linear in (step.gate, step.up, step.down) if linear]
        elif isinstance(step, QueryAttention):
            found += [(linear,) for linear in (step.k, step.v, step.o)]
    return found
