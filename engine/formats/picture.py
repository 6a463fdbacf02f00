"""Decodes pictures in a process of its own (`picture_process`), and kills the process if that takes too long."""

from __future__ import annotations

import fcntl
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from engine.errors import BackendError, PictureError
from engine.formats.limited_process import LimitedProcess
from engine.formats.picture_kind import MAX_BYTES, NOT_READ, SCAN, media_type, refusal

_PIPE_BYTES = 1 << 20  # pixels come in a few pieces: 64 KB at a time take 3 ms more
DECODE_S = 30.0  # 64 million pixels take about 2 s on a fast machine
_DOES_NOT_START = partial(BackendError, "The process that decodes pictures does not start.")
NO_PIXELS = (0, 0)
"""Into these none fit: the size of a picture is read, and nothing is decoded, which may take seconds."""
STOPPED = "The picture takes too much time or memory to decode."


@dataclass(frozen=True)
class Pixels:
    """A decoded picture: `rgb` is uint8 [height, width, 3], upright, with white where it was transparent. `hash` is of
    its size and pixels. `full` is its width and height before it was made to fit, `format` as "JPEG". `is_animated`:
    it is the first of several frames."""

    rgb: NDArray[np.uint8]
    hash: str
    full: tuple[int, int]
    format: str
    is_animated: bool


class PictureDecoder:
    """A process that decodes pictures and ends with this object. It starts with the first picture, or with `start`, and
    again if it was killed. Any thread may use it, one at a time."""

    def __init__(self) -> None:
        self._process: LimitedProcess | None = None
        self._turn = Lock()

    def start(self) -> None:
        """Starts the process and does not wait for it. Raises BackendError."""
        self._process = process = LimitedProcess("engine.formats.picture_process", _DOES_NOT_START)
        with suppress(AttributeError, OSError):  # Linux, as far as the user's limit goes
            fcntl.fcntl(process.answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def decode(self, data: bytes, within: tuple[int, int] | None = None) -> Pixels:
        """The pixels of a file, made to fit into the width and height `within`. Raises PictureError, and
        BackendError if the process does not start."""
        if media_type(data) in NOT_READ:  # Pillow would take the small picture of a raw file
            raise PictureError(refusal(data))
        if len(data) > MAX_BYTES:
            size = f"{len(data) / 1e6:.1f} MB"
            raise PictureError(f"The picture's file has {size}. At most {MAX_BYTES >> 20} MiB are read.")
        with self._turn:
            line, pixels = self._answer(data, within)
        about = json.loads(line)
        if reason := about.get("refused") or ("unknown" in about and refusal(data)):
            raise PictureError(reason)
        return Pixels(
            np.frombuffer(pixels, np.uint8).reshape(about["height"], about["width"], 3),
            about["hash"],
            tuple(about["full"]),
            about["format"],
            about["is_animated"],
        )

    def work_of(self, data: bytes) -> int:
        """The pixels that decoding a file goes through, in all scans of a progressive JPEG, which a TIFF may hold too
        (where other data may look like more scans); 0 if it cannot be decoded. Raises BackendError if the process does
        not start."""
        try:
            width, height = self.decode(data, NO_PIXELS).full
        except PictureError:
            return 0
        scans = data.count(SCAN) if media_type(data) in ("image/jpeg", "image/tiff") else 1
        return width * height * max(scans, 1)

    def _answer(self, data: bytes, within: tuple[int, int] | None) -> tuple[bytes, bytes]:
        if self._process is None or not self._process.is_alive:
            self.start()
        process = self._process
        assert process
        request = json.dumps({"bytes": len(data), "within": within}).encode() + b"\n"
        with process.asked(request + data, DECODE_S) as answers:
            line = answers.readline()
            about = json.loads(line) if line.endswith(b"\n") else {}
            count = about.get("width", 0) * about.get("height", 0) * 3
            pixels = answers.read(count)
        if not about or len(pixels) < count:  # the process was killed, or died
            process.end()
            raise PictureError(STOPPED)
        return line, pixels

    def close(self) -> None:
        """Ends the process. The next picture starts it again."""
        with self._turn:
            if self._process is not None:
                self._process.end()
