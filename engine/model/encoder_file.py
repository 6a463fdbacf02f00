"""How a model sees: its encoder's file, and what becomes of the pictures of messages."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from tinygrad import Device

from engine.description.encoder_input import kept_embeddings, layout, resized
from engine.description.encoder_kinds import FITTING
from engine.description.spec import ModelSpec
from engine.description.vision import Affine, FixedRow, VisionSpec
from engine.description.vision_reader import read_vision
from engine.errors import BackendError, ModelFileError, PictureError
from engine.formats.gguf import GGUF, printable
from engine.formats.picture import PictureDecoder
from engine.formats.templates.prompt_pictures import PICTURE_MARKS, PictureProcessor, SizedPicture
from engine.loading.weights import FileWeights
from engine.model.coverage import lacks_kernels_because
from engine.protocol.events import KernelPath, Picture
from engine.runtime.kept_embeddings import KeptEmbeddings
from engine.runtime.pictures import PictureEncoder, PictureRoom, picture_ids
from engine.targets.cpu.picture_coverage import lacks as lacks_on_cpus
from engine.targets.cpu.picture_coverage import scratch_bytes
from engine.targets.cpu.vision import CPUEncoder
from engine.targets.graph.picture_parts import SCORES
from engine.targets.graph.vision import GraphEncoder

_LARGE_PIXELS = 16_000_000  # to decode: they take a second or less on most machines
_REMEMBERED = 32  # uses of pictures: a chat sends all its messages with each prompt


class EncoderFile:
    """A model's encoder, read from its file."""

    def __init__(self, path: str, model: ModelSpec) -> None:
        """Raises ModelFileError if it is no encoder, or not one of this model."""
        self.file = GGUF(path)
        self.spec: VisionSpec = read_vision(self.file)
        name = printable(Path(path).name)
        if model.architecture not in FITTING:
            raise ModelFileError(
                f"orin-chat shows no pictures to models of the architecture {model.architecture}, so {name} is of no "
                "use.",
                "Leave out --mmproj: the model answers texts.",
            )
        if self.spec.kind not in FITTING[model.architecture]:
            raise ModelFileError(
                f"{name} is an encoder of the type {self.spec.kind}, which does not fit a model of the architecture "
                f"{model.architecture}.",
                "Choose the encoder's file that came with the model.",
            )
        if self.spec.width != model.picture_width:
            raise ModelFileError(
                f"{name} makes embeddings of {self.spec.width} elements, and {model.name} takes {model.picture_width}.",
                "Choose the encoder's file that came with the model.",
            )
        if (scale := model.picture_scale) != 1:
            steps = [replace(p, steps=(*p.steps, Affine(scale))) for p in self.spec.projectors]
            ends = self.spec.ends
            if ends and ends.page:  # the other ends are of models whose scale is 1
                ends = replace(ends, page=FixedRow(replace(ends.page.vector, factor=scale)))
            self.spec = replace(self.spec, projectors=tuple(steps), ends=ends)
        stat = Path(path).stat()
        self._identity = f"{Path(path).resolve()} {stat.st_size} {stat.st_mtime_ns} {scale}"
        self._decoders = {is_large: PictureDecoder() for is_large in (False, True)}
        with suppress(BackendError):  # the first picture says so
            self._decoders[False].start()
        self._remembered: WeakValueDictionary[bytes, SizedPicture] = WeakValueDictionary()
        self._recent: deque[SizedPicture] = deque(maxlen=_REMEMBERED)
        self._reading = {is_large: Lock() for is_large in (False, True)}

    @property
    def need_bytes(self) -> int:
        """The memory that the encoder takes, its weights and roughly what it computes the largest picture with."""
        of_stem = 3 * 4 * SCORES if self.spec.stem else 0  # scores of its patches, and what becomes of them
        if Device.DEFAULT.startswith("CPU"):
            return self.spec.n_bytes + scratch_bytes(self.spec) + (of_stem if lacks_on_cpus(self.spec) else 0)
        hidden = max(weight.rows for weight in self.spec.weights())
        return self.spec.n_bytes + 4 * self.spec.most_patches * (5 * self.spec.dim + 2 * hidden) + of_stem

    def room(self, model: ModelSpec) -> PictureRoom:
        """What the model's runner needs for pictures."""
        is_whole = any(attention.sees_pictures for attention in model.attention)
        return PictureRoom(self.spec.size.most_tokens if is_whole else 0)

    def open(self, kernels: KernelPath = "auto") -> PictureEncoder:
        """The encoder on tinygrad's device. Raises ModelFileError."""
        weights, device = FileWeights(self.file, list(self.spec.weights()), lambda _: None), Device.DEFAULT
        if device.startswith("CPU") and kernels != "graph" and not lacks_on_cpus(self.spec):
            return CPUEncoder(weights, self.spec)
        if kernels != "graph" and not device.startswith("CPU") and not lacks_kernels_because(device):
            from engine.targets.nvidia.vision import NvidiaEncoder, lacks

            if not lacks(self.spec):
                return NvidiaEncoder(weights, self.spec)
        return GraphEncoder(weights, self.spec)

    def open_kept(self, kernels: KernelPath, limit_bytes: int) -> PictureEncoder:
        """As `open`; what took long is kept on disk, in a folder of at most so many bytes (0: nothing is)."""
        encoder = self.open(kernels)
        identity = f"{self._identity} {Device.DEFAULT} {kernels}"
        return KeptEmbeddings(encoder, identity, limit_bytes) if limit_bytes else encoder

    @property
    def picture_processor(self) -> PictureProcessor:
        return PictureProcessor(self.read_picture, PICTURE_MARKS[self.spec.kind])

    def read_picture(self, picture: Picture) -> SizedPicture:
        """A picture as tokens, which is remembered while it is in use. Raises PictureError."""
        *_, sized = filter(None, self.reading(picture))
        return sized

    def reading(self, picture: Picture) -> Iterator[SizedPicture | None]:
        """Reads a picture as `read_picture`, and gives None before, if that takes long. Of small and of large ones, one
        is read at a time; large ones have a process of their own, so that others go on. Raises PictureError."""
        digest = hashlib.sha256(picture.data).digest()
        if (sized := self._remembered.get(digest)) is None:
            if is_large := self._decoders[False].work_of(picture.data) > _LARGE_PIXELS:
                yield None
            with self._reading[is_large]:
                if (sized := self._remembered.get(digest)) is None:
                    sized = self._remembered[digest] = self._read(picture, self._decoders[is_large])
        self._recent.append(sized)
        yield sized

    def _read(self, picture: Picture, decoder: PictureDecoder) -> SizedPicture:
        try:
            pixels = decoder.decode(picture.data)
        except PictureError as error:
            file = f"{printable(Path(picture.name).name)}: " if picture.name else ""
            raise PictureError(f"{file}{error.message}", error.hint) from None
        grid, parts = layout(self.spec, pixels.rgb.shape[1], pixels.rgb.shape[0])
        key, rgbs = f"{pixels.hash} {self._identity}", resized(self.spec, pixels.rgb)
        ids = picture_ids(key, sum(part.tokens for part in parts))
        is_framed = self.spec.ends is not None and self.spec.ends.begin is not None
        rows, columns = (0, 0) if self.spec.tiles else (grid.rows, grid.columns)
        kept = kept_embeddings(self.spec, pixels.rgb.shape[1], pixels.rgb.shape[0])
        return SizedPicture(rgbs, rows, columns, ids, key, parts, is_framed, kept)
