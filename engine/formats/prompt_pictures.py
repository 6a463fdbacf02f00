"""The pictures of a prompt as its tokens: what a chat template writes for one, and what takes its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import PictureError
from engine.protocol.events import PICTURE_MARK, Message, Picture


@dataclass(frozen=True, eq=False)
class SizedPicture:
    """A picture at the size of an encoder: `rgb`, uint8 (height, width, 3), which becomes `rows` x `columns` tokens,
    and others between rows in some models. With `tiles`, rows and columns of them, their tokens are one tile after the
    other, and then those of the whole picture, if there are several. `ids`: of all tokens. `key`: of what the encoder
    makes of its pixels."""

    rgb: NDArray[np.uint8]
    rows: int
    columns: int
    ids: tuple[int, ...]
    key: str
    tiles: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class PlacedPicture:
    """A picture whose first token is at the place `first` of a prompt."""

    first: int
    picture: SizedPicture


@dataclass(frozen=True)
class PictureMarks:
    """What a family's chat template writes for a picture, and what comes before and after its embeddings in its
    place. `tile` comes before each tile of several, `row_end` after each row of them, and `whole` before the whole
    picture."""

    written: str
    before: str = ""
    after: str = ""
    tile: str = ""
    row_end: str = ""
    whole: str = ""


_QWEN = PictureMarks("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>", "<|vision_end|>")
PICTURE_MARKS = {
    "qwen2vl_merger": _QWEN,
    "qwen2.5vl_merger": _QWEN,
    "qwen2.5o": PictureMarks("<|vision_bos|><|IMAGE|><|vision_eos|>", "<|vision_bos|>", "<|vision_eos|>"),
    "qwen3vl_merger": _QWEN,
    "gemma3": PictureMarks("<start_of_image>", "\n\n<start_of_image>", "<end_of_image>\n\n"),
    "gemma4v": PictureMarks("<|image|>", "<|image>", "<image|>"),
    "pixtral": PictureMarks("[IMG]", "", "[IMG_END]"),
    "internvl": PictureMarks("<IMG_CONTEXT>\n", "<img>", "</img>\n"),
    "lightonocr": PictureMarks("<|image_pad|>", "<|im_start|>", "<|im_end|>"),
    "dots_ocr": PictureMarks("<|img|><|imgpad|><|endofimg|>", "<|img|>", "<|endofimg|>"),
    "paddleocr": PictureMarks(
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", "<|IMAGE_START|>", "<|IMAGE_END|>"
    ),
    "kimivl": PictureMarks(
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>", "<|media_start|>image<|media_content|>",
        "<|media_end|>",
    ),
    "lfm2": PictureMarks("<image>", "<|image_start|>", "<|image_end|>"),
    "glm4v": PictureMarks(
        "<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_image|>", "<|end_of_image|>"
    ),
    "idefics3": PictureMarks(
        "<image>", "", "<fake_token_around_image>", "<fake_token_around_image><row_{row}_col_{column}>", "\n",
        "<fake_token_around_image><global-img>",
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
    """A picture with the tokens of the texts between its tiles. `encode`: the ids of a text."""
    if not marks.whole:
        return picture
    rows, columns = picture.tiles
    texts, end = list[str](), ""
    if rows * columns > 1:
        for row, column in np.ndindex(rows, columns):
            texts.append((end if column == 0 else "") + marks.tile.format(row=row + 1, column=column + 1))
            end = marks.row_end
        end += marks.row_end  # an empty line
    texts.append(end + marks.whole)
    n, ids = len(picture.ids) // len(texts), list[int]()
    for i, text in enumerate(texts):
        ids += [*encode(text), *picture.ids[i * n : (i + 1) * n]]
    return replace(picture, ids=tuple(ids))


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
