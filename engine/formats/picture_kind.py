"""What kind of picture a file is, by its first bytes."""

from typing import Literal

MAX_BYTES = 20 << 20  # of a picture's file
HEAD_BYTES = 1000  # that tell the kind
SCAN = b"\xff\xda"
"""The mark of a scan of a JPEG; among the data of a scan it does not occur."""
READ = {
    "image/jpeg": "JPEG",
    "image/png": "PNG",
    "image/webp": "WebP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/tiff": "TIFF",
    "image/avif": "AVIF",
}
"""The media types that are decoded, and their names."""
NOT_READ = {
    "image/heic": "a HEIC",
    "image/svg+xml": "an SVG",
    "image/jxl": "a JPEG XL",
    "image/jp2": "a JPEG 2000",
    "image/x-icon": "an ICO",
    "image/vnd.adobe.photoshop": "a Photoshop",
    "image/x-raw": "a camera's raw",
}
_BRANDS = (
    dict.fromkeys((b"avif", b"avis"), "image/avif")
    | dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "image/heic")
    | {b"crx ": "image/x-raw"}
)
_BMP_HEADERS = 12, 40, 52, 56, 64, 108, 124  # sizes of the header that follows the first 14 bytes
_STARTS = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    *(
        (start, "image/x-raw")
        for start in (b"FUJIFILMCCD-RAW", b"IIRO", b"IIRS", b"MMOR", b"IIU\0", b"II*\0\x10\0\0\0CR")
    ),
    *((start, "image/tiff") for start in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    *((start, "image/jxl") for start in (b"\xff\x0a", b"\0\0\0\x0cJXL ")),
    *((start, "image/jp2") for start in (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")),
    (b"\0\0\1\0", "image/x-icon"),
    (b"8BPS", "image/vnd.adobe.photoshop"),
)
_DNG_VERSION, _SUBFILE_TYPE, _SUB_PICTURES = 50706, 254, 330  # tags of TIFF
_MOST_TAGS = 200


def media_type(data: bytes) -> str:
    """The media type of a picture, "" for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data[:2] == b"BM" and int.from_bytes(data[14:18], "little") in _BMP_HEADERS:
        return "image/bmp"
    if data[4:8] == b"ftyp":
        is_avif = data[8:12] == b"mif1" and b"avif" in data[16 : int.from_bytes(data[:4], "big")]
        return "image/avif" if is_avif else _BRANDS.get(data[8:12], "")
    if b"<svg" in data[:HEAD_BYTES]:
        return "image/svg+xml"
    if data[:4] in (b"II*\0", b"MM\0*") and _is_raw(data):
        return "image/x-raw"
    return next((kind for start, kind in _STARTS if data.startswith(start)), "")


def _is_raw(data: bytes) -> bool:
    """Whether a TIFF is a camera's raw file: DNG, or one whose first picture is a small one of another (NEF, ARW)."""
    order: Literal["little", "big"] = "little" if data[:2] == b"II" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], order)

    first = number(4, 4)
    entries = range(first + 2, first + 2 + 12 * min(number(first, 2), _MOST_TAGS), 12)
    tags = {number(at, 2): number(at + 8, 4) for at in entries}
    return _DNG_VERSION in tags or (_SUB_PICTURES in tags and tags.get(_SUBFILE_TYPE, 0) & 1 == 1)


def is_binary_picture(data: bytes) -> bool:
    """Whether a file is a picture of any kind that is not text."""
    return media_type(data) not in ("", "image/svg+xml")


def refusal(data: bytes) -> str:
    """A sentence on a file that cannot be decoded for its kind."""
    if name := READ.get(media_type(data)):
        return f"The picture is damaged: it begins as {name} and does not go on so."
    kind = NOT_READ.get(media_type(data), "")
    *kinds, last = READ.values()
    return f"This is {f'{kind} file' if kind else 'not a picture'}. {', '.join(kinds)} and {last} are read."
