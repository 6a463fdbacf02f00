"""Keeps the escape characters of a pasted text from becoming keys, and characters that come at once from becoming keys
one by one.

Textual reads an escape sequence inside a bracketed paste as if it were typed, before the text around it. So a log with
colours, pasted in tmux, which passes it on as it is, would come in the wrong order, and a line end after it would send
the prompt.

Textual also takes a terminal's longer answers for keys: what it is called, what became of a picture, its colours, a
clipboard. Such an answer becomes one key here, ANSWERED, whose character it is, or none if it is longer than 200
characters: a key takes as long as the text before it, and 100,000 of them ended in a program that had to be killed. For
the same reason a terminal of more than 4 million cells is not believed.

A key with Alt is an escape character and a letter. Textual waits for what may follow, and if an answer of the terminal
does, takes the key for two others: Alt+Z typed "^z" while a reply was drawn.

A terminal that does not mark pastes sends them as if they were typed. In a long line each key takes as long as the line
is: 2,000 of them in one of 200,000 characters kept the screen waiting for over a minute.

Textual reads a paste character by character, and took a second for 600 kB of it. So it gets the marks of its beginning
and its end, and the text comes into what it makes of them.
"""

import codecs
import re
from collections import deque
from collections.abc import Iterable
from itertools import chain

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual._xterm_parser import XTermParser
from textual.events import Key, Paste, Resize
from textual.keys import Keys
from textual.message import Message

START, END, ESCAPE = "\x1b[200~", "\x1b[201~", "\x1b"
_LEAVES = ("\x03", "\x11")
"""Ctrl+C and Ctrl+Q: where one comes alone, the end of a paste was lost."""
_AT_ONCE = re.compile(r"[^\x00-\x1f\x7f-\x9f]{64,}")
"""More characters than anybody types between two reads."""


ANSWERED = "terminal-answered"
_BEGIN = r"\x1b(?:P(?=[>!01][|+$r])|_G|\](?=\d+;))"
_ANSWER_END = re.compile(r"\x1b\\|\x07")
_ANSWER = re.compile(rf"{_BEGIN}([^\x00-\x1f]*)(?:{_ANSWER_END.pattern})")
_ANSWER_BEGUN = re.compile(rf"{_BEGIN}[^\x00-\x1f]*\x1b?\Z")
_REPORT = re.compile(r"\x1b\[(?:[?>=][\d;:]*[@-~]|[468];\d+;\d+t)")
"""What a terminal is and can, and its size: no key begins so, and only its modes, which end in $y, are asked for."""
_ANSWER_CHARS = 200
MOST_CELLS = 4_000_000
MOST_PASTED = 4 << 20
"""Characters of a pasted text: one of 50 MB took 2.4 GB in a prompt, and kept its terminal for minutes. Of a longer
text one more is passed on, by which it is known."""


_MAY_GO_ON = {sequence[1] for sequence in ANSI_SEQUENCES_KEYS if len(sequence) > 2} | set("[OPX]^_")
"""Characters after an escape character with which longer sequences begin."""


class PasteParser(XTermParser):
    """Reads what a terminal sends, without the escape characters inside a paste."""

    _is_pasting = False
    _before = ""  # the last characters before a paste: START may come in pieces
    _held = ""  # the end of a piece of a paste, if END may begin there, or the beginning of an answer
    _pasted = 0  # characters of the paste so far
    _is_long_answer = False  # the rest of one is to come

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pieces: list[str] = []  # of the paste so far
        self._texts = deque[str]()  # of pastes that have ended

    def feed(self, data: str) -> Iterable[Message]:
        if not data:  # the end of the input
            return super().feed(self._held + data)
        self._answers: list[str] = []
        passed = self._passed(self._without_long_answer(data))
        keys = (Key(ANSWERED, answer) for answer in self._answers)
        messages = filter(_is_believed, super().feed(passed)) if passed else ()
        return chain(keys, map(self._with_text, messages))

    def _with_text(self, message: Message) -> Message:
        """A paste that has no text but in `_texts`."""
        is_empty = isinstance(message, Paste) and not message.text and self._texts
        return Paste(self._texts.popleft()) if is_empty else message

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[Key]:
        is_alt = len(sequence) == 2 and sequence[0] == ESCAPE and sequence not in ANSI_SEQUENCES_KEYS
        if is_alt and sequence[1].isprintable() and sequence[1] not in _MAY_GO_ON:
            sequence, alt = sequence[1], True
        return super()._sequence_to_key_events(sequence, alt)

    def _without_answers(self, typed: str) -> str:
        """Collects the answers of the terminal in what is typed. One that has only begun is held, unless it is long."""
        self._answers += [answer for answer in _ANSWER.findall(typed) if len(answer) <= _ANSWER_CHARS]
        rest = _REPORT.sub("", _ANSWER.sub("", typed))
        if begun := _ANSWER_BEGUN.search(rest):
            rest, self._held = rest[: begun.start()], begun[0]
            if len(self._held) > _ANSWER_CHARS:
                self._is_long_answer, self._held = True, ""
        return rest

    def _without_long_answer(self, data: str) -> str:
        """What comes after the end of a long answer. What is shorter than a piece of one ends it, too: if its end is
        lost, keys must not be."""
        if self._is_long_answer:
            end = _ANSWER_END.search(data)
            if not end and len(data) > _ANSWER_CHARS:
                return ""
            self._is_long_answer, data = False, data[end.end() if end else 0 :]
        return data

    def _parse_extended_key(self, sequence: str) -> list[Key] | None:  # type: ignore[override]
        try:
            return super()._parse_extended_key(sequence)
        except (ValueError, OverflowError):  # a release, or a number that is no character: Textual would end
            return [Key(Keys.Ignore, sequence)]

    def _passed(self, data: str) -> str:
        if self._is_pasting and data in _LEAVES:
            data = END + data
        data, self._held, passed = self._held + data, "", ""
        while data:
            if self._is_pasting:
                text, end, data = data.partition(END)
                if not end:
                    begun = next((n for n in range(len(END) - 1, 0, -1) if text.endswith(END[:n])), 0)
                    text, self._held = text[: len(text) - begun], text[len(text) - begun :]
                text = text.replace(ESCAPE, "")
                self._pieces.append(text[: max(0, MOST_PASTED + 1 - self._pasted)])
                if end:
                    self._texts.append("".join(self._pieces).replace("\0", ""))
                    self._pieces.clear()
                    passed += end
                self._pasted = 0 if end else self._pasted + len(text)
                self._is_pasting = not end
            else:
                seen = self._before + data
                at = seen.find(START)
                cut = at + len(START) - len(self._before) if at >= 0 else len(data)
                typed, data = self._without_answers(data[:cut]), data[cut:]
                is_plain = ESCAPE not in self._before + typed  # no part of what a terminal answers
                passed += _AT_ONCE.sub(rf"{START}\g<0>{END}", typed) if is_plain else typed
                self._is_pasting = at >= 0
                self._before = "" if self._is_pasting else seen[-(len(START) - 1) :]
        return passed


def _is_believed(message: Message) -> bool:
    return not isinstance(message, Resize) or message.size.area <= MOST_CELLS


def lenient_decoder(encoding: str) -> type[codecs.IncrementalDecoder]:
    """As `codecs.getincrementaldecoder`, but bytes that are no text become U+FFFD: a terminal may send any."""
    strict = codecs.getincrementaldecoder(encoding)

    class Lenient(strict):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__("replace")

    return Lenient
