"""The line mode: a chat without a full screen, for plain terminals, logs and scripts.

A method of `LineChat` named `do_NAME` is the command /NAME; its docstring is its line of help.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol, TextIO

import msgspec

from app.chat.conversation import Conversation
from app.chat.export import to_markdown, write_new
from app.chat.history import History, HistoryError
from app.chat.settings import check_sampling
from app.chat.turn import Turn
from app.cli.oneshot import TextOutput, on_signals
from app.cli.progress import describe, figures
from engine.client import Engine
from engine.errors import OrinError, UsageError
from engine.events import Chat, Failed, Finished, Generate, Ready, Sampling, Thinking, Token
from widgets.text import clean, one_line

SAVE_EVERY_S = 1.0
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


def words() -> dict[str, Sequence[str]]:
    """The commands by name, with the words that may follow them."""
    return dict.fromkeys(commands(), ()) | {"set": SETTABLE, "think": ("on", "off")}


class LineChat:
    """One conversation in line mode, read from `lines`. `chat_id` goes on with a chat of `history`."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        lines: LineReader,
        out: TextIO,
        messages: TextIO,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
        system: str = "",
        max_tokens: int | None = None,
        think: bool = True,
        chat_id: int | None = None,
    ) -> None:
        """`out` shows the chat, `messages` what went wrong. Raises UsageError when there is no such chat."""
        self.engine = engine
        self.history = history
        self.sampling = sampling
        self.system = system
        self.max_tokens = max_tokens
        self.think = think
        self.conversation = Conversation(history, system)
        self._lines = lines
        self._out = out
        self._output = TextOutput(out, messages)
        self._draft = ""  # what the next line begins with
        self._ready: Ready | None = None
        self._last: Finished | None = None
        self._problem: HistoryError | None = history.problem
        self._request_ids = itertools.count(1)
        if chat_id is not None:
            self._open(chat_id)

    async def run(self) -> int:
        """Chats until the user leaves, and returns the exit code."""
        task = asyncio.current_task()
        assert task is not None
        code = 0

        def terminate(number: int) -> None:
            nonlocal code
            code = 128 + number
            task.cancel()

        try:
            with on_signals(terminate, signal.SIGTERM):
                code = await self._run()
        except asyncio.CancelledError:
            if not code:
                raise
            task.uncancel()
        finally:
            await self.engine.close()
        return code

    async def _run(self) -> int:
        if self._problem:
            self._output.say(self._problem.message, self._problem.hint)
        if failure := await self._start():
            return failure.exit_code
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
        """Does what a line asks: a command, or a message to the model."""
        if text.startswith("/"):
            name, _, argument = text[1:].partition(" ")
            if name not in commands():
                self._draft = " " + text
                raise UsageError(
                    f"There is no command /{name}; /help lists them.", "A message may begin with a space."
                )
            await getattr(self, f"do_{name}")(argument.strip())
        elif text.strip():
            self.conversation.add(Turn(role="user", content=text.strip()))
            self._save()
            await self._answer()

    # --- answering --------------------------------------------------------------------------------------

    async def _start(self) -> Failed | None:
        """Starts the engine and says what it is. Returns why it did not start, which has been shown."""
        async for event in self.engine.start():
            self._output.show(event)
            if isinstance(event, Failed):
                return event
            if isinstance(event, Ready):
                self._ready = event
                self._print(describe(event))
        return None

    async def _answer(self) -> None:
        """Answers the last turn, which is the user's; starts the engine first where it has died."""
        stops: list[asyncio.Future[None]] = []

        def stop(_: int) -> None:
            stops.append(asyncio.ensure_future(self.engine.stop() if self._ready else self.engine.close()))

        with on_signals(stop, signal.SIGINT):
            if self._ready or not await self._start():
                await self._stream()
        await asyncio.gather(*stops)

    async def _stream(self) -> None:
        """Has the engine answer; the reply is saved while it grows."""
        request = Generate(
            request_id=next(self._request_ids),
            prompt=Chat(messages=self.conversation.messages(), think=self.think),
            sampling=self.sampling,
            max_tokens=self.max_tokens,
        )
        reply = Turn(role="assistant", finished=False)
        next_save = 0.0
        try:
            async for event in self.engine.generate(request):
                self._output.show(event)
                if isinstance(event, Token):
                    if reply not in self.conversation.turns:
                        self.conversation.add(reply)
                    if isinstance(event, Thinking):
                        reply.thinking += event.text
                    else:
                        reply.content += event.text
                    if time.monotonic() > next_save:
                        self._save()
                        next_save = time.monotonic() + SAVE_EVERY_S
                elif isinstance(event, Finished):
                    reply.finished, self._last = True, event
                    self._print(f"[{self._figures(event)}]")
                elif isinstance(event, Failed) and event.request_id is None:
                    self._ready = None  # the engine is gone
                    self._output.say("The next message starts the engine again.")
        finally:
            self._save()

    def _save(self) -> None:
        """Writes the conversation to the history; what keeps it from that is said once."""
        self.conversation.save(self._ready.model.name if self._ready else "")
        problem = self.conversation.problem
        if problem and not self._problem:
            self._output.say(problem.message, problem.hint)
        self._problem = problem

    def _figures(self, end: Finished) -> str:
        length = self._ready.context_length if self._ready else 0
        return f"{figures(end)}, context {end.context_used} of {length}" if length else figures(end)

    def _open(self, chat_id: int) -> None:
        conversation = Conversation(self.history, chat_id=chat_id)
        if not conversation.turns:
            raise UsageError(f"There is no chat {chat_id}.", "--plain lists them: /chats.")
        self.conversation = conversation
        for turn in conversation.turns:
            self._print(f"> {turn.content}" if turn.role == "user" else turn.content)

    def _cut_after_last_prompt(self, *, with_it: bool) -> str:
        """Takes away what follows the last prompt, and that too if so asked; returns the prompt."""
        index = self.conversation.prompt_before()
        if index is None:
            raise UsageError("There is no message yet.")
        prompt = self.conversation.turns[index].content
        self.conversation.cut(index + (not with_it))
        return prompt

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
        self.conversation = Conversation(self.history, self.system)
        self._print("A new chat.")

    async def do_chats(self, words: str) -> None:
        """[WORDS]: past chats, or those that hold these words"""
        chats = self.history.chats(limit=20, query=words)
        if not chats:
            self._print("No message has these words." if words else "No chats yet.")
        for chat in chats:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.updated))
            self._print(f"  {chat.id:>4}  {when}  {one_line(chat.title)}")

    async def do_open(self, number: str) -> None:
        """NUMBER: go on with a past chat"""
        if not (number.isascii() and number.isdigit()):
            raise UsageError("/open is followed by the number of a chat.", "/chats lists them.")
        self._open(int(number))

    async def do_regenerate(self, _: str) -> None:
        """answer the last message again"""
        self._cut_after_last_prompt(with_it=False)
        await self._answer()

    async def do_edit(self, _: str) -> None:
        """change the last message and send it again"""
        self._draft = self._cut_after_last_prompt(with_it=True)

    async def do_save(self, name: str) -> None:
        """FILE: write the chat as Markdown"""
        if not name:
            raise UsageError("/save is followed by the name of a file.")
        path = Path(name).expanduser()
        model = self._ready.model.name if self._ready else ""
        text = to_markdown(self.conversation.title, model, self.conversation.all_messages())
        try:
            write_new(path, text)
        except FileExistsError:
            raise UsageError(f"{path} exists already.", "Choose another name.") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
        self._print(f"Saved as {path}.")

    async def do_model(self, _: str) -> None:
        """what is answering"""
        self._print(describe(self._ready) if self._ready else "The engine is not running.")

    async def do_stats(self, _: str) -> None:
        """figures of the last reply"""
        self._print(self._figures(self._last) if self._last else "There is no reply yet.")

    async def do_system(self, text: str) -> None:
        """[TEXT]: show the system prompt, or start a new chat under this one ("none": without)"""
        if text:
            self.system = "" if text == "none" else text
            await self.do_new("")
        self._print(f"System prompt: {self.conversation.system or 'none'}")

    async def do_think(self, choice: str) -> None:
        """on|off: whether a thinking model should think"""
        if choice not in ("on", "off"):
            raise UsageError("/think is followed by on or off.")
        self.think = choice == "on"

    async def do_set(self, argument: str) -> None:
        """[NAME VALUE]: show the sampling options, or change one ("none": without)"""
        if argument:
            name, _, value = argument.partition(" ")
            self._set(name.replace("-", "_"), value.strip())
        for name in SETTABLE:
            chosen = self.max_tokens if name == "max_tokens" else getattr(self.sampling, name)
            self._print(f"  {name} {'none' if chosen is None else chosen}")

    def _set(self, name: str, text: str) -> None:
        if name not in SETTABLE:
            raise UsageError(f"There is no option {name}.", f"There are {', '.join(SETTABLE)}.")
        value = "null" if text == "none" else text
        try:
            if name == "max_tokens":
                self.max_tokens = msgspec.convert(value, _Positive | None, strict=False)
            else:
                fields = msgspec.structs.asdict(self.sampling) | {name: value}
                changed = msgspec.convert(fields, Sampling, strict=False)
                check_sampling(changed)
                self.sampling = changed
        except msgspec.ValidationError:
            raise UsageError(f"{text!r} is no value for {name}.") from None

    async def do_quit(self, _: str) -> None:
        """end the chat"""
        raise EOFError
