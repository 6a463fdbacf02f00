"""How many tokens pictures take, without an engine: for requests that only count."""

from pathlib import Path

import numpy as np

from engine.description.vision_reader import read_vision
from engine.encoder_input import Grid
from engine.formats.gguf import GGUF
from engine.formats.picture import NO_PIXELS, PictureDecoder
from engine.formats.prompt_pictures import PICTURE_MARKS, PictureProcessor, SizedPicture
from engine.protocol.events import Picture


def counting_processor(encoder: Path) -> PictureProcessor:
    """What makes prompts of messages with pictures for a model with this encoder. Pictures have as many tokens as in
    the engine; all their ids are -1. Raises ModelFileError."""
    with GGUF(encoder) as file:
        spec = read_vision(file)
    decoder, nothing = PictureDecoder(), np.zeros((0, 0, 3), np.uint8)

    def read(picture: Picture) -> SizedPicture:
        grid = Grid.of(spec, *decoder.decode(picture.data, NO_PIXELS).full)
        return SizedPicture(nothing, grid.rows, grid.columns, (-1,) * grid.tokens(spec), "", grid.tiles)

    return PictureProcessor(read, PICTURE_MARKS[spec.kind])
