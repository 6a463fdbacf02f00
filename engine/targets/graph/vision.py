"""An encoder of pictures as tensor graphs (`engine.description.vision`): every device that tinygrad supports.

A picture's patches fill a step of some more, one of few sizes, so that the steps are captured once. What fills it is
hidden from attention. A sublayer is a captured step of its own: other work can be done between two of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit, dtypes

from engine.description.encoder_input import Grid, as_read, encoder_input, waves
from engine.description.stem_size import stem_of
from engine.description.sublayers import Vector, Weight
from engine.description.vision import (
    Limits,
    Linear,
    PatchAttention,
    PatchSublayer,
    Projector,
    QueryAttention,
    Stem,
    VisionSpec,
)
from engine.loading.fixed_rows import fixed_rows
from engine.loading.weights import FileWeights
from engine.runtime.pictures import Pixels, Progress, part_by_part
from engine.targets.graph.parts import load_matrix
from engine.targets.graph.picture_parts import Parameters, Parts, limits_of
from engine.targets.graph.stem import convolved, stem_input, stem_sublayer

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
            *(row.vector for row in self._fixed),
        }
        vectors = {v: Tensor(data).realize() for v, data in self._host.items() if v not in on_host}
        self._limits = {
            key: Tensor(np.array(limits, np.float32)).realize()
            for key, limits in limits_of((spec.sublayers, spec.reduction, spec.projector_steps))
        }
        is_gpu = not Device.DEFAULT.startswith("CPU")
        self._input = dtypes.float16 if is_gpu and not spec.is_float32 else dtypes.float32
        self._all = Parameters(matrices, vectors, self._limits)
        self._steps: OrderedDict[int, dict[PatchSublayer | Projector | str, Callable[..., Tensor]]] = (
            OrderedDict()
        )
        self._stems: dict[int, Stem] = {}

    def encode(self, rgbs: Sequence[Pixels]) -> Generator[Progress, None, Floats]:
        """See `PictureEncoder`."""
        return part_by_part(rgbs, self._encode)

    def _encode(self, rgb: NDArray[np.uint8]) -> Generator[Progress, None, Floats]:
        spec = self.spec
        grid = Grid.of(spec, rgb.shape[1], rgb.shape[0])
        if spec.tiles and grid.is_tiled(spec):
            side = spec.tiles.side
            rows, columns = rgb.shape[0] // side, rgb.shape[1] // side
            tiles = (
                rgb.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
            )
            made = yield from part_by_part(tuple(tiles), self._embeddings)
            n = side // spec.patch
            squares = made.reshape(rows, columns, n, n, -1).transpose(0, 2, 1, 3, 4)
            embeddings = squares.reshape(grid.rows * grid.columns, -1)
        else:
            embeddings = yield from self._embeddings(rgb)
        return as_read(spec, embeddings, grid, self._fixed.__getitem__)

    def _embeddings(self, rgb: NDArray[np.uint8]) -> Generator[Progress, None, Floats]:
        """Those of the tokens of a picture, or of one tile, (tokens, width)."""
        spec = self.spec
        grid = Grid.of(spec, rgb.shape[1], rgb.shape[0])
        of = encoder_input(spec, rgb, self._host.__getitem__)
        n = len(of.patches)
        before = len(spec.stem.sublayers) if spec.stem else 0
        total = before + len(spec.sublayers) + 1
        size = _size_of(n, spec.merge**2)
        others = [_filled(a, size) for a in (of.cos, of.sin) if a is not None]
        hidden = np.where(np.arange(size) < n, 0, -np.inf).astype(np.float32)
        others.append(Tensor(hidden).realize())
        if of.windows is not None:
            others.append(Tensor(np.pad(of.windows[:, 0], (0, size - n), "edge")).realize())
        if spec.stem:
            patches = yield from self._after_stem(grid.rows, of.patches, total)
            stem = patches.pad(((0, size - patches.shape[0]), (0, 0))).contiguous().realize()
            of_stem, first = [stem], [stem]
        else:
            of_stem, first = [], [_filled(of.patches, size)]
        first += [_filled(of.added, size)] if of.added is not None else []
        x = self._captured(size, "embed", self._embed)(*first)
        tokens, parts = spec.queries or grid.rows * grid.columns, dict[Projector, Floats]()
        of_keys = [Tensor(hidden).realize(), _filled(waves(grid, spec.out), size)] if spec.queries else []
        earlier = dict[int, Tensor]()
        for done, sublayer in enumerate((None, *spec.sublayers)):
            if sublayer:
                yield Progress(before + done, total)
                shape = _without_layer(sublayer)
                step = self._captured(size, shape, partial(self._sublayer, sublayer, len(others)))
                x = step(x, *others, *self._all.of(sublayer))
            if spec.reduction and done == spec.reduction.sublayers:
                x = self._captured(size, "reduce", self._reduce)(x)
                n, size = n // spec.square**2, size // spec.square**2
                hidden = np.where(np.arange(size) < n, 0, -np.inf).astype(np.float32)
                others = [Tensor(hidden).realize(), Tensor(np.arange(size)).realize()]
            if any(done in projector.earlier for projector in spec.projectors):
                earlier[done] = x.clone().realize()  # the next step of this shape writes there
            for projector in spec.projectors_after(done):
                project = self._captured(size, projector, partial(self._project, projector))
                others_of = [*(earlier[i] for i in projector.earlier), *of_stem, *of_keys]
                parts[projector] = project(x, *others_of).numpy()[:tokens]
        return np.concatenate([parts[projector] for projector in spec.projectors], axis=1)

    def _after_stem(self, rows: int, patches: Floats, total: int) -> Generator[Progress, None, Tensor]:
        """What the encoder's stem makes of so many rows and columns of patches, those of its summary left out: (tokens,
        dim)."""
        spec, parts = self.spec, Parts(self._all, self._input)
        stem, size = self._stem_of(rows), -rows
        begin = self._captured(size, "begin", lambda x: stem_input(parts, stem, x, spec.patch))
        x = begin(Tensor(np.ascontiguousarray(patches[: rows * rows])).realize())
        for done, sublayer in enumerate(stem.sublayers):
            yield Progress(done, total)

            def run(x: Tensor, *own: Tensor, of: PatchSublayer = sublayer) -> Tensor:
                return stem_sublayer(Parts(self._all.replaced(of, own), self._input), stem, of, x)

            step = self._captured(size, _without_layer(sublayer), run)
            x = step(x, *self._all.of(sublayer))
        end = self._captured(size, "end", lambda x: convolved(parts, stem, x))
        return end(x)

    def _stem_of(self, rows: int) -> Stem:
        """The stem for so many rows and columns of the encoder's patches."""
        if rows not in self._stems:
            assert self.spec.stem
            side = rows * self.spec.patch // self.spec.stem.patch
            self._stems[rows], made = stem_of(self.spec.stem, side, self._host.__getitem__)
            self._all.vectors.update({vector: Tensor(data).realize() for vector, data in made.items()})
        return self._stems[rows]

    def preparations(self) -> Sequence[Callable[[], None]]:
        """None: steps are compiled when a picture needs them."""
        return ()

    def _captured(
        self, size: int, key: PatchSublayer | Projector | str, run: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """A step for so many patches; below 0 those of the stem for so many rows."""
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

    def _project(self, projector: Projector, x: Tensor, *others: Tensor) -> Tensor:
        """`others`: x after earlier sublayers; what the stem made; for fixed queries, what is added to the scores of
        patches, and the waves of their places."""
        parts, count = Parts(self._all, self._input), len(projector.earlier)
        earlier, of_stem, of_keys = others[:count], others[count:][: projector.reads_stem], others[count:]
        together = [*earlier, x, *of_stem]
        x = together[0].cat(*together[1:], dim=-1) if len(together) > 1 else x
        for step in projector.steps:
            if isinstance(step, QueryAttention):
                x = parts.queried(step, x, *of_keys)
            else:
                x = parts.projected(step, x, self.spec)
        return x.contiguous().realize()


def _without_layer(sublayer: PatchSublayer) -> PatchSublayer:
    """What sublayers of the same shape share: without the names of their tensors, and the limits of products."""
    return cast(PatchSublayer, _renamed(sublayer))


def _renamed(value: Any) -> Any:
    if isinstance(value, Weight | Vector):
        return replace(value, tensor=value.tensor.split(".", 3)[-1])
    if isinstance(value, Linear):
        own = {name: _renamed(getattr(value, name)) for name in ("weight", "bias")}
        for end in ("inputs", "outputs"):
            own[end] = getattr(value, end) and Limits(0, 0)
        return replace(value, **own)
    if is_dataclass(value):
        return replace(value, **{f.name: _renamed(getattr(value, f.name)) for f in fields(value)})  # type: ignore[type-var]
    return value


def _size_of(n: int, multiple: int) -> int:
    """The patches of the step for n: at most an eighth more, and whole tokens."""
    unit = max(64, 1 << max(0, n.bit_length() - 4))
    while unit % multiple and multiple % unit:  # a mean of 3 x 3 patches
        unit *= multiple
    return -(-n // unit) * unit


def _filled(a: Floats, size: int) -> Tensor:
    return Tensor(np.pad(a, ((0, size - len(a)), (0, 0)))).realize()
