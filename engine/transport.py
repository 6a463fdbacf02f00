"""Frames on the pipe between client and worker: a 4-byte little-endian length, then that many bytes, which
are one record of `engine.events` as MessagePack."""

from __future__ import annotations

from collections.abc import Iterator

from engine.events import Command, Event, encode

MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4


class FrameError(Exception):
    """The stream is not one of frames, or a record is too large for one."""


def pack(record: Command | Event) -> bytes:
    """One frame. Raises FrameError for a record over MAX_FRAME_BYTES, and what msgspec raises for one that
    MessagePack cannot hold (UnicodeEncodeError, OverflowError, TypeError)."""
    return frame(encode(record))


def frame(payload: bytes) -> bytes:
    """Raises FrameError for a payload over MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"{len(payload)} bytes are too many for one message.")
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


class Deframer:
    """Cuts what arrives, in pieces of any size, into the payloads of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def rest(self) -> bytes:
        """What has arrived of the next frame."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads that are complete with `data`. Raises FrameError for a length no sender would send."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"A frame of {length} bytes was announced.")
            end = _LENGTH_BYTES + length
            if len(buffer) < end:
                return
            payload = bytes(buffer[_LENGTH_BYTES:end])
            del buffer[:end]
            yield payload
