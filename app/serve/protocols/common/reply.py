"""What all protocols have in common: a request in the engine's terms, and who writes the parts of its answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from app.serve.answer import AnswerBegun, AnswerDelta, AnswerEnd
from app.serve.errors import ApiError, openai_form
from app.serve.http import DATA, Framing
from app.serve.line_ends import LineEnds
from engine.protocol.events import Generate, Prefilling

Json = dict[str, Any]


class Reply:
    """Writes the answers to one request, which it gathers meanwhile: as a stream of values, or `whole`, once all have
    ended. `i` is the place of an answer among them."""

    framing: Framing = DATA
    takes_pieces: bool = True
    """Whether the protocol has a place for pieces of a call's arguments."""
    keep: Callable[[], None] | None = None
    """Remembers the answers, once all have ended. It is called in a thread, since it takes as long as the text is."""

    def begin(self) -> Iterable[Json]:
        """What is sent before all else, once the first answer has begun."""
        return ()

    def begun(self, i: int, begun: AnswerBegun) -> Iterable[Json]:
        return ()

    def progress(self, i: int, prefilling: Prefilling) -> Iterable[Json]:
        return ()

    def delta(self, i: int, delta: AnswerDelta) -> Iterable[Json]:
        raise NotImplementedError

    def vector(self, i: int, values: bytes) -> None:
        """Takes an embedding, or probabilities of classes: float32, little-endian."""
        raise NotImplementedError

    def ended(self, i: int, end: AnswerEnd) -> Iterable[Json]:
        raise NotImplementedError

    def close(self) -> Iterable[Json]:
        """What is sent after all answers, which are remembered then."""
        return ()

    def whole(self) -> Json | list[Json]:
        raise NotImplementedError

    def pings(self) -> Iterable[Json]:
        """What says that the answer is still worked at; nothing if a comment of the stream does."""
        return ()

    def failed(self, error: ApiError) -> Json:
        return openai_form(error)


@dataclass(frozen=True)
class Asked:
    """A request for answers. `requests` are those to the engine, whose text ends at one of `stops`, before one of the
    tokens `stop_ids`, or where its lines say so (`lines` is called for each answer). `asker`: for whom the client asks,
    by its word. `note`: which part of the request is ignored. `one_call`: an answer calls one tool. `one_by_one`: the
    requests are worked at a few at a time, as those of one client, and have no prompt in common."""

    requests: Sequence[Generate]
    reply: Reply
    is_streamed: bool
    stops: Sequence[str] = ()
    asker: str = ""
    note: str = ""
    one_call: bool = False
    one_by_one: bool = False
    stop_ids: frozenset[int] = frozenset()
    lines: Callable[[], LineEnds] | None = None
