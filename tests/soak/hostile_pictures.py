"""Damaged and crafted files of pictures, in the process that decodes them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from engine.errors import PictureError
from engine.formats.picture import STOPPED, PictureDecoder
from tests.pictures import file_of
from tests.soak.counts import Counts
from tests.soak.drawn import drawn
from tests.soak.hostile_files import changed

_NUMBERS = st.sampled_from([0, 1, 2, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1])
_PIECES = st.one_of(
    st.binary(min_size=1, max_size=12),
    _NUMBERS.map(lambda number: number.to_bytes(4, "big")),
    _NUMBERS.map(lambda number: number.to_bytes(4, "little")),
    st.sampled_from([16, 255, 16384, 65535]).map(lambda number: number.to_bytes(2, "big")),
)
# Most are in heads
_PLACES = st.one_of(st.floats(0, 1, exclude_max=True), st.floats(0, 0.1, exclude_max=True))
_CHANGES = st.lists(st.tuples(_PLACES, _PIECES), max_size=4)


def files() -> list[bytes]:
    """A small file of each kind that is read, and of the ways in which they can be written."""
    rng = np.random.default_rng(7)
    photo = Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8))
    frames = [photo, photo.rotate(90), photo.rotate(180)]
    clear, exif = photo.copy(), photo.getexif()
    clear.putalpha(Image.fromarray(rng.integers(0, 256, (40, 60), np.uint8)))
    exif[0x112] = 8
    deep = Image.fromarray(rng.integers(0, 65536, (40, 60), np.uint16))
    return [
        file_of(photo, "JPEG", exif=exif),
        file_of(photo, "JPEG", progressive=True, quality=40),
        file_of(photo.convert("CMYK"), "JPEG"),
        file_of(photo),
        file_of(clear),
        file_of(deep),
        file_of(photo.quantize(16), transparency=3),
        file_of(photo, save_all=True, append_images=frames[1:]),
        file_of(photo, "GIF", save_all=True, append_images=frames[1:]),
        file_of(photo, "WEBP"),
        file_of(clear, "WEBP", lossless=True),
        file_of(photo, "WEBP", save_all=True, append_images=frames[1:]),
        file_of(photo, "BMP"),
        file_of(photo.quantize(200), "BMP"),
        file_of(photo, "TIFF", compression="tiff_lzw"),
        file_of(deep, "TIFF"),
        file_of(photo, "AVIF"),
    ]


def run(tries: int, number: int = 0) -> Counts:
    """Changes bytes of pictures, or cuts them, and decodes them, whole and in small."""
    counts = Counts("pictures with changed bytes")
    decoder, originals = PictureDecoder(), files()

    @drawn(
        tries,
        number,
        st.integers(0, len(originals) - 1),
        _CHANGES,
        st.none() | st.floats(0, 1),
        st.booleans(),
    )
    def read(which: int, changes: list[tuple[float, bytes]], cut: float | None, in_small: bool) -> None:
        data = changed(originals[which], changes, len(originals[which]), cut)
        with counts.trying():
            try:
                pixels = decoder.decode(data, (32, 32) if in_small else None)
                assert pixels.rgb.size and (not in_small or max(pixels.rgb.shape[:2]) <= 32)
                counts.survived["read"] += 1
            except PictureError as error:
                counts.survived["stopped by the limits" if error.message == STOPPED else "refused"] += 1

    read()
    decoder.close()
    return counts
