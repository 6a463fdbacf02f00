"""Frames on the socket between client and worker: a length of 4 bytes, little-endian, then that many bytes of
MessagePack, which are one record of `engine.protocol.events`."""

import os
from collections.abc import Iterator

from engine.protocol.events import Command, Event, encode

MAX_FRAME_BYTES = 512 << 20  # of a conversation with its pictures
_LENGTH_BYTES = 4


class FrameError(Exception):
    """The bytes are not frames, or a record is too large for one."""


def pack(record: Command | Event) -> bytes:
    """The frame of a record. Raises FrameError if it is over MAX_FRAME_BYTES, and msgspec's errors if MessagePack
    cannot hold it (UnicodeEncodeError, OverflowError, TypeError)."""
    return frame(encode(record))


def frame(payload: bytes) -> bytes:
    """The frame of an encoded record. Raises FrameError if it is over MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"A message of {len(payload)} bytes is too long.")
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


class Deframer:
    """Cuts received bytes, in pieces of any size, into the payloads of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def incomplete(self) -> bytes:
        """The received part of the next frame."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that `data` completes. Raises FrameError for a length over MAX_FRAME_BYTES."""
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


def read_all(fd: int) -> bytes:
    """The contents of the open file `fd`, which is closed; b"" for -1."""
    if fd < 0:
        return b""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()
