"""A quantized matrix in tensor graphs, which tinygrad schedules and compiles: for devices without kernels of our own.

The integers q of a quantized type (see `engine.formats.quantization`) are split into bit planes, 6 bits = 4 + 2, so
that every load is aligned. A byte of a plane holds the same bits of elements that lie `SPREAD` apart. Bytes per
weight are the file's; Q4_K and Q5_K take 4 bytes more a block of 256 (their 6-bit scales become bytes), 2.8 % and
2.3 %; Q3_K for the same reason 4 bytes more, 3.6 %.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinygrad import Tensor, UOp, dtypes

from engine.formats.ggml_types import TYPES
from engine.formats.quantization import FORMATS
from engine.kernels.fields import FLOAT_TYPES, factors_of, fields_of, values_of
from engine.kernels.matrix_bytes import SPREAD, padded


class QuantizedMatrix:
    """A weight matrix (rows, cols) that stays quantized on the device.

    Columns are padded with zeros to whole blocks and whole plane bytes. With C = padded_cols the planes are

    - `q0`, `q1`  uint8 (rows, C * b / 8 / SPREAD, SPREAD), b = format.bits[0] and format.bits[1]
    - `d`, `m`  float16 (rows, C / block), or `d` uint8 for an exponent; `scale`, `minimum`  int8 or uint8 (rows,
      C / group). A scale and a minimum of 4 bits share a byte of `scale`.

    A float matrix has one plane: `w` float32, float16 or bfloat16 (rows, cols).
    """

    def __init__(self, ggml_type: int, rows: int, cols: int) -> None:
        """Its planes take no memory before `store`."""
        self.format, self._type = FORMATS.get(ggml_type), ggml_type
        self.rows, self.cols = rows, cols
        self._padded_cols = padded(ggml_type, cols)
        type = TYPES[ggml_type]
        raw = Tensor.empty(rows * cols // type.block * type.block_bytes, dtype=dtypes.uint8)
        self.planes = {
            name: Tensor.empty(*plane.shape, dtype=plane.dtype)
            for name, plane in self._planes_of(raw, rows).items()
        }

    def store(self, raw: Tensor, rows: range) -> None:
        """Repacks these rows on the device, one kernel a plane. `raw`: as the file holds them, uint8 (bytes,)."""
        parts = self._planes_of(raw, len(rows))
        if len(rows) == self.rows:
            self.planes = {name: part.contiguous() for name, part in parts.items()}
        else:
            first = UOp.variable("first", 0, self.rows - 1).bind(rows.start)  # pieces share kernels
            for name, part in parts.items():
                plane = self.planes[name]
                stored = plane[first : first + len(rows)].uop.store(part.uop)
                self.planes[name] = Tensor(plane.uop.after(stored))
        Tensor.realize(*self.planes.values())

    def _planes_of(self, raw: Tensor, rows: int) -> dict[str, Tensor]:
        """The planes of `rows` rows as the file holds them, uint8 (bytes,). Lazy."""
        if self.format is None:
            return {"w": raw.bitcast(FLOAT_TYPES[self._type]).reshape(rows, self.cols)}
        fields, planes = fields_of(self.format, raw.reshape(-1, self.format.block_bytes)), {}
        q = self._padded(fields.q, rows)
        for i, (shift, b) in enumerate(self._bit_planes()):
            part = ((q >> shift) & (2**b - 1)).reshape(rows, -1, 8 // b, SPREAD)
            planes[f"q{i}"] = sum((part[:, :, k] << (k * b) for k in range(1, 8 // b)), start=part[:, :, 0])
        for name in self.format.scales:
            planes[name] = self._padded(getattr(fields, name), rows)
        if self.format.has_nibble_scales:
            planes["scale"] = planes["scale"] | (planes.pop("minimum") << 4)
        return planes

    def _bit_planes(self) -> list[tuple[int, int]]:
        """(lowest bit, bits) of each bit plane."""
        bits = self.format.bits if self.format else ()
        return [(sum(bits[:i]), b) for i, b in enumerate(bits)]

    def _padded(self, values: Tensor, rows: int) -> Tensor:
        """Values of `rows` rows in file order -> (rows, values of a padded row)."""
        rowwise = values.reshape(rows, -1)
        n = int(rowwise.shape[1])
        return rowwise.pad(((0, 0), (0, n * self._padded_cols // self.cols - n)))

    def dequantize(self) -> Tensor:
        """The weights, float32 (rows, cols): lazy, so that a consumer's kernel reads the planes."""
        return self._weights(self.planes)

    def dequantize_rows(self, raw: Tensor, rows: int) -> Tensor:
        """Rows that a file holds, uint8 (bytes,), as float32 (rows, cols)."""
        return self._weights(self._planes_of(raw, rows))

    def take(self, ids: Tensor) -> Tensor:
        """Rows `ids` (int, (n,)) dequantized: float32 (n, cols)."""
        return self._weights({name: plane[ids] for name, plane in self.planes.items()})

    def product(self, x: Tensor) -> Tensor:
        """x (n, cols) float32 times the matrix's transpose: (n, rows) float32."""
        return (x @ self.dequantize().transpose()).contiguous()

    def products_of(self, experts: Tensor, x: Tensor, count: int) -> Tensor:
        """For a matrix that is `count` experts' matrices one after the other: row i of x (n, cols) float32 times the
        transpose of the matrix of expert `experts[i]`, int (n,): (n, rows / count) float32."""
        chosen = {
            name: plane.reshape(count, -1, *plane.shape[1:])[experts] for name, plane in self.planes.items()
        }
        n, rows = int(x.shape[0]), self.rows // count
        flat = {name: plane.reshape(n * rows, *plane.shape[2:]) for name, plane in chosen.items()}
        return (self._weights(flat).reshape(n, rows, self.cols) * x.unsqueeze(1)).sum(-1).contiguous()

    def _weights(self, planes: Mapping[str, Tensor]) -> Tensor:
        """Planes of n rows -> float32 (n, cols)."""
        if (format := self.format) is None:
            w = planes["w"]
            if w.dtype == dtypes.bfloat16:  # not every backend computes with it; it is a float32's upper half
                w = (w.bitcast(dtypes.uint16).cast(dtypes.uint32) << 16).bitcast(dtypes.float32)
            return w.cast(dtypes.float32)
        n = planes["d"].shape[0]
        q: Tensor | None = None
        for i, (low, b) in enumerate(self._bit_planes()):
            shift = (Tensor.arange(8 // b).reshape(1, 1, -1, 1) * b).cast(dtypes.uint8)
            part = ((planes[f"q{i}"].unsqueeze(2) >> shift) & (2**b - 1)).reshape(n, -1)
            q = part if q is None else q | (part << low)
        assert q is not None

        def spread_over(name: str, elements: int) -> Tensor:
            plane = planes[name].cast(dtypes.float32)
            return plane.unsqueeze(2).expand(n, -1, elements).reshape(n, -1)

        if format.has_nibble_scales:
            scale_and_minimum = planes["scale"]
            planes = {**planes, "scale": scale_and_minimum & 15, "minimum": scale_and_minimum >> 4}
        planes = {**planes, "d": factors_of(format, planes["d"])}
        scale = spread_over("d", format.block)
        if "scale" in planes:
            scale = scale * spread_over("scale", format.group)
        w = values_of(format, q) * scale
        if "m" in planes:
            m = spread_over("m", format.block)
            w = w - (m * spread_over("minimum", format.group) if "minimum" in planes else m)
        return w[:, : self.cols]
