"""The base of the pages that list entries under a search field: past chats, models, presets."""

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.screen import ScreenResultType
from textual.timer import Timer
from textual.widgets import Input, Static

from engine.errors import OrinError
from widgets.entry_list import EntryList
from widgets.page import Frame, Page
from widgets.terminal.ordered_input import OrderedInput
from widgets.text import one_line

SLOW_S, PAUSE_S = 0.1, 0.2
"""A search that takes so long waits for a pause in typing: among 100,000 chats, each letter would hold up the next."""
Entry = TypeVar("Entry")


class ListPage(Page[ScreenResultType], Generic[Entry, ScreenResultType]):
    """The search field has the focus; the other keys act on the highlighted entry. The last line shows messages and
    questions. A subclass sets the texts, and implements `find`, `line`, `key`, `choose` and `delete`."""

    FRAME_TITLE: ClassVar[str]
    KEYS: ClassVar[tuple[str, ...]]
    PLACEHOLDER: ClassVar[str]
    EMPTY: ClassVar[str]
    NOTHING_FOUND: ClassVar[str]
    DEFAULT_CSS = """
    ListPage .line { height: auto; max-height: 40%; display: none; padding: 0 1; }
    ListPage .line.-shown { display: block; }
    ListPage Input.-editing, ListPage Input.-editing:focus { background: $warning 15%; }
    ListPage #question { color: $text-warning; }
    """
    BINDINGS = [
        Binding("escape", "back", "Close", priority=True),
        Binding("up", "move(-1)", priority=True),
        Binding("down", "move(1)", priority=True),
        Binding("pageup", "move(-8)", priority=True),
        Binding("pagedown", "move(8)", priority=True),
        Binding("home", "move(-1_000_000)", priority=True),
        Binding("end", "move(1_000_000)", priority=True),
        Binding("delete,ctrl+d", "delete", "Delete", priority=True),
    ]

    def __init__(self, search: str = "") -> None:
        """The page begins with a `search`."""
        super().__init__()
        self.search_text = search
        self.entries: Sequence[Entry] = ()  # all that the search finds
        self.field = OrderedInput(search, placeholder=self.PLACEHOLDER, select_on_focus=False)
        self.list = EntryList()
        self.question = Static(id="question", classes="line", markup=False)
        self._took_s = 0.0  # the last search
        self._later: Timer | None = None  # of a search that waits for a pause in typing
        self._on_yes: Callable[[], object] | None = None  # while a yes or no is awaited
        self._on_text: Callable[[str], object] | None = None  # while the field holds a text to edit

    def compose(self) -> ComposeResult:
        with Frame(self.FRAME_TITLE, *self.KEYS):
            yield self.field
            yield self.list
            yield self.question

    def on_mount(self) -> None:
        self.field.focus()
        self.show_entries()

    # --- what a subclass says of its entries ------------------------------------------------------------

    def find(self, text: str) -> Sequence[Entry]:
        """The entries that match a search; all of them for ""."""
        raise NotImplementedError

    def nothing_found(self, text: str) -> str:
        """What the list says if a search finds nothing."""
        return self.NOTHING_FOUND

    def line(self, entry: Entry) -> Content:
        """How an entry looks in the list, in two rows."""
        raise NotImplementedError

    def key(self, entry: Entry) -> object:
        """What identifies an entry when the list has changed."""
        raise NotImplementedError

    def row_of(self, key: object) -> int | None:
        """The row of the entry with this key."""
        return next((row for row, entry in enumerate(self.entries) if self.key(entry) == key), None)

    def row_in_use(self) -> int:
        """The row that is highlighted when the page opens: of the entry in use, or the first one."""
        return next((row for row, entry in enumerate(self.entries) if self.is_in_use(entry)), 0)

    def is_in_use(self, entry: Entry) -> bool:
        """Whether the program uses an entry now."""
        return False

    def choose(self, entry: Entry) -> None:
        """Called by Enter and by a click."""
        raise NotImplementedError

    def delete(self, entry: Entry) -> None:
        """Called by the Delete key; asks before it deletes."""
        raise NotImplementedError

    # --- the list ---------------------------------------------------------------------------------------

    @property
    def highlighted(self) -> Entry | None:
        """The entry that is highlighted for the text in the field: a search that waits is made now."""
        if self._later is not None:
            self._search_now()
        row = self.list.highlighted
        return self.entries[row] if row is not None and row < len(self.entries) else None

    def show_entries(self, highlight: object = None) -> None:
        """Lists what the search finds. Highlights the entry with the key `highlight` (None: the one highlighted
        before); if there is none, the same row, or at first the entry in use."""
        row, entry = self.list.highlighted, self.highlighted
        if highlight is None and entry is not None:
            highlight = self.key(entry)
        self.entries = self.find(self.search_text)
        if highlight is not None and (found := self.row_of(highlight)) is not None:
            row = found
        elif row is None and not self.search_text:
            row = self.row_in_use()
        nothing = self.nothing_found(self.search_text) if self.search_text else self.EMPTY
        self.list.show(len(self.entries), lambda row: self.line(self.entries[row]), nothing)
        self.list.highlighted = row or 0

    def action_move(self, rows: int) -> None:
        self.say("")
        self.list.highlighted = (self.list.highlighted or 0) + rows

    def action_delete(self) -> None:
        if (entry := self.highlighted) is not None:
            self.delete(entry)

    def action_back(self) -> None:
        if self._on_text is None:
            self.dismiss(None)
        else:
            self._end_text()

    @on(EntryList.Chosen)
    def _click(self, event: EntryList.Chosen) -> None:
        if self._on_yes is None:
            self.choose(self.entries[event.index])

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        if self._on_text is None:
            self.search_text = event.value.strip()
            if self._took_s > SLOW_S:
                self._wait(self.set_timer(PAUSE_S, self._search_now))
            else:
                self._search_now()

    def _wait(self, later: Timer | None) -> None:
        """Lets the search wait for a timer, in place of the one before; None: no longer."""
        if self._later is not None:
            self._later.stop()
        self._later = later

    def _search_now(self) -> None:
        self._wait(None)
        started = time.thread_time()
        self.list.highlighted = None  # the best match is highlighted
        self.show_entries()
        self._took_s = time.thread_time() - started

    @on(Input.Submitted)
    def _enter(self, event: Input.Submitted) -> None:
        if (on_text := self._on_text) is not None:
            self._end_text()
            on_text(event.value)
        elif (entry := self.highlighted) is not None:
            self.choose(entry)

    # --- messages and questions -------------------------------------------------------------------------

    def say(self, text: str) -> None:
        show_line(self.question, text)

    def attempt(self, change: Callable[[], object]) -> bool:
        """Makes a change and lists the entries again. Returns whether it was made; else says why not."""
        try:
            change()
        except OrinError as error:
            self.say(str(error))
            return False
        finally:
            self.show_entries()
        return True

    def ask(self, question: str, on_yes: Callable[[], object]) -> None:
        """Takes the next key as the answer: y is yes, any other key is no."""
        self._on_yes = on_yes
        self.field.disabled = True  # else the answer would be typed into it
        self.say(question)

    def ask_text(self, label: str, question: str, text: str, on_text: Callable[[str], object]) -> None:
        """Puts `text` into the field to be edited, which the frame then calls `label`. Enter answers with it, Esc gives
        up. Then the field has the search again."""
        self._on_text = on_text
        self.query_one(Frame).border_title = Content(f"{self.FRAME_TITLE} · {label}")
        self.field.add_class("-editing")
        with self.prevent(Input.Changed):
            self.field.value = text
        self.field.cursor_position = len(text)
        self.say(question)

    def _end_text(self) -> None:
        self._on_text = None
        self.query_one(Frame).border_title = Content(self.FRAME_TITLE)
        self.field.remove_class("-editing")
        with self.prevent(Input.Changed):
            self.field.value = self.search_text
        self.say("")

    def on_key(self, event: events.Key) -> None:
        if (on_yes := self._on_yes) is not None:
            event.stop()
            self._on_yes = None
            self.field.disabled = False
            self.field.focus()
            self.say("")
            if event.key == "y":
                on_yes()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if self._on_text is not None:
            return action == "back"  # the other keys edit the text
        return self._on_yes is None  # else every key is an answer


def show_line(line: Static, text: str) -> None:
    """Shows `text` in a line of the page, or hides the line ("")."""
    line.update(Content(one_line(text)))
    line.set_class(bool(text), "-shown")
