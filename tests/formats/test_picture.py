"""Pictures become pixels in a process with limits, and what is wrong with one is said in a sentence."""

import struct
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from engine.errors import PictureError
from engine.formats import limited_process
from engine.formats.picture import NO_PIXELS, PictureDecoder
from tests.fork_server import start_module
from tests.pictures import file_of


@pytest.fixture(scope="module")
def decoder():
    with mock.patch.object(limited_process, "start_module", start_module):  # as the application does
        yield PictureDecoder()


def test_pixels_are_rgb_upright_and_white_where_nothing_is(decoder):
    half = Image.new("RGBA", (3, 2), (255, 0, 0, 255))
    half.putpixel((0, 0), (0, 0, 0, 0))
    assert decoder.decode(file_of(half)).rgb[0].tolist() == [[255, 255, 255], [255, 0, 0], [255, 0, 0]]

    turned = Image.new("RGB", (40, 20), "navy")
    exif = turned.getexif()
    exif[0x112] = 6
    pixels = decoder.decode(file_of(turned, "JPEG", exif=exif), (10, 10))
    assert (pixels.full, pixels.format, pixels.rgb.shape) == ((20, 40), "JPEG", (10, 5, 3))

    grey = Image.fromarray(np.array([[0, 256, 65535]], np.uint16))  # 16 bits
    for more in ({}, {"transparency": 256}):
        assert decoder.decode(file_of(grey, **more)).rgb[0, :, 0].tolist() == [0, 0, 255]


def test_a_size_is_read_without_the_pixels(decoder):
    turned = Image.new("RGB", (40, 20))
    exif = turned.getexif()
    exif[0x112] = 6
    for kind in ("JPEG", "PNG", "TIFF", "AVIF"):
        data = file_of(turned, kind, exif=exif)
        assert decoder.decode(data, NO_PIXELS).full == decoder.decode(data).full == (20, 40)
    cut = file_of(Image.effect_noise((90, 60), 50))[:2000]
    assert decoder.decode(cut, NO_PIXELS).full == (90, 60), "the pixels of which could not be decoded"
    assert (decoder.work_of(cut), decoder.work_of(b"no picture")) == (5400, 0)
    in_scans = file_of(Image.new("L", (90, 60)), "JPEG", progressive=True)
    assert decoder.work_of(in_scans) == in_scans.count(b"\xff\xda") * 5400 > 5400


def test_the_hash_is_of_the_pixels_and_their_shape(decoder):
    wide, high = (Image.new("L", size, 7) for size in ((4, 2), (2, 4)))
    assert decoder.decode(file_of(wide)).hash == decoder.decode(file_of(wide, "BMP")).hash
    assert decoder.decode(file_of(wide)).hash != decoder.decode(file_of(high)).hash


def test_of_an_animation_the_first_frame_is_read(decoder):
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    pixels = decoder.decode(
        file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    )
    assert pixels.is_animated and pixels.rgb[0, 0].tolist() == [255, 0, 0]


def test_scans_and_pictures_of_the_web_are_read(decoder):
    for kind, how in (("TIFF", {"compression": "tiff_lzw"}), ("AVIF", {"quality": 100})):
        pixels = decoder.decode(file_of(Image.new("RGB", (40, 30), "red"), kind, **how))
        assert pixels.format == kind and abs(pixels.rgb.mean((0, 1)) - [255, 0, 0]).max() < 3
    deep = Image.fromarray(np.array([[0, 256, 65535]], np.uint16))
    assert decoder.decode(file_of(deep, "TIFF")).rgb[0, :, 0].tolist() == [0, 0, 255]
    for white in (1, 255):
        floats = Image.fromarray(np.array([[0, white / 5, white]], np.float32))
        assert decoder.decode(file_of(floats, "TIFF")).rgb[0, :, 0].tolist() == [0, 51, 255]


def test_a_jpeg_within_a_tiff_has_no_more_scans_than_others(decoder):
    data = with_scans(20, (90, 60))
    sizes = {256: 90, 257: 60, 258: 8, 259: 7, 262: 1, 273: 122, 277: 1, 278: 60, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, n) for tag, n in sizes.items())
    tiff = struct.pack("<4sIH", b"II*", 8, len(sizes)) + entries + bytes(4) + data
    assert decoder.work_of(tiff) > 20 * 5400
    with pytest.raises(PictureError, match="damaged"):
        decoder.decode(tiff)


def with_scans(count: int, size: tuple[int, int] = (3000, 2000)) -> bytes:
    """A progressive JPEG, of 6 million pixels unless said, whose last scan comes again and again."""
    data = file_of(Image.new("L", size), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + count * last + data[-2:]


def as_raw(order: str, tag: int, of_another: int) -> bytes:
    """A TIFF that has one more `tag`, and says whether it is a smaller picture of another."""
    tags = {254: of_another, 256: 2, 257: 2, 258: 8, 259: 1, 262: 1, 273: 122, 277: 1, 278: 2, 279: 4, tag: 1}
    entries = b"".join(struct.pack(f"{order}HHII", key, 4, 1, n) for key, n in sorted(tags.items()))
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + struct.pack(f"{order}IH", 8, len(tags)) + entries + bytes(99)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a picture"),
        (b"\0\0\0\x18ftypheic", "a HEIC file"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avif", "begins as AVIF"),
        (b"\xff\x0a" + bytes(9), "a JPEG XL file"),
        (as_raw("<", 50706, 1), "a camera's raw file"),
        (as_raw(">", 330, 1), "a camera's raw file"),
        (b"II*\0\x10\0\0\0CR\2\0" + bytes(99), "a camera's raw file"),
        (b"<?xml version='1.0'?><svg/>", "an SVG file"),
        (file_of(Image.new("1", (10_000, 10_000)), compress_level=1), "10000 x 10000 pixels, 100 million"),
        (file_of(Image.new("1", (1, 65_536))), "1 x 65536 pixels. A side has at most 65,535"),
        (file_of(Image.effect_noise((90, 90), 50))[:2000], "damaged"),
        (b"\xff\xd8\xff" + bytes(99), "begins as JPEG"),
        (bytes(21 << 20), "At most 20 MiB"),
        (200, r"pixels in 2\d\d scans"),
    ],
    ids=[
        "empty",
        "heic",
        "avif",
        "jxl",
        "dng",
        "nef",
        "cr2",
        "svg",
        "large",
        "high",
        "cut off",
        "no JPEG",
        "large file",
        "scans",
    ],
)
def test_what_is_not_read_is_said(decoder, data, reason):
    data = with_scans(data) if isinstance(data, int) else data  # made here: each process collects all tests
    with pytest.raises(PictureError, match=reason):
        decoder.decode(data)


def test_a_killed_process_is_replaced(decoder):
    picture = file_of(Image.new("RGB", (1, 1), "lime"))
    decoder.decode(picture)
    process = decoder._process._process
    process.kill()
    process.wait()
    assert decoder.decode(picture).rgb.tolist() == [[[0, 255, 0]]]


def test_a_tiff_of_several_sizes_is_no_raw_file(decoder):
    """Its first picture is the large one."""
    assert decoder.decode(as_raw("<", 330, 0)).full == (2, 2)
