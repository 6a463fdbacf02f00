"""Where the line mode reads: an editable prompt on a terminal, or the lines of a file or pipe."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, ThreadedCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.utils import is_dumb_terminal

from app.chat import files
from engine.system import own_thread
from widgets.text import clean, editable

PROMPT = "> "
_PATIENCE_S = 0.2


class TerminalLines:
    """A prompt with a history and with completion of commands. Enter sends, Alt+Enter begins a new line. `commands`
    maps the name of each command to the words that may follow it. `vi`: with the keys of vi."""

    is_terminal = True

    def __init__(
        self, history: Iterable[str], commands: Mapping[str, Iterable[str]], *, vi: bool = False
    ) -> None:
        keys = KeyBindings()
        keys.add("enter")(_send)
        keys.add("escape", "enter")(_new_line)
        keys.add(Keys.BracketedPaste)(_paste)
        keys.add(Keys.Vt100MouseEvent)(_ignore)
        self._history = InMemoryHistory([editable(text) for text in history])
        # PromptSession sends an escape sequence for the cursor, which a dumb terminal would show.
        with create_app_session(output=PlainTextOutput(sys.stdout) if is_dumb_terminal() else None):
            self._session: PromptSession[str] = PromptSession(
                PROMPT,
                history=self._history,
                completer=ThreadedCompleter(CommandCompleter(commands)),  # a folder may be slow
                key_bindings=keys,
                multiline=True,
                vi_mode=vi,
                enable_suspend=True,  # Ctrl-Z, as in a shell
                prompt_continuation=" " * len(PROMPT),
            )

    async def read(self, draft: str) -> str:
        """The next message or command, which the user edits starting from `draft`. Raises EOFError at the end of the
        input, and KeyboardInterrupt if the user presses Ctrl-C."""
        draft = editable(draft)
        if draft and is_dumb_terminal():  # which cannot show a text to edit
            print(draft)
            draft = ""
        try:
            return await self._session.prompt_async(default=draft)
        except KeyboardInterrupt:
            if text := self._session.default_buffer.text:
                self._history.append_string(text)  # Up brings it back
            raise


class FileLines:
    """Each line of `source` is a message or a command. `echo` gets it, too, so that the output reads as a chat."""

    is_terminal = False

    def __init__(self, source: TextIO, echo: TextIO) -> None:
        self._source = source
        self._echo = echo

    async def read(self, draft: str) -> str:
        """Raises EOFError at the end."""
        line = self._source.readline()
        if not line:
            raise EOFError
        print(PROMPT + clean(line.rstrip("\n")), file=self._echo, flush=True)
        return line.rstrip("\n")


class CommandCompleter(Completer):
    """Completes /NAME at the beginning of a line, the word after it, and files as @NAME."""

    def __init__(self, commands: Mapping[str, Iterable[str]]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            line = document.current_line_before_cursor
            # Enter waits for what completes, and a disk may not answer.
            found = own_thread.begin(lambda: files.completions(line), "completions")
            with suppress(TimeoutError):
                start, names = found.result(_PATIENCE_S)
                yield from (Completion(name, start - len(line)) for name in names)
            return
        name, space, argument = text[1:].partition(" ")
        word, choices = (argument, self._commands.get(name, ())) if space else (name, self._commands)
        for choice in choices:
            if choice.startswith(word):
                yield Completion(choice, -len(word))


def _send(event: KeyPressEvent) -> None:
    event.current_buffer.validate_and_handle()


def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


def _paste(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text(editable(files.pasted(event.data)))


def _ignore(event: KeyPressEvent) -> None:
    """The library takes a pasted ESC[31m for a mouse event, and fails to read it. No mouse is asked for."""
