"""The line mode: a chat without a full screen, for plain terminals, logs and scripts.

A method of `LineChat` named `do_NAME` is the command /NAME; its docstring is its line of help.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO, Unpack

import msgspec
from msgspec.structs import replace

from app.chat.conversation import require_chat
from app.chat.export import to_markdown, write_new
from app.chat.history import History, HistoryError
from app.chat.session import ChatOptions, Session
from app.chat.settings import check_sampling
from app.chat.turn import Turn
from app.cli.oneshot import TextOutput
from app.cli.progress import describe, figures
from app.cli.signals import run_until_signal
from engine.client import Engine
from engine.errors import OrinError, UsageError
from engine.events import Event, Failed, Finished, Ready, Sampling, Token
from widgets.text import clean, one_line

SAVE_S = 1.0
"""A reply is saved this often while it grows."""
SETTABLE = (*Sampling.__struct_fields__, "max_tokens")
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class LineReader(Protocol):
    async def read(self, draft: str) -> str:
        """The next message or command; where it can be edited it begins as `draft`. Raises EOFError at the
        end of the input and KeyboardInterrupt when the user gives the line up."""
        ...


def commands() -> dict[str, str]:
    """The commands by name, with their lines of help."""
    methods = {name: method for name, method in vars(LineChat).items() if name.startswith("do_")}
    return {name.removeprefix("do_"): method.__doc__ or "" for name, method in methods.items()}


def completions() -> dict[str, Sequence[str]]:
    """The commands by name, with the words that may follow them."""
    return dict.fromkeys(commands(), ()) | {"set": SETTABLE, "think": ("on", "off")}


class LineChat:
    """Shows a session line by line: it is the session's `View`."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        lines: LineReader,
        out: TextIO,
        messages: TextIO,
        *,
        chat_id: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> None:
        """Reads messages and commands from `lines`. Writes the chat to `out`, and progress and failures to
        `messages`. `chat_id` continues a chat of `history`."""
        self.session = Session(engine, history, self, spawn=self._spawn, **options)
        self.session.watch = self._observe
        self._lines = lines
        self._out = out
        self._output = TextOutput(out, messages)
        self._past_chat = chat_id
        self._draft = ""  # what the next line begins with
        self._tasks: list[asyncio.Task[None]] = []  # of the session
        self._ready: Ready | None = None
        self._end: Finished | None = None  # of the last reply
        self._failure: Failed | None = None
        self._problem: HistoryError | None = None
        self._next_save = 0.0

    async def run(self) -> int:
        """Chats until the user leaves or SIGTERM comes, and returns the exit code. Raises UsageError if there is
        no chat with the id that it was given."""
        try:
            return await run_until_signal(self._run(), signal.SIGTERM)
        finally:
            await self.session.close()

    async def _run(self) -> int:
        self.problem_changed(self.session.history.problem)
        if self._past_chat is not None:
            await self._open(self._past_chat)
        self.session.start()
        await self._finish_tasks()
        if self._failure:
            return self._failure.exit_code
        self._print("/help lists the commands, Ctrl-C stops a reply, Ctrl-D ends the chat.")
        while True:
            draft, self._draft = self._draft, ""
            try:
                await self._take(await self._lines.read(draft))
            except EOFError:
                return 0
            except KeyboardInterrupt:
                self._print("Ctrl-D or /quit ends the chat.")
            except OrinError as error:
                self._output.say(error.message, error.hint)

    async def _take(self, text: str) -> None:
        """Obeys a command, or sends a message to the model and waits for the reply."""
        if text.startswith("/"):
            name, _, argument = text[1:].partition(" ")
            if name not in commands():
                self._draft = " " + text
                raise UsageError(
                    f"There is no command /{name}; /help lists them.", "A message may begin with a space."
                )
            await getattr(self, f"do_{name}")(argument.strip())
        elif text.strip():
            await self.session.send(text.strip())
            await self._finish_reply()

    # --- the session ------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _finish_tasks(self) -> None:
        while self._tasks:
            await self._tasks.pop()

    async def _finish_reply(self) -> None:
        """Waits for the reply. Ctrl-C stops it."""
        try:
            await run_until_signal(self._finish_tasks(), signal.SIGINT, stop=self.session.stop)
        finally:
            self.session.save()  # SIGTERM may have cut the reply

    def _observe(self, event: Event) -> None:
        """Shows an event of the engine, and saves a reply while it grows."""
        match event:
            case Ready():
                self._ready = event
                answering = self.session.is_answering  # else `notice` gets the warnings
                self._output.show(event if answering else replace(event, warnings=()))
                self._print(describe(event))
            case Failed() if not self.session.is_answering:
                self._failure = event  # `notice` gets its sentences
            case _:
                self._output.show(event)
        if isinstance(event, Finished):
            self._end = event
            self._print(f"[{self._figures(event)}]")
        elif isinstance(event, Failed) and event.request_id is None and self.session.is_answering:
            self._output.say("The next message starts the engine again.")
        elif isinstance(event, Token) and time.monotonic() > self._next_save:
            self.session.save()
            self._next_save = time.monotonic() + SAVE_S

    async def added(self, turn: Turn) -> None:
        """The user has typed it, or `_observe` shows it."""

    async def changed(self, turn: Turn) -> None:
        """`_observe` has shown how the reply ended."""

    async def cut(self, index: int) -> None:
        """Lines that are printed stay."""

    async def opened(self) -> None:
        for turn in self.session.conversation.turns:
            self._print(f"> {turn.content}" if turn.role == "user" else turn.content)

    def queue_changed(self) -> None:
        """Nothing waits: a message is read when the reply before it has ended."""

    def give_back(self, text: str) -> None:
        self._draft = text

    def notice(self, text: str, *, warning: bool = False) -> None:
        if text:
            self._output.say(text)

    def problem_changed(self, problem: HistoryError | None) -> None:
        if problem and not self._problem:
            self._output.say(problem.message, problem.hint)
        self._problem = problem

    def _figures(self, end: Finished) -> str:
        length = self._ready.context_length if self._ready else 0
        return f"{figures(end)}, context {end.context_used} of {length}" if length else figures(end)

    async def _open(self, chat_id: int) -> None:
        require_chat(self.session.history, chat_id)
        await self.session.open(chat_id)

    def _last_prompt(self) -> int:
        """Its index. Raises UsageError without one."""
        index = self.session.conversation.prompt_before()
        if index is None:
            raise UsageError("There is no message yet.")
        return index

    def _print(self, text: str) -> None:
        print(clean(text), file=self._out, flush=True)

    # --- commands ---------------------------------------------------------------------------------------

    async def do_help(self, _: str) -> None:
        """this list"""
        for name, meaning in commands().items():
            self._print(f"  /{name:<12} {meaning}")
        self._print("Alt+Enter begins a new line; Up and Down bring back earlier prompts.")

    async def do_new(self, _: str) -> None:
        """start a new chat"""
        await self.session.open(None)
        self._print("A new chat.")

    async def do_chats(self, words: str) -> None:
        """[WORDS]: past chats, or those that hold these words"""
        chats = self.session.history.chats(limit=20, query=words)
        if not chats:
            self._print("No message has these words." if words else "No chats yet.")
        for chat in chats:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.updated))
            self._print(f"  {chat.id:>4}  {when}  {one_line(chat.title)}")

    async def do_open(self, number: str) -> None:
        """NUMBER: go on with a past chat"""
        if not (number.isascii() and number.isdigit()):
            raise UsageError("/open is followed by the number of a chat.", "/chats lists them.")
        await self._open(int(number))

    async def do_regenerate(self, _: str) -> None:
        """answer the last message again"""
        self._last_prompt()
        await self.session.regenerate()
        await self._finish_reply()

    async def do_edit(self, _: str) -> None:
        """change the last message and send it again"""
        self._draft = self.session.conversation.cut(self._last_prompt())[0].content

    async def do_save(self, name: str) -> None:
        """FILE: write the chat as Markdown"""
        if not name:
            raise UsageError("/save is followed by the name of a file.")
        path = Path(name).expanduser()
        model = self._ready.model.name if self._ready else ""
        conversation = self.session.conversation
        text = to_markdown(conversation.title, model, conversation.all_messages())
        try:
            write_new(path, text)
        except FileExistsError:
            raise UsageError(f"{path} exists already.", "Choose another name.") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
        self._print(f"Saved as {path}.")

    async def do_model(self, _: str) -> None:
        """what is answering"""
        runs = self._ready is not None and self.session.status.is_ready
        self._print(describe(self._ready) if self._ready and runs else "The engine is not running.")

    async def do_stats(self, _: str) -> None:
        """figures of the last reply"""
        self._print(self._figures(self._end) if self._end else "There is no reply yet.")

    async def do_system(self, text: str) -> None:
        """[TEXT]: show the system prompt, or start a new chat under this one ("none": without)"""
        if text:
            self.session.system = "" if text == "none" else text
            await self.do_new("")
        self._print(f"System prompt: {self.session.conversation.system or 'none'}")

    async def do_think(self, choice: str) -> None:
        """on|off: whether a thinking model should think"""
        if choice not in ("on", "off"):
            raise UsageError("/think is followed by on or off.")
        self.session.think = choice == "on"

    async def do_set(self, argument: str) -> None:
        """[NAME VALUE]: show the sampling options, or change one ("none": without)"""
        if argument:
            name, _, value = argument.partition(" ")
            self._set(name.replace("-", "_"), value.strip())
        for name in SETTABLE:
            chosen = getattr(self.session if name == "max_tokens" else self.session.sampling, name)
            self._print(f"  {name} {'none' if chosen is None else chosen}")

    def _set(self, name: str, text: str) -> None:
        if name not in SETTABLE:
            raise UsageError(f"There is no option {name}.", f"There are {', '.join(SETTABLE)}.")
        value = "null" if text == "none" else text
        try:
            if name == "max_tokens":
                self.session.max_tokens = msgspec.convert(value, _Positive | None, strict=False)
            else:
                fields = msgspec.structs.asdict(self.session.sampling) | {name: value}
                changed = msgspec.convert(fields, Sampling, strict=False)
                check_sampling(changed)
                self.session.sampling = changed
        except msgspec.ValidationError:
            raise UsageError(f"{text!r} is no value for {name}.") from None

    async def do_quit(self, _: str) -> None:
        """end the chat"""
        raise EOFError
