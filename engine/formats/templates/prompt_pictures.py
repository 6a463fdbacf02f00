"""The pictures of a prompt as its tokens: what a chat template writes for one, and what takes its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import PictureError
from engine.protocol.events import PICTURE_MARK, Message, Picture


class Part(NamedTuple):
    """A part of a picture, which is encoded by itself: its `tokens`, and the row and column of a tile, from 1 on; None
    is the whole picture."""

    tokens: int
    tile: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class SizedPicture:
    """A picture at the size of an encoder: `rgbs`, uint8 (height, width, 3) of each of its `parts`, in the order in
    which a model reads them. `ids`: of all tokens. `rows` and `columns`: those of tokens, 0 if it is not read as a
    grid, which may be `framed` (`Ends.begin`). `key`: of what the encoder makes of its pixels. `kept`: which of its
    embeddings are read (None: all)."""

    rgbs: tuple[NDArray[np.uint8], ...]
    rows: int
    columns: int
    ids: tuple[int, ...]
    key: str
    parts: tuple[Part, ...] = ()
    framed: bool = False
    kept: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class PlacedPicture:
    """A picture whose first token is at the place `first` of a prompt."""

    first: int
    picture: SizedPicture


@dataclass(frozen=True)
class PictureMarks:
    """What a family's chat template writes for a picture, and what comes before and after its embeddings in its
    place. What comes before may have the picture's number, from 0 on. The other texts are of pictures that are cut:
    those around each tile, between two of a row, after a row of tiles before the next one, around all tiles, and around
    the whole picture. Those around the whole picture are also around one that is not cut, unless that has `alone`
    before it."""

    written: str
    before: str = ""
    after: str = ""
    tile: str = ""
    tile_end: str = ""
    between: str = ""
    row_end: str = ""
    tiles: str = ""
    tiles_end: str = ""
    whole: str = ""
    whole_end: str = ""
    alone: str | None = None


_QWEN = PictureMarks("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>", "<|vision_end|>")
_GEMMA4 = PictureMarks("<|image|>", "<|image>", "<image|>")
PICTURE_MARKS = {
    "qwen2vl_merger": _QWEN,
    "qwen2.5vl_merger": _QWEN,
    "qwen2.5o": PictureMarks("<|vision_bos|><|IMAGE|><|vision_eos|>", "<|vision_bos|>", "<|vision_eos|>"),
    "qwen3vl_merger": _QWEN,
    "gemma3": PictureMarks("<start_of_image>", "\n\n<start_of_image>", "<end_of_image>\n\n"),
    "gemma4v": _GEMMA4,
    "gemma4uv": _GEMMA4,
    "pixtral": PictureMarks("[IMG]", "", "[IMG_END]"),
    "internvl": PictureMarks("<IMG_CONTEXT>\n", "<img>", "</img>\n"),
    "lightonocr": PictureMarks("<|image_pad|>"),
    "mlp": PictureMarks("<image>\n", after="\n"),
    "granite4_vision": PictureMarks("<image>\n", after="\n"),
    "gemma3nv": PictureMarks("<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n"),
    "youtuvl": _QWEN,
    "phi4": PictureMarks("<image>"),
    "janus_pro": PictureMarks("<image_placeholder>\n", "<begin_of_image>", "<end_of_image>\n"),
    "resampler": PictureMarks(
        "(<image>./</image>)\n", after="\n", tile="<slice>", tile_end="</slice>", row_end="\n", whole="<image>",
        whole_end="</image>",
    ),
    "minicpmv4_6": PictureMarks(
        "<|image_pad|>", "<image_id>{picture}</image_id>", tile="<slice>", tile_end="</slice>", row_end="\n",
        whole="<image>", whole_end="</image>",
    ),
    "resampler 2.5": PictureMarks(
        "(<image>./</image>)\n", after="\n", tiles="<slice>", tile="<image>", tile_end="</image>", row_end="\n",
        tiles_end="</slice>", whole="<image>", whole_end="</image>",
    ),
    "llama4": PictureMarks(
        "<|image|>", "<|image_start|>", "<|image_end|>", between="<|tile_x_separator|>",
        row_end="<|tile_y_separator|>", tiles_end="<|tile_y_separator|>", whole="<|image|>",
    ),
    "nemotron_v2_vl": PictureMarks("<image>", "<img>", "</img>"),
    "dots_ocr": PictureMarks("<|img|><|imgpad|><|endofimg|>", "<|img|>", "<|endofimg|>"),
    "paddleocr": PictureMarks(
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", "<|IMAGE_START|>", "<|IMAGE_END|>"
    ),
    "kimivl": PictureMarks(
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>", "<|media_start|>image<|media_content|>",
        "<|media_end|>",
    ),
    "kimik25": PictureMarks(
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", "<|media_begin|>image<|media_content|>",
        "<|media_end|>",
    ),
    "lfm2": PictureMarks(
        "<image>", "<|image_start|>", "<|image_end|>", tile="<|img_row_{row}_col_{column}|>",
        whole="<|img_thumbnail|>", alone="",
    ),
    "glm4v": PictureMarks(
        "<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_image|>", "<|end_of_image|>"
    ),
    "deepseekocr": PictureMarks("<image>", after="\n"),
    "deepseekocr2": PictureMarks("<image>", after="\n"),
    "step3vl": PictureMarks(
        "<im_patch>", tile="<patch_start>", tile_end="<patch_end>", row_end="<patch_newline>", whole="<im_start>",
        whole_end="<im_end>",
    ),
    "adapter": PictureMarks("<|begin_of_image|>" * 578),
    "muse-glimmer": PictureMarks("<|patch|>", "<|image_start|>", "<|image_end|>"),
    "exaone4_5": PictureMarks("<vision><|image_pad|></vision>", "<vision>", "</vision>"),
    "hunyuanvl": PictureMarks(
        "<｜hy_place▁holder▁no▁100｜><｜hy_place▁holder▁no▁102｜><｜hy_place▁holder▁no▁101｜>",
        "<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>",
    ),
    "idefics3": PictureMarks(
        "<image>", "", "<fake_token_around_image>", tile="<fake_token_around_image><row_{row}_col_{column}>",
        row_end="\n", tiles_end="\n\n", whole="<fake_token_around_image><global-img>",
    ),
}  # fmt: skip
"""By the encoder's kind: the processors in transformers."""


@dataclass(frozen=True)
class PictureProcessor:
    """How messages with pictures become prompts. `read` sizes a picture, and raises PictureError."""

    read: Callable[[Picture], SizedPicture]
    marks: PictureMarks


def with_texts(
    picture: SizedPicture, marks: PictureMarks, encode: Callable[[str], list[int]]
) -> SizedPicture:
    """A picture with the tokens of the texts around its parts. `encode`: the ids of a text."""
    parts = picture.parts or (Part(len(picture.ids)),)
    left, ids, text = iter(picture.ids), list[int](), ""
    is_tile = False
    for tokens, tile in parts:
        was_tile, is_tile = is_tile, tile is not None
        if tile is None:
            text += marks.tiles_end if was_tile else ""
            text += marks.alone if len(parts) == 1 and marks.alone is not None else marks.whole
        else:
            row, column = tile
            text += (marks.between if column > 1 else marks.row_end) if was_tile else marks.tiles
            text += marks.tile.format(row=row, column=column)
        ids += [*(encode(text) if text else []), *islice(left, tokens)]
        text = marks.tile_end if is_tile else marks.whole_end
    text += marks.tiles_end if is_tile else ""
    return replace(picture, ids=(*ids, *(encode(text) if text else [])))


def with_marks(message: Message) -> Message:
    """A message with a mark for each of its pictures: those without one come first. Marks without a picture become
    U+FFFD."""
    *kept, rest = message.content.split(PICTURE_MARK, len(message.pictures))
    rest = rest.replace(PICTURE_MARK, "\N{REPLACEMENT CHARACTER}")
    missing = PICTURE_MARK * (len(message.pictures) - len(kept))
    return msgspec.structs.replace(message, content=missing + PICTURE_MARK.join([*kept, rest]))


def as_parts(content: str) -> list[dict[str, str]]:
    """A text with marks as templates take it that know pictures
    (https://huggingface.co/docs/transformers/chat_templating_multimodal)."""
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(PICTURE_MARK)):
        if i:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts or [{"type": "text", "text": ""}]


def around_pictures(segments: Iterable[tuple[str, bool]], written: str) -> list[list[tuple[str, bool]]]:
    """The segments of a rendered text (`Tokenizer.encode_segments`) before, between and after its pictures, which the
    template wrote as `written`, or of which it kept the marks."""
    sign = re.compile("|".join(re.escape(sign) for sign in (written, PICTURE_MARK) if sign))
    runs: list[list[tuple[str, bool]]] = [[]]
    for text, special in segments:
        pieces = sign.split(text) if special else [text]
        for i, piece in enumerate(pieces):
            if i:
                runs.append([])
            runs[-1].append((piece, special))
    return runs


def cannot_see() -> PictureError:
    """The error where a model without an encoder gets a picture."""
    return PictureError(
        "This model is loaded without an encoder, so it sees no pictures.",
        "Load the encoder's file with --mmproj FILE (mmproj-*.gguf beside the model), or choose a model that sees.",
    )
