"""How many tokens pictures take, without an engine: for requests that only count."""

from pathlib import Path

import numpy as np

from engine.description.vision_reader import read_vision
from engine.formats.gguf import GGUF
from engine.formats.picture import PictureDecoder
from engine.formats.prompt_pictures import PICTURE_MARKS, Eyes, SeenPicture
from engine.pictures import Grid
from engine.protocol.events import Picture


def counting_eyes(encoder: Path) -> Eyes:
    """What makes prompts of messages with pictures for a model with this encoder. Pictures have as many tokens as in
    the engine; all their ids are -1. Raises ModelFileError."""
    with GGUF(encoder) as file:
        spec = read_vision(file)
    decoder, nothing = PictureDecoder(), np.zeros((0, 0, 3), np.uint8)

    def look(picture: Picture) -> SeenPicture:
        grid = Grid.of(spec, *decoder.decode(picture.data, (1, 1)).full)
        return SeenPicture(nothing, grid.rows, grid.columns, (-1,) * grid.tokens(spec), "", grid.tiles)

    return Eyes(look, PICTURE_MARKS[spec.kind])
