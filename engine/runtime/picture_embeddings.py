"""The pictures of prompts while they are encoded: a part of the work in each round, so that replies go on meanwhile."""

from __future__ import annotations

import time
from collections import OrderedDict

from engine.formats.templates.prompt_pictures import SizedPicture
from engine.runtime.answer import Answer
from engine.runtime.pictures import Encoding, PictureEncoder, Progress

_REPORT_S = 0.25
_KEPT_BYTES = 512 << 20  # of embeddings that may be needed again


class PictureEmbeddings:
    """Encodes pictures, and remembers what it has encoded. `encoder`: None if no prompt has pictures."""

    def __init__(self, encoder: PictureEncoder | None) -> None:
        self._encoder = encoder
        self._known: OrderedDict[str, Encoding] = OrderedDict()
        self._report_due_s = 0.0

    def sees(self, answer: Answer, first: int, end: int) -> bool:
        """Whether the pictures are encoded whose tokens a step from `first` to `end` - 1 has. If not, computes the next
        part of one. Raises what the device raises."""
        if (pictures := answer.pictures) is None:
            return True
        for i in pictures.within(first, end):
            encoding = pictures.encodings[i] or self._of(pictures.placed[i].picture)
            pictures.encodings[i] = encoding
            if encoding.embeddings is None:
                began_s = time.perf_counter()
                self._compute(encoding)
                pictures.took_s += time.perf_counter() - began_s
            if encoding.embeddings is None:
                if time.perf_counter() >= self._report_due_s:
                    self._report_due_s = time.perf_counter() + _REPORT_S
                    answer.report_picture(i, encoding.progress)
                return False
        for i in pictures.within(0, end):
            if i not in pictures.reported:
                pictures.reported.add(i)
                known = pictures.encodings[i]
                total = known.progress.total if known else 1
                answer.report_picture(i, Progress(total, total))
        return True

    def _compute(self, encoding: Encoding) -> None:
        try:
            encoding.step()
        except Exception:
            self._known.pop(encoding.picture.key, None)  # another try begins from the start
            raise

    def _of(self, picture: SizedPicture) -> Encoding:
        """What is known of a picture. The oldest are forgotten."""
        assert self._encoder
        found = self._known.get(picture.key)
        if found is None:
            found = self._known[picture.key] = Encoding(picture, self._encoder.encode(picture.rgbs))
        self._known.move_to_end(picture.key)
        sizes = [e.embeddings.nbytes if e.embeddings is not None else 0 for e in self._known.values()]
        while sum(sizes) > _KEPT_BYTES and len(sizes) > 1:
            self._known.popitem(last=False)
            sizes.pop(0)
        return found
