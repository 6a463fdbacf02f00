"""What a model file suggests of sampling: keys of `general.sampling`, which converters take of generation_config.json.

Source of names: LLM_KV_NAMES in src/llama-arch.cpp of llama.cpp, which heeds them in common/common.cpp.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_BYTES = 1 << 18  # of the file: these keys stand before those of the tokenizer, which are long
_SAMPLING = b"general.sampling."
_OPTIONS = {
    b"temp": "temperature",
    b"top_k": "top_k",
    b"top_p": "top_p",
    b"min_p": "min_p",
    b"penalty_repeat": "repeat_penalty",
    b"penalty_last_n": "repeat_last_n",
}
"""What follows `_SAMPLING` in the name of a key, and the option of `Sampling`."""

# gguf_metadata_value_type, as `struct` writes it; the others are below (engine/formats/gguf.py)
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class _Rest(NamedTuple):
    value: float | int | None
    pos: int


def suggested_sampling(path: Path) -> dict[str, float | int]:
    """Options of `Sampling` with the values that a file suggests. Reads its beginning alone; what cannot be read says
    nothing. Needs no numpy: a chat asks before its engine has started."""
    try:
        with path.open("rb") as file:
            head = file.read(_BYTES)
    except OSError:
        return {}
    found: dict[str, float | int] = {}
    if head[:4] != b"GGUF":
        return found
    pos = 8 + 8  # the version, and the number of tensors
    try:
        (count,) = struct.unpack_from("<Q", head, pos)
        pos += 8
        for _ in range(min(count, 1 << 10)):
            key, pos = _text(head, pos)
            if key.startswith(b"tokenizer."):
                break
            (kind,) = struct.unpack_from("<I", head, pos)
            value, pos = _value(head, pos + 4, kind)
            name = key.removeprefix(_SAMPLING) if key.startswith(_SAMPLING) else b""
            if value is not None and name in _OPTIONS:
                # a float32 has seven digits: 0.6, which is shown, and not 0.6000000238418579
                found[_OPTIONS[name]] = float(f"{value:.7g}") if isinstance(value, float) else value
    except (struct.error, ValueError, OverflowError):
        # the end of what was read, of a file that is cut, or a length that none has
        pass
    return found


def _text(head: bytes, pos: int) -> tuple[bytes, int]:
    """A text, and where it ends. Raises ValueError beyond the end, and struct.error."""
    (length,) = struct.unpack_from("<Q", head, pos)
    end = pos + 8 + length
    if end > len(head):
        raise ValueError(end)
    return head[pos + 8 : end], end


def _value(head: bytes, pos: int, kind: int) -> _Rest:
    """A number, or None for another value, and where it ends. Raises ValueError and struct.error."""
    if kind in _SCALARS:
        return _Rest(struct.unpack_from(_SCALARS[kind], head, pos)[0], pos + struct.calcsize(_SCALARS[kind]))
    if kind == _STRING:
        return _Rest(None, _text(head, pos)[1])
    if kind != _ARRAY:
        raise ValueError(kind)
    element, count = struct.unpack_from("<IQ", head, pos)
    if element == _ARRAY:  # which no file has, and a hostile one could have as deep as it is long
        raise ValueError(element)
    pos += 12
    if element in _SCALARS:
        return _Rest(None, pos + count * struct.calcsize(_SCALARS[element]))
    for _ in range(count):
        pos = _value(head, pos, element).pos
    return _Rest(None, pos)
