"""Keys of vi in a text box: the motions and changes that a prompt of a few lines needs."""

from collections.abc import Callable

from textual.widgets import TextArea


class ViKeys:
    """Esc leaves the inserting of text, `i` and its like go back to it. Until then letters are commands: they type
    nothing, and those without a meaning do nothing."""

    def __init__(self, box: TextArea) -> None:
        self._box = box
        self.is_inserting = True
        self._operator = ""  # the first key of two: d, c or g
        start, end = box.action_cursor_line_start, box.action_cursor_line_end
        self._motions: dict[str, Callable[[], object]] = {
            "h": box.action_cursor_left, "l": box.action_cursor_right, "j": box.action_cursor_down,
            "k": box.action_cursor_up, "w": box.action_cursor_word_right, "b": box.action_cursor_word_left,
            "e": box.action_cursor_word_right, "0": start, "^": start, "$": end,
            "G": lambda: box.move_cursor(box.document.end),
        }  # fmt: skip
        self._changes: dict[str, Callable[[], object]] = {
            "x": box.action_delete_right, "X": box.action_delete_left, "D": box.action_delete_to_end_of_line,
            "u": box.action_undo,
        }  # fmt: skip
        self._insertions: dict[str, Callable[[], object]] = {
            "i": lambda: None, "a": box.action_cursor_right, "I": start, "A": end,
            "o": lambda: (end(), box.insert("\n")),
            "O": self._open_above,
            "C": box.action_delete_to_end_of_line, "S": box.action_delete_line, "s": box.action_delete_right,
        }  # fmt: skip
        self._pairs: dict[str, Callable[[], object]] = {
            "dd": box.action_delete_line, "dw": self._delete_word, "db": box.action_delete_word_left,
            "d$": box.action_delete_to_end_of_line, "d0": box.action_delete_to_start_of_line,
            "cc": box.action_delete_line, "cw": box.action_delete_word_right,
            "c$": box.action_delete_to_end_of_line, "gg": lambda: box.move_cursor((0, 0)),
        }  # fmt: skip

    def handle(self, key: str, character: str | None) -> bool:
        """Whether a key is one of vi."""
        if self.is_inserting:
            # In an empty box, Esc is the program's: it stops the reply.
            if key != "escape" or not self._box.text:
                return False
            self.is_inserting = False
            self._box.action_cursor_left()
            return True
        if character is None or not character.isprintable():
            self._operator = ""
            return False
        operator, self._operator = self._operator, ""
        typed = operator + character
        if not operator and character in "dcg":
            self._operator = character
        elif typed in self._pairs:
            self._pairs[typed]()
            self.is_inserting = operator == "c"
        elif not operator and character in self._insertions:
            self._insertions[character]()
            self.is_inserting = True
        elif not operator and (act := self._motions.get(character) or self._changes.get(character)):
            act()
        return True

    def _open_above(self) -> None:
        self._box.action_cursor_line_start()
        self._box.insert("\n")
        self._box.move_cursor_relative(rows=-1)

    def _delete_word(self) -> None:
        """Deletes a word with the spaces behind it."""
        self._box.action_delete_word_right()
        row, column = self._box.cursor_location
        while self._box.document[row][column : column + 1] == " ":
            self._box.action_delete_right()
