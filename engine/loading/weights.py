"""The weights of a model file: the bytes of its matrices and the floats of its vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.description.checked_file import MOST
from engine.description.spec import ModelSpec
from engine.description.sublayers import Vector, Weight
from engine.errors import ModelFileError
from engine.formats.dequantize import dequantized, encoded_floats
from engine.formats.ggml_types import GGML_TYPES, TYPES
from engine.formats.gguf import GGUF, TensorInfo, damaged, printable
from engine.formats.quantization import FLOATS, FORMATS, READ_TYPES, WIDER
from engine.formats.widening import file_bytes, step_bytes, widened
from engine.loading import PIECE_BYTES


def pieces(weight: Weight, multiple: int = 1, side_by_side: int = 1) -> list[range]:
    """The rows of a matrix, those of all its experts, in pieces that are repacked one after the other: whole heads if
    these are reordered, and a multiple of `multiple` rows except the last. If possible they are of the same length, so
    that they share kernels. `side_by_side`: so many such matrices are repacked together."""
    rows, multiple = (
        weight.experts * weight.rows,
        math.lcm(multiple, weight.order.head_dim if weight.order else 1),
    )
    row_bytes = max(weight.row_bytes, weight.cols)  # repacking takes up to a byte for an element
    most = max(PIECE_BYTES // (side_by_side * row_bytes * multiple), 1) * multiple
    fewest = -(-rows // most)
    even = (rows // n for n in range(fewest, 2 * fewest) if not rows % n)
    length = next((n for n in even if not n % multiple or n == rows), most)
    return [range(first, min(first + length, rows)) for first in range(0, rows, length)]


def _place(weight: Weight, row: int) -> int:
    """Which row of its tensor a row of a matrix is."""
    if weight.every:
        row = row // weight.run * weight.every + row % weight.run
    return weight.first + row


_SAMPLE_BYTES = 4096
_LARGEST_HALF = float(np.finfo(np.float16).max)


def blank_end(file: GGUF, spec: ModelSpec) -> str:
    """A sentence if the matrix that comes last in a file looks like nothing but zeros; "" if not. Many programs give a
    file its whole size before they have downloaded it. It may also be made so, to test with, so it is not refused."""
    last = max((file.tensors[weight.tensor] for weight in spec.weights()), key=TensorInfo.place)
    places = 0, last.n_bytes // 2, max(0, last.n_bytes - _SAMPLE_BYTES)
    if any(last.part(place, min(_SAMPLE_BYTES, last.n_bytes - place)).any() for place in places):
        return ""
    return "The file ends with zeros, as an unfinished download does. If the answers are noise, download it again."


class FileWeights:
    """Reads matrices and vectors from a file, and reports the number of bytes done so far with every piece."""

    def __init__(
        self, file: GGUF, matrices: Iterable[Weight], report: Callable[[int], None], keep_cached: bool = True
    ) -> None:
        """`keep_cached`: see `TensorInfo.release`. Raises ModelFileError if one of the `matrices` is of a type that the
        engine does not run."""
        self.file = file
        self._report, self._bytes_done, self._keep_cached = report, 0, keep_cached
        for weight in matrices:
            if weight.type not in FORMATS and weight.type not in FLOATS:
                types = ", ".join(GGML_TYPES[n].name for n in READ_TYPES)
                raise ModelFileError(
                    f"{printable(file.path.name)} holds {weight.tensor} as "
                    f"{file.tensors[weight.tensor].type_name}, which orin-chat does not run.",
                    f"Choose a file with other quantization types: {types}.",
                )

    def read(self, weight: Weight, rows: range) -> NDArray[np.uint8]:
        """The bytes of a matrix's rows, uint8 (len(rows) * weight.row_bytes,), not copied if they lie one after the
        other in the file and are read as they are."""
        if weight.blank:
            return np.zeros(self.n_bytes(weight, rows), np.uint8)
        if weight.transposed:
            return self._transposed(weight, rows)
        data = self._read(self.file.tensors[weight.tensor], *self._extent(weight, rows))
        if weight.of_cols:
            start = weight.row_start
            data = data.reshape(-1, weight.tensor_row_bytes)[:, start : start + weight.row_bytes].reshape(-1)
        if weight.every:
            places = [_place(weight, row) - _place(weight, rows.start) for row in rows]
            data = data.reshape(-1, weight.row_bytes)[places].reshape(-1)
        return self._scaled(weight, rows, data) if weight.scale else data

    def n_bytes(self, weight: Weight, rows: range) -> int:
        """Bytes of a matrix's rows."""
        return len(rows) * weight.row_bytes

    def read_into(self, weight: Weight, rows: range, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a matrix's rows, from the byte `start` on. Any thread may call it.
        Raises ModelFileError."""
        if weight.transposed or weight.scale or weight.blank:
            first, end = start // weight.row_bytes, -(-(start + len(out)) // weight.row_bytes)
            data = self.read(weight, rows[first:end]).data
            out[:] = data[start - first * weight.row_bytes :][: len(out)]
            return
        done = 0
        while done < len(out):  # rows that lie one after the other at once
            row, byte = divmod(start + done, weight.row_bytes)
            row += rows.start
            end = min(rows.stop, (row // weight.run + 1) * weight.run if weight.every else rows.stop)
            end = row + 1 if weight.of_cols else end
            part = out[done:][: (end - row) * weight.row_bytes - byte]
            place = _place(weight, row) * weight.tensor_row_bytes + weight.row_start + byte
            self._read_into(self.file.tensors[weight.tensor], place, part)
            done += len(part)

    def mapped(self, weight: Weight) -> NDArray[np.uint8]:
        """The rows of a matrix that stays in the file, (rows, bytes of a row), of which the system keeps in memory what
        is read; one that is widened is in memory. It is reported as done."""
        self._bytes_done += weight.n_bytes
        self._report(self._bytes_done)
        info = self.file.tensors[weight.tensor]
        data = widened(info.type, info.data)
        data = self._scaled(weight, range(weight.rows), data) if weight.scale else data
        return data.reshape(weight.rows, weight.row_bytes)

    def release(self, weight: Weight, rows: range) -> None:
        """Removes these rows' pages of the file from memory, and reports them as done."""
        if not weight.transposed:  # whose tensor holds others too
            info = self.file.tensors[weight.tensor]
            start, n_bytes = (file_bytes(info.type, n) for n in self._extent(weight, rows))
            info.release(start, n_bytes, self._keep_cached)
        self._bytes_done += len(rows) * weight.row_bytes
        self._report(self._bytes_done)

    def _transposed(self, weight: Weight, rows: range) -> NDArray[np.uint8]:
        """As `read`, of a matrix that is the transpose of what the file holds."""
        info, parts = self.file.tensors[weight.tensor], []
        row_bytes = info.n_bytes // info.shape[0]
        for expert in range(rows.start // weight.rows, (rows.stop - 1) // weight.rows + 1):
            place = (weight.first + expert * weight.every) * row_bytes
            raw = info.part(place, weight.cols * row_bytes).reshape(weight.cols, -1)
            matrix = dequantized(raw, info.type).T
            before = expert * weight.rows
            parts.append(matrix[max(rows.start - before, 0) : rows.stop - before])
        floats = np.float32 if TYPES[weight.type].name == "F32" else np.float16
        return np.concatenate(parts).astype(floats, order="C").view(np.uint8).reshape(-1)

    def _scaled(self, weight: Weight, rows: range, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The bytes of a matrix's rows times its scale, which d and m of each block are multiplied by."""
        scales = self.vector(Vector(weight.scale, weight.experts))[np.array(rows) // weight.rows]

        def scaled(numbers: NDArray[np.floating[Any]], is_half: bool) -> NDArray[np.float32]:
            """Numbers (rows, ...) times the scales of their rows."""
            product = np.asarray(numbers * scales.reshape(-1, *[1] * (numbers.ndim - 1)), np.float32)
            if not (abs(product) <= (_LARGEST_HALF if is_half else MOST)).all():
                raise damaged(self.file.path, f"{weight.scale} is {abs(scales).max():g}")
            return product

        if weight.type in FLOATS:
            floats = dequantized(data.reshape(len(rows), -1), weight.type)
            return encoded_floats(scaled(floats, TYPES[weight.type].name == "F16"), weight.type)
        if self.file.tensors[weight.tensor].type not in WIDER:
            data = data.copy()  # it lies in the file, which cannot be written to
        format = FORMATS[weight.type]
        blocks = data.reshape(len(rows), -1, format.block_bytes)
        for at in (format.d, format.m):
            if at is None:
                continue
            d = scaled(blocks[:, :, at : at + 2].copy().view(np.float16), is_half=True)
            blocks[:, :, at : at + 2] = d.astype(np.float16).view(np.uint8)
        return data

    @staticmethod
    def _extent(weight: Weight, rows: range) -> tuple[int, int]:
        """Where rows of a matrix are in their tensor as it is read, and how many bytes there are from the first to the
        last."""
        first, last = _place(weight, rows.start), _place(weight, rows.stop - 1)
        return first * weight.tensor_row_bytes, (last + 1 - first) * weight.tensor_row_bytes

    def vector(self, vector: Vector) -> NDArray[np.float32]:
        """float32 (vector.size,). Raises ModelFileError."""
        if not vector.tensor:
            return np.full(vector.size, vector.factor, np.float32)
        info = self.file.tensors[vector.tensor]
        if info.type not in FLOATS:
            raise damaged(self.file.path, f"it holds {vector.tensor} as {info.type_name}, not as floats")
        values = dequantized(info.part(0, info.n_bytes), info.type)
        values = values[vector.first : vector.first + vector.size // vector.each]
        values = np.repeat(values, vector.each) if vector.each > 1 else values
        if vector.order:
            values = vector.order.apply(values)
        return values * np.float32(vector.factor)

    def joined_vectors(
        self, parts: Sequence[tuple[Vector | None, int]], default: float
    ) -> NDArray[np.float32] | None:
        """Vectors of these sizes one after another, float32 (sum of sizes,); `default` in place of those that are None.
        None if all are. Raises ModelFileError."""
        if not any(vector for vector, _ in parts):
            return None
        return np.concatenate(
            [self.vector(vector) if vector else np.full(size, default, np.float32) for vector, size in parts]
        )

    def _read(self, info: TensorInfo, start: int, n_bytes: int) -> NDArray[np.uint8]:
        """Bytes of a tensor as it is read, whole blocks."""
        return widened(info.type, info.part(file_bytes(info.type, start), file_bytes(info.type, n_bytes)))

    @staticmethod
    def _read_into(info: TensorInfo, start: int, out: memoryview) -> None:
        """As `TensorInfo.read_into`, of a tensor as it is read."""
        if info.type not in WIDER:
            return info.read_into(start, out)
        step = step_bytes(info.type)
        first, end = start // step * step, -(-(start + len(out)) // step) * step
        raw = np.empty(file_bytes(info.type, end - first), np.uint8)
        info.read_into(file_bytes(info.type, first), raw.data)
        out[:] = widened(info.type, raw)[start - first :][: len(out)].data


class Weights(FileWeights):
    """Reads those of a model."""

    def __init__(
        self, file: GGUF, spec: ModelSpec, report: Callable[[int], None], keep_cached: bool = True
    ) -> None:
        """See `FileWeights`."""
        super().__init__(file, spec.weights(), report, keep_cached)
        self.spec = spec
