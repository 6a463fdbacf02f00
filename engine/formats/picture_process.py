"""The process that decodes pictures: `picture` runs it.

A picture is an untrusted file, and its decoders are C. So they run here, with limits on memory and processor time, and
the parent process kills this one when it takes too long.

The parent writes a line of JSON, {"bytes", "within"}, and then so many bytes of a file. The answer is a line of JSON:
{"unknown"} for another kind of file, {"refused"} with a sentence, or {"width", "height", "full", "format",
"is_animated", "hash"}, and then the pixels, RGB row by row. "within" is null, or the width and height into which the
picture is made to fit; "full" is its size before. Into [0, 0] no pixels fit, and none are decoded. The hash is of the
width and the pixels.
"""

import hashlib
import io
import json
import os
import sys
import warnings
from typing import Any, cast

from PIL import Image, ImageOps, UnidentifiedImageError

from engine.formats.picture_kind import SCAN
from engine.formats.process_limits import limit_memory, limit_processor_time

MEMORY_BYTES = 2 << 30
DECODING_S = 20  # of processor time: ends the process if its parent has died
MAX_PIXELS = 64_000_000
MAX_SIDE = (1 << 16) - 1
"""As of a JPEG. To make one of 64 x 1,000,000 pixels 896 wide would take gigabytes before it is made lower."""
MAX_SCANS = 16
MAX_SCANNED_PIXELS = MAX_SCANS * MAX_PIXELS
"""A progressive JPEG has its pixels in some ten scans. One can have thousands in a few kilobytes, and each takes as
long as all of its pixels."""
_MOST = f"At most {MAX_PIXELS / 1e6:.0f} million are read."
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_ORIENTATION = 0x112  # EXIF's tag; from 5 on, rows and columns change places


class Refusal(Exception):
    """Why a picture is not decoded, in a sentence."""


def answer(data: bytes, within: tuple[int, int] | None) -> tuple[dict[str, Any], bytes]:
    """The answer to a file, and its pixels."""
    try:
        return _decoded(data, within)
    except Refusal as refusal:
        reason = str(refusal)
    except UnidentifiedImageError:
        return {"unknown": True}, b""
    except Image.DecompressionBombError:  # Pillow's, when it reads a header
        reason = f"The picture has more than {2 * MAX_PIXELS / 1e6:.0f} million pixels. {_MOST}"
    except MemoryError:
        reason = "The picture takes too much memory."
    except Exception as error:  # of Pillow's decoders: there is no end to what they raise
        text = " ".join(str(error).split())
        reason = f"The picture is damaged: {text[:200] or type(error).__name__}."
    return {"refused": reason}, b""


def _decoded(data: bytes, within: tuple[int, int] | None) -> tuple[dict[str, Any], bytes]:
    picture = Image.open(io.BytesIO(data), formats=FORMATS)  # reads the header
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise Refusal(
            f"The picture has {width} x {height} pixels, {width * height / 1e6:.0f} million. {_MOST}"
        )
    if max(width, height) > MAX_SIDE:
        raise Refusal(f"The picture has {width} x {height} pixels. A side has at most {MAX_SIDE:,}.")
    if picture.format in ("JPEG", "MPO") and data.count(SCAN) * width * height > MAX_SCANNED_PIXELS:
        raise Refusal(
            f"The picture has its pixels in {data.count(SCAN):,} scans, which take too long to decode."
        )
    # An MPO is a JPEG with more pictures after it, such as previews.
    about = {
        "format": "JPEG" if picture.format == "MPO" else picture.format,
        "is_animated": picture.format != "MPO" and getattr(picture, "is_animated", False),
    }
    if within and not any(within):
        has_exif = picture.format != "PNG" or "exif" in picture.info  # or Pillow looks behind all pixels
        # Pillow gives the size of a TIFF as it is when turned.
        is_turned = picture.format != "TIFF" and has_exif and _is_turned(picture)
        about["full"] = (height, width) if is_turned else (width, height)
        return about | {"width": 0, "height": 0, "hash": ""}, b""
    if within:
        picture.draft("RGB", (within[0] * 2, within[1] * 2))  # decodes a JPEG at a part of its size
    upright, is_turned = _upright(picture)
    about["full"] = (height, width) if is_turned else (width, height)
    rgb = _rgb(upright)
    if within:
        rgb.thumbnail(within)
    pixels = rgb.tobytes()
    digest = hashlib.sha256(b"%d " % rgb.width)  # which processors compute
    digest.update(pixels)
    return about | {"width": rgb.width, "height": rgb.height, "hash": digest.hexdigest()[:32]}, pixels


def _is_turned(picture: Image.Image) -> bool:
    """Whether rows and columns change places when it is turned as its camera says."""
    try:
        return bool(picture.getexif().get(_ORIENTATION, 1) >= 5)
    except (OSError, MemoryError):
        raise
    except Exception:  # what the camera says makes no sense
        return False


def _upright(picture: Image.Image) -> tuple[Image.Image, bool]:
    """A picture turned as its camera says, and whether rows and columns have changed places."""
    try:
        return ImageOps.exif_transpose(picture), _is_turned(picture)
    except (OSError, MemoryError):
        raise
    except Exception:
        return picture, False


def _rgb(picture: Image.Image) -> Image.Image:
    """What is transparent becomes white."""
    if picture.mode.startswith("I"):
        # 16 bits of grey: Pillow's own conversions make 255 of all above. The rare grey that is transparent stays grey.
        picture = picture.convert("I").point(lambda value: value * (255 / 65535)).convert("L")
    elif picture.mode == "F" and cast(tuple[float, float], picture.getextrema())[1] <= 1:
        # 1 is white in floats, which Pillow takes for black.
        picture = picture.point(lambda value: value * 255)
    elif picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        white.alpha_composite(picture)
        picture = white
    return picture.convert("RGB")


def main() -> None:
    limit_memory(MEMORY_BYTES)
    warnings.simplefilter("ignore")
    os.environ["LIBTIFF_JPEG_MAX_ALLOWED_SCAN_NUMBER"] = str(MAX_SCANS)  # of a JPEG within a TIFF
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # for parts of a file; Pillow refuses more than twice as many
    Image.init()
    print("ready", flush=True)
    files, out = sys.stdin.buffer, sys.stdout.buffer
    while line := files.readline():
        request = json.loads(line)
        limit_processor_time(DECODING_S)
        about, pixels = answer(files.read(request["bytes"]), request["within"])
        out.write(json.dumps(about).encode() + b"\n")
        out.write(pixels)
        out.flush()


if __name__ == "__main__":
    main()
