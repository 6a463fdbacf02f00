"""Files of pictures."""

import io

from PIL import Image


def file_of(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    data = io.BytesIO()
    picture.save(data, kind, **options)
    return data.getvalue()


def plain_picture(color: str = "navy", size: tuple[int, int] = (60, 40), kind: str = "PNG") -> bytes:
    return file_of(Image.new("RGB", size, color), kind)
