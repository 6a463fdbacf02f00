"""The rows of one turn: the prompt or, of a reply, what was thought, the text, and a note about it."""

from collections.abc import Sequence

from textual.content import Content
from textual.style import Style

from widgets.chat.call_lines import call_lines
from widgets.chat.guess_tint import tinted
from widgets.chat.thumbnail import thumbnail_lines
from widgets.chat.turn import WARNING, Turn
from widgets.markdown.lines import Line, indented, wrapped
from widgets.markdown.stream import StreamedMarkdown, decided
from widgets.text import as_duration, clean, counted, one_line

_MUTED = "$foreground 60%"
VERSION_KEYS = "Alt+Left, Alt+Right"
_THOUGHT_BAR = Content.styled("│ ", "$foreground 20%")


class TurnLines:
    """Follows a turn, whose text can only grow. `index` is its place in the conversation, which clicks on it name.
    `lines` are as `lay_out` left them; before it is called there are none, and `height` is an estimate."""

    def __init__(
        self,
        turn: Turn,
        index: int,
        *,
        unfolded: bool = False,
        has_thumbnails: bool = True,
        is_tinted: bool = False,
    ) -> None:
        """`is_tinted`: what was guessed of a reply is."""
        self.turn, self.unfolded, self.has_thumbnails = turn, unfolded, has_thumbnails
        self.is_tinted = is_tinted
        self._index = index
        self._markdown = StreamedMarkdown()
        self._n_parsed = 0  # characters of the reply
        self._words = _WordCount()
        self._key: tuple[object, ...] | None = None
        self.lines: Sequence[Line] = ()
        self._estimate: tuple[int, int] = (0, 0)  # width, rows

    def height(self, width: int) -> int:
        """How many rows the turn has in `width` cells: as they were laid out last or, before that, about."""
        if self._key is not None and self._key[0] == width:
            return len(self.lines)
        if self._estimate[0] != width:
            content = self.turn.content
            self._estimate = width, len(content) // max(1, width) + content.count("\n") + 2
        return self._estimate[1]

    def is_laid_out(self, width: int) -> bool:
        """Whether `lines` show all that the turn holds now."""
        return self._key == self._key_now(width)

    def lay_out(self, width: int) -> None:
        """Makes `lines` show all that the turn holds now, with a blank one after each part."""
        if not self.is_laid_out(width):
            self.lines = self._prompt(width) if self.turn.role == "user" else self._reply(width)
            self._key = self._key_now(width)

    def _key_now(self, width: int) -> tuple[object, ...]:
        turn = self.turn
        sizes = len(turn.content), len(turn.thinking)
        state = turn.thinking_s, turn.streaming, turn.note, turn.version, turn.calls, id(turn.files)
        return width, *sizes, *state, self.unfolded, self.has_thumbnails, self.is_tinted

    def _prompt(self, width: int) -> Sequence[Line]:
        rows = wrapped(Content(clean(self.turn.content)), width)
        if files := "  ".join(f"▪ {one_line(file.label)}" for file in self.turn.files):
            rows += wrapped(Content.styled(files, _MUTED), width)
        if self.has_thumbnails:
            rows += thumbnail_lines([file.picture for file in self.turn.files if file.picture], width)
        version, count = self.turn.version
        if count > 1:
            rows += wrapped(Content.styled(f"{version}/{count} · {VERSION_KEYS}", _MUTED), width)
        for row in rows:
            row.is_prompt = True
        return [*rows, Line(Content("")), *self._note(width)]

    def _reply(self, width: int) -> Sequence[Line]:
        content = self.turn.content
        end = decided(content) if self.turn.streaming else len(content)
        if end > self._n_parsed:
            self._markdown.append(clean(content[self._n_parsed : end]))
            self._n_parsed = end
        rows = self._markdown.lines(width)
        if self.is_tinted:
            rows = tinted(rows, clean(content[:end]), self.turn.guessed)
        gap = [Line(Content(""))] if rows else []
        calls = call_lines(self.turn.calls, width, self._index, unfolded=self.unfolded)
        return [*self._thinking(width), *rows, *gap, *calls, *self._note(width)]

    def _thinking(self, width: int) -> Sequence[Line]:
        """One line with the duration, and the text under it where it is unfolded."""
        turn = self.turn
        if not (words := self._words.count(turn.thinking)):
            return ()
        if turn.streaming and not turn.content:
            label = "Thinking…"
        else:
            label = "Thought" if turn.thinking_s is None else "Thought for"
        duration = "" if turn.thinking_s is None else f" {as_duration(turn.thinking_s)}"
        header = Content(f"{'▾' if self.unfolded else '▸'} {label}{duration} · {counted(words, 'word')}")
        click = Style.from_meta({"@click": f"toggle_thinking({self._index})"})
        rows = [Line(header.truncate(width, ellipsis=True).stylize(_MUTED).stylize(click))]
        if self.unfolded:
            text = Content.styled(clean(turn.thinking).strip(), _MUTED)
            rows += indented(wrapped(text, width - 2), _THOUGHT_BAR, _THOUGHT_BAR)
        return [*rows, Line(Content(""))]

    def _note(self, width: int) -> Sequence[Line]:
        if not (note := one_line(self.turn.note)):
            return ()
        style = "$text-warning" if note.startswith(WARNING) else _MUTED
        return [*wrapped(Content.styled(note, style), width), Line(Content(""))]


class _WordCount:
    """Counts the words of a text that grows, each part once."""

    def __init__(self) -> None:
        self._words, self._n_counted = 0, 0
        self._ends_in_word = False

    def count(self, text: str) -> int:
        part = text[self._n_counted :]
        if part:
            self._n_counted = len(text)
            self._words += len(part.split()) - (self._ends_in_word and not part[0].isspace())
            self._ends_in_word = not part[-1].isspace()
        return self._words
