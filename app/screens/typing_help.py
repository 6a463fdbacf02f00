"""What helps while a prompt is typed: how commands and names of files go on, and what the files that it names are."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from app.chat import files
from app.chat.commands import COMMANDS, completions
from app.chat.file_reader import FileReader, ModelFiles, Takes, TokenCounter
from engine.system import own_thread
from widgets.chat.prompt import Prompt
from widgets.chat.suggestions import Suggestion
from widgets.text import one_line

PATIENCE_S = 0.2
MOST_S = 1.0
T = TypeVar("T")
_REQUIRED = ("NUMBER", "FILE", "on|off")


class TypingHelp:
    """Fills the prompt's list of suggestions, and the line `chips` of files. `owner` runs what takes time. `model`
    returns the files of the model in use, `takes` what it takes."""

    def __init__(
        self,
        owner: Widget,
        prompt: Prompt,
        model: Callable[[], ModelFiles | None],
        takes: Callable[[], Takes],
    ) -> None:
        self.reader = FileReader(TokenCounter(model))
        self.chips = Static(id="files", markup=False)
        self._owner, self._prompt, self._takes = owner, prompt, takes
        self._suggested_for = ""
        self._marked_for: Takes | None = None
        self._chips: list[tuple[str, bool]] = []  # that are shown
        self._last: list[tuple[str, bool]] = []  # or were, of the last prompt with files
        self._at_work: dict[str, asyncio.Future[Any]] = {}
        prompt.suggest, prompt.paste = self.suggest_now, files.pasted

    def text_changed(self) -> None:
        """Lists what the text before the cursor could become, and the files that the text names."""
        text, before = self._prompt.text, self._prompt.before_cursor
        self._suggested_for = before
        if not self._prompt.is_typed or not _may_go_on(text, before):
            self._prompt.suggestions.close()
        elif text.startswith("/"):
            self.suggest_now()
        else:
            self._in_turn("suggestions", functools.partial(self._suggest_files, before))
        if "@" in text:
            self._in_turn("chips", functools.partial(self._show_chips, text))
        else:
            self._set_chips([])

    def model_changed(self) -> None:
        """Marks the files again if the model takes others now: one has loaded, or the context has another room."""
        if "@" in self._prompt.text and self._takes() != self._marked_for:
            self._in_turn("chips", functools.partial(self._show_chips, self._prompt.text))

    async def says(self, problem: str, text: str) -> bool:
        """Whether the line of files says so of the prompt `text`, which was sent, perhaps before it was looked at."""
        with suppress(TimeoutError):  # another look may wait for a disk
            await asyncio.wait_for(self._show_chips(text), MOST_S)
        return (problem, False) in self._last

    def cursor_moved(self) -> None:
        if self._prompt.before_cursor != self._suggested_for:
            self._prompt.suggestions.close()

    def suggest_now(self) -> None:
        """Lists what the text before the cursor could become: at once, or later if a folder takes long to read."""
        text, before = self._prompt.text, self._prompt.before_cursor
        self._suggested_for = before
        if text.startswith("/") and "\n" not in text and (found := _commands(before))[1]:
            self._prompt.suggestions.show(*found, before)
        else:
            listed: list[tuple[int, list[str]]] = []
            read = threading.Thread(target=lambda: listed.append(files.completions(before)), daemon=True)
            read.start()
            read.join(PATIENCE_S)
            if listed:
                self._list_files(listed[0], before)
            else:
                self._in_turn("suggestions", functools.partial(self._suggest_files, before))

    def _in_turn(self, group: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Does what takes time, in the place of what was begun before. It may be given up before it begins, where a
        coroutine would complain that nobody has awaited it."""
        self._owner.run_worker(work, group=group, exclusive=True)

    async def _alone(self, group: str, work: Callable[[], T]) -> T:
        """What `work` returns, begun when the last of its group has ended: a disk may hold it for long, and each key
        begins some, which would take all threads of the program."""
        if last := self._at_work.get(group):
            await asyncio.wait((last,))
        self._at_work[group] = now = asyncio.wrap_future(own_thread.begin(work, group))
        await asyncio.wait((now,))
        return now.result()

    async def _suggest_files(self, before: str) -> None:
        found = await self._alone("suggestions", functools.partial(files.completions, before))
        if self._prompt.before_cursor == before:
            self._list_files(found, before)

    def _list_files(self, found: tuple[int, list[str]], before: str) -> None:
        start, names = found
        self._prompt.suggestions.show(start, [Suggestion(name) for name in names], before)

    async def _show_chips(self, text: str) -> None:
        self._marked_for = takes = self._takes()
        chips = await self._alone("chips", functools.partial(self.reader.chips, text, takes))
        if self._prompt.text == text:
            self._set_chips(chips)

    def _set_chips(self, chips: list[tuple[str, bool]]) -> None:
        if chips == self._chips:  # an update lays the whole screen out anew
            return
        self._chips, self._last = chips, chips or self._last
        parts = [
            Content.styled(f"▪ {one_line(text)}", "$text-accent" if is_good else "$text-warning")
            for text, is_good in chips
        ]
        self.chips.update(Content("  ").join(parts))
        self.chips.set_class(bool(parts), "-shown")


def _may_go_on(text: str, before: str) -> bool:
    return "@" in before or (text.startswith("/") and "\n" not in text)


def _commands(before: str) -> tuple[int, list[Suggestion]]:
    """How a command could go on: where what was typed of it begins, and the suggestions."""
    name, space, argument = before[1:].partition(" ")
    if space:
        words = completions().get(name, ())
        return len(before) - len(argument), [
            Suggestion(word, ends=name != "set") for word in words if word.startswith(argument)
        ]
    return 0, [
        Suggestion(f"/{command}", meaning, ends=not meaning.startswith(_REQUIRED))
        for command, meaning in COMMANDS.items()
        if command.startswith(name)
    ]
