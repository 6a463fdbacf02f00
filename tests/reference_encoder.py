"""A float32 pass over an encoder's description in numpy, to hold its lowerings against.

The gguf package reads the weights. Each patch attends by itself, to those that it is said to see, so that an order of
patches that is wrong shows.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.description.sublayers import Vector, Weight
from engine.description.vision import (
    Activate,
    Activation,
    Affine,
    ConvolutionNet,
    CrossAttention,
    FixedRow,
    ImageAttention,
    ImageBlock,
    ImageStep,
    Linear,
    Merge,
    Neighbours,
    Norm,
    PatchAttention,
    PatchFeedForward,
    ProjectorStep,
    QueryAttention,
    Stem,
    VisionSpec,
    WindowQueries,
)
from engine.description.vision_reader import read_vision
from engine.formats.gguf import GGUF
from tests.reference_weights import Floats, read_tensors


class ReferenceEncoder:
    """The encoder of a file. Its rows are patches as they are read, but that those of a token follow each other."""

    def __init__(self, path: Path) -> None:
        with GGUF(path) as file:
            self.spec: VisionSpec = read_vision(file)
        self._tensors = read_tensors(path)

    def __call__(self, *rgbs: NDArray[np.uint8]) -> Floats:
        """The embeddings of a picture's parts at the encoder's sizes: (tokens, width), with what stands among them."""
        page = -1 if len(rgbs) == 1 else int(self.spec.whole_first)
        return np.concatenate([self._encoded(rgb, i == page) for i, rgb in enumerate(rgbs)])

    def _encoded(self, rgb: NDArray[np.uint8], is_page: bool) -> Floats:
        tiles, side = self.spec.tiles, self.spec.patch * self.spec.merge
        if not is_page or tiles is None or self.spec.page is None:
            return self._with_ends(self._square(rgb), rgb.shape[0] // side)
        lines = []  # those of all tiles that are side by side
        for row in np.split(rgb, len(rgb) // tiles.side):
            side_by_side = np.split(row, row.shape[1] // tiles.side, axis=1)
            n = tiles.side // side
            lines.append(np.concatenate([self._square(tile).reshape(n, n, -1) for tile in side_by_side], 1))
        end = np.tile(self._fixed(self.spec.page), len(self.spec.projectors))
        return np.concatenate([np.concatenate([row, end]) for row in np.concatenate(lines)])

    def _square(self, rgb: NDArray[np.uint8]) -> Floats:
        spec, p, m, k = self.spec, self.spec.patch, self.spec.merge, self.spec.square
        pixels = ((rgb / np.float32(255) - spec.mean) / spec.std).astype(np.float32)
        rows, columns = rgb.shape[0] // p, rgb.shape[1] // p
        self._places = np.array(
            [
                (r * m + i * k + y, c * m + j * k + x)
                for r in range(rows // m)
                for c in range(columns // m)
                for i in range(m // k)
                for j in range(m // k)
                for y in range(k)
                for x in range(k)
            ]
        )
        order = (0, 1, 2) if spec.colours_last else (2, 0, 1)
        patches = [pixels[y * p : (y + 1) * p, x * p : (x + 1) * p].transpose(order) for y, x in self._places]
        x = np.stack(patches).reshape(len(patches), -1)
        x = self._normed(x, spec.pixel_norm) if spec.pixel_norm else x
        stem = self._stem(spec.stem, pixels) if isinstance(spec.stem, Stem) else None
        if isinstance(spec.stem, ConvolutionNet):
            stem = self._net(spec.stem, pixels)
        x = sum(x @ self._matrix(kernel).T for kernel in spec.kernels) if stem is None else stem
        x = x + self._vector(spec.bias) if spec.bias else x
        if spec.summary and spec.positions:
            table, own = (
                self._vector(of).reshape(-1, spec.dim) for of in (spec.positions.table, spec.summary)
            )
            first = spec.positions.of_summary == "first"
            if spec.positions.of_summary != "none":
                own = own + table[0 if first else -1]
            if stem is not None:
                n = math.isqrt(len(table) - 1)
                by = [
                    resizing("smoothed bicubic", n, count)[of]
                    for of, count in zip(self._places.T, (rows, columns), strict=True)
                ]
                added = np.einsum("pi,pj,ijd->pd", *by, table[1:].reshape(n, n, -1)).astype(np.float32)
            else:
                added = table[first:][self._places @ [columns, 1]]
            x = np.concatenate([x + added, own])
            x = self._normed(x, spec.norm) if spec.norm else x
        elif spec.positions and spec.positions.after_norm and spec.norm:
            x = self._normed(x, spec.norm) + self._positions(rows, columns)
        else:
            x = x + self._positions(rows, columns)
            x = self._normed(x, spec.norm) if spec.norm else x
        if spec.own_queries:
            tables = (self._vector(table).reshape(-1, spec.dim) for table in spec.own_queries.tables)
            x = np.concatenate([x, next(table for table in tables if len(table) == len(x))])
        seen = [x]
        for sublayer in spec.sublayers:
            h, operator = self._normed(x, sublayer.norm), sublayer.operator
            y = (
                self._attended(operator, h)
                if isinstance(operator, PatchAttention)
                else self._fed(operator, h)
            )
            x = x + (self._normed(y, sublayer.post_norm) if sublayer.post_norm else y)
            if spec.reduction and len(seen) == spec.reduction.sublayers:
                squares = x.reshape(-1, k * k, spec.dim)
                joined = self._normed(squares.reshape(len(squares), -1), spec.reduction.norm)
                x = squares.mean(1) + self._fed(spec.reduction.feed_forward, joined)
            seen.append(x)
        results = []
        for projector in spec.projectors:
            x = np.concatenate([seen[i] for i in (*projector.earlier, projector.sublayers)], axis=1)
            x = x[: len(x) - spec.summary_rows]
            x = x[len(x) // 2 :] if spec.own_queries else x
            x = np.concatenate([x, stem], axis=1) if stem is not None and projector.reads_stem else x
            for step in projector.steps:
                x = self._step(step, x)
            results.append(x)
        return np.concatenate(results, axis=1)

    def _stem(self, stem: Stem, pixels: Floats) -> Floats:
        p, n = stem.patch, len(pixels) // stem.patch
        squares = pixels.reshape(n, p, n, p, 3).transpose(0, 2, 4, 1, 3).reshape(n * n, -1)
        table, by = (
            self._vector(stem.positions).reshape(stem.side, stem.side, -1),
            resizing("smoothed bicubic", stem.side, n),
        )
        places = np.einsum("pi,qj,ijd->pqd", by, by, table, optimize=True).astype(np.float32)
        x = self._product(stem.kernel, squares) + places.reshape(n * n, -1)
        for sublayer in stem.sublayers:
            h, operator = self._normed(x, sublayer.norm), sublayer.operator
            if isinstance(operator, PatchAttention):
                x = x + self._in_windows(
                    operator, h.reshape(n, n, -1), stem.window if operator.windowed else n
                )
            else:
                x = x + self._fed(operator, h)
        for of in stem.convolutions:
            n, edge, kernels = math.isqrt(len(x)), of.kernel // 2, self._matrix(of.weight)
            room = np.pad(x.reshape(n, n, -1), ((edge, edge), (edge, edge), (0, 0)))
            around = [
                room[i : i + of.kernel, j : j + of.kernel].transpose(2, 0, 1).ravel()
                for i in range(0, n, of.stride)
                for j in range(0, n, of.stride)
            ]
            x = np.stack(around) @ kernels.T
            x = self._normed(x, of.norm) if of.norm else x
        return x

    def _net(self, net: ConvolutionNet, pixels: Floats) -> Floats:
        x, read = pixels, []
        for i, block in enumerate(net.blocks):
            x = self._block(block, x)
            read += [x] if i in net.read else []
        large = [np.kron(of, np.ones((len(read[0]) // len(of),) * 2 + (1,), np.float32)) for of in read]
        x = self._block(net.last, np.concatenate(large, -1))
        k = len(x) // net.side
        means = [
            x[i : i + k, j : j + k].mean((0, 1)) for i in range(0, len(x), k) for j in range(0, len(x), k)
        ]
        return self._normed(np.stack(means), net.norm) if net.norm else np.stack(means)

    def _block(self, block: ImageBlock, x: Floats) -> Floats:
        y = x
        for step in block.steps:
            y = self._convolved(step, y) if isinstance(step, ImageStep) else self._seen(step, y)
        y = y * self._vector(block.scale) if block.scale else y
        return x + y if block.adds else y

    def _convolved(self, of: ImageStep, x: Floats) -> Floats:
        k, count, kernels = of.kernel, -(-len(x) // of.stride), self._matrix(of.weight)
        room = max((count - 1) * of.stride + k - len(x), 0)
        edge = (room // 2, room - room // 2)
        around = np.lib.stride_tricks.sliding_window_view(np.pad(x, (edge, edge, (0, 0))), (k, k), (0, 1))
        around = around[:: of.stride, :: of.stride].reshape(count, count, -1, k * k)
        flat = around.reshape(count, count, -1)
        out = np.einsum("yxck,ck->yxc", around, kernels) if of.deep else flat @ kernels.T
        out = out + self._vector(of.bias) if of.bias else out
        out = self._normed(out, of.norm) if of.norm else out
        return activated(out, "gelu") if of.activates else out

    def _seen(self, of: ImageAttention, x: Floats) -> Floats:
        """Attention of an image's places, head by head."""
        x, made = self._normed(x, of.norm), []
        for steps in ((of.q,), of.k, of.v):
            y = x
            for step in steps:
                y = self._convolved(step, y)
            made.append(y.reshape(-1, y.shape[-1]))
        q, k, v = made
        heads = []
        for own in np.split(q, q.shape[1] // k.shape[1], axis=1):
            shares = np.exp(own @ k.T / math.sqrt(k.shape[1]))
            heads.append(shares / shares.sum(1, keepdims=True) @ v)
        return self._convolved(of.o, np.concatenate(heads, 1).reshape(*x.shape[:2], -1))

    def _asked_by_windows(self, of: WindowQueries, x: Floats) -> Floats:
        """Window by window, in the order of rows at last."""
        x, n, m = self._normed(x, of.norm), self.spec.window, self.spec.merge
        out = np.empty((len(x) // m**2, x.shape[1]), np.float32)
        at = self._places // (n * m)
        for window in np.unique(at, axis=0):
            patches = np.flatnonzero((at == window).all(1))
            within = self._places[patches] % (n * m)
            seen = x[patches] + self._vector(of.places).reshape(-1, x.shape[1])[within @ [n * m, 1]]
            for_each, tokens = [], within // m @ [n, 1]
            for token in range(n * n):
                own = [
                    i for i in np.flatnonzero(tokens == token) if of.patch in (None, within[i] % m @ [m, 1])
                ]
                for_each.append(x[patches][own].mean(0))
            y = np.stack(for_each) + self._vector(of.queries).reshape(n * n, -1)
            y = self._normed(y, of.query_norm)
            y = self._crossed(of.cross, self._crossed(of.own, y, y), seen)
            y = self._normed(y + self._fed(of.feed_forward, y), of.last_norm)
            for token in range(n * n):
                out[patches[np.flatnonzero(tokens == token)[0]] // m**2] = y[token]
        return out

    def _crossed(self, of: CrossAttention, x: Floats, to: Floats) -> Floats:
        q, k, v = (
            self._product(linear, rows).reshape(len(rows), of.heads, -1)
            for linear, rows in ((of.q, x), (of.k, to), (of.v, to))
        )
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(math.sqrt(of.head_dim))
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v).reshape(len(x), -1)
        return self._normed(x + self._product(of.o, y), of.norm)

    def _in_windows(self, a: PatchAttention, x: Floats, size: int) -> Floats:
        """Window by window, each query by itself. What is beyond the picture is zeros."""
        n, count = len(x), -(-len(x) // size)
        whole = np.pad(x, ((0, count * size - n), (0, count * size - n), (0, 0)))
        tables = [self._vector(of).reshape(-1, a.head_dim) for of in (a.by_rows, a.by_columns) if of]
        tables = [(resizing("bilinear", len(of), 2 * size - 1) @ of).astype(np.float32) for of in tables]
        places, out = np.mgrid[:size, :size].reshape(2, -1), np.zeros_like(whole)
        for down, across in np.ndindex(count, count):
            window = slice(down * size, (down + 1) * size), slice(across * size, (across + 1) * size)
            rows = whole[window].reshape(size * size, -1)
            q, k, v = (self._product(of, rows).reshape(len(rows), a.heads, -1) for of in (a.q, a.k, a.v))
            attended = np.empty_like(v)
            for i in range(len(rows)):
                scores = np.einsum("hd,khd->hk", q[i], k) * np.float32(a.scale)
                for table, of in zip(tables, places, strict=True):
                    scores = scores + q[i] @ table[of[i] - of + size - 1].T
                shares = np.exp(scores - scores.max(-1, keepdims=True))
                attended[i] = np.einsum("hk,khd->hd", shares / shares.sum(-1, keepdims=True), v)
            out[window] = self._product(a.o, attended.reshape(len(rows), -1)).reshape(size, size, -1)
        return out[:n, :n].reshape(n * n, -1)

    def _with_ends(self, embeddings: Floats, rows: int) -> Floats:
        if (ends := self.spec.ends) is None or ends.line is None:
            around = [] if ends is None else [ends.begin, ends.end if ends.ended in (0, rows) else None]
            begin, end = ([self._fixed(row)] if row else [] for row in around or (None, None))
            return np.concatenate([*begin, embeddings, *end])
        lines = [np.concatenate([row, self._fixed(ends.line)]) for row in np.split(embeddings, rows)]
        lines = [self._fixed(ends.begin), *lines] if ends.begin else lines
        return np.concatenate([*lines, self._fixed(ends.end)]) if ends.end else np.concatenate(lines)[:-1]

    def _fixed(self, row: FixedRow) -> Floats:
        x = self._vector(row.vector)[None]
        for step in row.steps:
            x = self._step(step, x)
        return x

    def _positions(self, rows: int, columns: int) -> Floats:
        positions = self.spec.positions
        if positions is None:
            return np.float32(0) * self._places[:, :1]
        table = self._vector(positions.table).reshape(-1, self.spec.dim)
        ys, xs = self._places.T
        if positions.how == "nearest":
            side = math.isqrt(len(table))
            return table[ys * side // rows * side + xs * side // columns]
        if positions.how == "patch":
            return table[ys * columns + xs]
        if positions.how == "column and row":
            return table[xs] + table[len(table) // 2 + ys]
        n = math.isqrt(len(table))
        square = table.reshape(n, n, -1)
        if positions.how != "stretched":
            by_row, by_column = (
                resizing(positions.how, n, count, positions.more) for count in (rows, columns)
            )
            return np.einsum("pi,pj,ijd->pd", by_row[ys], by_column[xs], square).astype(np.float32)
        at = [k / max(count - 1, 1) * (n - 1) for k, count in ((ys, rows), (xs, columns))]
        total = np.float32(0)
        for i in range(n):
            for j in range(n):
                share = [np.maximum(1 - np.abs(k - own), 0) for k, own in zip(at, (i, j), strict=True)]
                total = total + (share[0] * share[1])[:, None].astype(np.float32) * square[i, j]
        return total

    def _attended(self, a: PatchAttention, x: Floats) -> Floats:
        def heads(linear: Linear, norm: Norm | None) -> Floats:
            y, size = self._product(linear, x), a.head_dim
            if norm and norm.weight:  # over so many elements
                size = norm.weight.size
            y = y.reshape(len(x), -1, size)
            y = (self._normed(y, norm) if norm else y).reshape(len(x), -1, a.head_dim)
            return y.repeat(a.heads // y.shape[1], axis=1)

        q, k, v = heads(a.q, a.q_norm), heads(a.k, a.k_norm), heads(a.v, a.v_norm)
        if rotations := self.spec.rotations:
            angles = (self._places + rotations.first) @ np.array([rotations.by_row, rotations.by_column])
            angles = np.pad(angles, ((0, len(x) - len(angles)), (0, 0)))
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            q, k = (
                np.concatenate([one * cos - two * sin, two * cos + one * sin], -1).astype(np.float32)
                for one, two in (np.split(of, 2, -1) for of in (q, k))
            )
        if own := self.spec.own_queries:
            turns = np.exp(1j * np.outer(np.arange(len(x)), own.rates))[:, None]
            for of in (q, k):
                one, two = np.split(of, 2, -1)
                turned = (one + 1j * two) * turns
                of[:] = np.concatenate([turned.real, turned.imag], -1)
        result = np.empty_like(v)
        windows = np.zeros((len(x), 2), int)
        if a.windowed:
            windows = self._places // (self.spec.window * self.spec.merge or self.spec.square)
        for i, window in enumerate(windows):
            seen = (windows == window).all(1)
            if own:
                seen = np.arange(len(x)) < max(i + 1, len(x) // 2)
            scores = np.einsum("hd,khd->hk", q[i], k[seen]) * np.float32(a.scale)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            result[i] = np.einsum("hk,khd->hd", shares / shares.sum(-1, keepdims=True), v[seen])
        return self._product(a.o, result.reshape(len(x), -1))

    def _fed(self, of: PatchFeedForward, x: Floats) -> Floats:
        up = self._product(of.up, x)
        hidden = (
            activated(self._product(of.gate, x), of.activation) * up
            if of.gate
            else activated(up, of.activation)
        )
        return self._product(of.down, hidden)

    def _step(self, step: ProjectorStep, x: Floats) -> Floats:
        match step:
            case Norm():
                return self._normed(x, step)
            case Linear():
                return self._product(step, x)
            case PatchFeedForward():
                return self._fed(step, x)
            case Activate(activation=activation):
                return activated(x, activation)
            case Neighbours():
                return self._around(step, x)
            case QueryAttention():
                return self._queried(step, x)
            case WindowQueries():
                return self._asked_by_windows(step, x)
            case Affine(factor=factor, minus=minus, times=times):
                x = x * np.float32(factor)
                x = x - self._vector(minus) if minus else x
                return x * self._vector(times) if times else x
            case Merge(how=how):
                x = x.reshape(-1, self.spec.last_merge**2, self.spec.dim)
                if how == "mean":
                    return x.mean(1)
                return (x.transpose(0, 2, 1) if how == "channels" else x).reshape(len(x), -1)

    def _around(self, of: Neighbours, x: Floats) -> Floats:
        """Each place looks for its neighbours."""
        places = self._places
        if of.side < self.spec.merge:  # what a convolution left, row by row
            k = self.spec.merge // of.side
            places = np.unique(self._places // k, axis=0)
        at = {(y, x): i for i, (y, x) in enumerate(places.tolist())}
        rows = []
        for y, c in sorted(place for place in at if not any(n % of.stride for n in place)):
            ks = [n - of.kernel // 2 for n in range(of.kernel)]
            near = [at.get((y + i, c + j)) for i in ks for j in ks]
            rows.append(np.stack([np.zeros_like(x[0]) if i is None else x[i] for i in near], 1).ravel())
        return np.stack(rows)

    def _queried(self, of: QueryAttention, x: Floats) -> Floats:
        """Attention of fixed queries: the first half of a key's waves is of its column, the second of its row."""
        queries = self._normed(self._vector(of.queries).reshape(of.count, -1), of.norm)
        rates = 10000.0 ** -(np.arange(x.shape[1] // 4) / (x.shape[1] // 4))
        at = np.array([[*np.sin(c * rates), *np.cos(c * rates), *np.sin(r * rates), *np.cos(r * rates)]
                       for r, c in self._places], np.float32)  # fmt: skip
        q, k, v = (self._product(linear, of) for linear, of in ((of.q, queries), (of.k, x + at), (of.v, x)))
        out = np.empty_like(q)
        for first in range(0, q.shape[1], of.head_dim):
            head = slice(first, first + of.head_dim)
            shares = np.exp(q[:, head] @ k[:, head].T / math.sqrt(of.head_dim))
            out[:, head] = shares / shares.sum(1, keepdims=True) @ v[:, head]
        return self._product(of.o, out)

    def _product(self, linear: Linear, x: Floats) -> Floats:
        x = np.clip(x, *np.float32(linear.inputs)) if linear.inputs else x
        matrix = self._matrix(linear.weight)
        y = x @ (matrix if linear.transposed else matrix.T)
        y = y + self._vector(linear.bias) if linear.bias else y
        return np.clip(y, *np.float32(linear.outputs)) if linear.outputs else y

    def _normed(self, x: Floats, norm: Norm) -> Floats:
        x = x - x.mean(-1, keepdims=True) if norm.centred else x
        if norm.eps is not None:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(norm.eps))
        x = x * self._vector(norm.weight) if norm.weight else x
        return x + self._vector(norm.bias) if norm.bias else x

    def _matrix(self, weight: Weight) -> Floats:
        tensor = self._tensors[weight.tensor].reshape(-1, weight.cols)
        rows = tensor[weight.first : weight.first + weight.rows]
        return weight.order.apply(rows) if weight.order else rows

    def _vector(self, vector: Vector) -> Floats:
        values = self._tensors[vector.tensor].reshape(-1)[vector.first : vector.first + vector.size]
        return vector.order.apply(values) if vector.order else values


def activated(x: Floats, activation: Activation) -> Floats:
    if activation == "exact gelu":
        return (x * np.float32(0.5) * (1 + np.vectorize(math.erf)(x * 0.5**0.5))).astype(np.float32)
    if activation == "relu2":
        return np.maximum(x, 0) ** 2
    factor = {"silu": 1.0, "quick gelu": 1.702}.get(activation)
    y = x * factor if factor else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return (x / (1 + np.exp(-y))).astype(np.float32)


def resizing(how: str, n: int, count: int, more: float = 0.0) -> NDArray[np.float64]:
    """What each of `count` places takes of each of `n` pixels, which are repeated beyond the edges, but not where the
    filter is smoothed. `more`: see `Positions`."""
    shares = np.zeros((count, n))
    is_smoothed = "smoothed" in how
    a, width = (-0.5, max(n / count, 1)) if is_smoothed else (-0.75, 1)
    for i in range(count):
        centre = (i + 0.5) * n / (count + more) - 0.5
        for k in range(-3 * n - 3, 4 * n + 3):
            d = abs(k - centre) / width
            if "bicubic" in how:
                near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * (d**3 - 5 * d**2 + 8 * d - 4)
                share = near if d <= 1 else far if d < 2 else 0
            else:
                share = max(1 - d, 0)
            if not (is_smoothed or how == "faded") or 0 <= k < n:
                shares[i, min(max(k, 0), n - 1)] += share
    return shares if how == "faded" else shares / shares.sum(1, keepdims=True)
