"""What kind of picture a file is, by its first bytes."""

MAX_BYTES = 20 << 20  # of a picture's file
HEAD_BYTES = 1000  # that tell the kind
READ = {
    "image/jpeg": "JPEG",
    "image/png": "PNG",
    "image/webp": "WebP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
"""The media types that are decoded, and their names."""
NOT_READ = {
    "image/heic": "a HEIC",
    "image/avif": "an AVIF",
    "image/tiff": "a TIFF",
    "image/svg+xml": "an SVG",
}
_BRANDS = {b"avif": "image/avif"} | dict.fromkeys((b"heic", b"heix", b"hevc", b"mif1", b"msf1"), "image/heic")
_STARTS = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
)


def media_type(data: bytes) -> str:
    """The media type of a picture, "" for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data[:2] == b"BM" and data[6:10] == bytes(4):
        return "image/bmp"
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "")
    if b"<svg" in data[:HEAD_BYTES]:
        return "image/svg+xml"
    return next((kind for start, kind in _STARTS if data.startswith(start)), "")


def is_binary_picture(data: bytes) -> bool:
    """Whether a file is a picture of any kind that is not text."""
    return media_type(data) not in ("", "image/svg+xml")


def refusal(data: bytes) -> str:
    """A sentence on a file that cannot be decoded for its kind."""
    kind = NOT_READ.get(media_type(data), "")
    *kinds, last = READ.values()
    return f"This is {f'{kind} file' if kind else 'not a picture'}. {', '.join(kinds)} and {last} are read."
