"""How many tokens pictures take, without an engine."""

from collections.abc import Callable
from pathlib import Path

from engine.description.encoder_input import layout
from engine.description.vision import VisionSpec
from engine.description.vision_reader import read_vision
from engine.formats.gguf import GGUF
from engine.formats.picture import NO_PIXELS, PictureDecoder
from engine.formats.templates.prompt_pictures import PICTURE_MARKS, PictureProcessor, SizedPicture, with_texts
from engine.protocol.events import Picture


def counting_processor(encoder: Path) -> PictureProcessor:
    """What makes prompts of messages with pictures for a model with this encoder. Pictures have as many tokens as in
    the engine; all their ids are -1. Raises ModelFileError."""
    spec, decoder = _spec(encoder), PictureDecoder()

    def read(picture: Picture) -> SizedPicture:
        return _sized(spec, *decoder.decode(picture.data, NO_PIXELS).full)

    return PictureProcessor(read, PICTURE_MARKS[spec.kind])


def picture_counter(encoder: Path, encode: Callable[[str], list[int]]) -> Callable[[int, int], int]:
    """Counts the tokens of a picture of a width and a height. `encode`: the ids of a text with names of special tokens.
    Raises ModelFileError."""
    spec = _spec(encoder)
    return lambda width, height: len(
        with_texts(_sized(spec, width, height), PICTURE_MARKS[spec.kind], encode).ids
    )


def _spec(encoder: Path) -> VisionSpec:
    with GGUF(encoder) as file:
        return read_vision(file)


def _sized(spec: VisionSpec, width: int, height: int) -> SizedPicture:
    grid, parts = layout(spec, width, height)
    ids = (-1,) * sum(part.tokens for part in parts)
    return SizedPicture((), grid.rows, grid.columns, ids, "", parts)
