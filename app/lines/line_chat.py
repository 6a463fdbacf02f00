"""The line mode: a chat without a full screen, for simple terminals, screen readers and scripts.

The method `do_NAME` of `LineChat` is the command /NAME of `app/chat/commands`.
"""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TextIO, Unpack

from msgspec.structs import replace

from app.chat.chat_options import ChatOptions
from app.chat.commands import (
    ENGINE_OPTIONS,
    chat_number,
    commands,
    engine_option,
    set_option,
    set_think,
    settable_values,
    split,
)
from app.chat.configuration import adapters_option, sampling_with_other_model, without_effect
from app.chat.conversation import require_chat
from app.chat.export import to_markdown, write_named
from app.chat.failures import is_about_model
from app.chat.file_reader import FileReader, ModelFiles, TokenCounter
from app.chat.files import refuse_pictures
from app.chat.history import History
from app.chat.history_database import HistoryError
from app.chat.session import Session
from app.chat.view import Permission, View
from app.cli.left_threads import leave_threads
from app.cli.oneshot import TextOutput
from app.cli.progress import describe, figures
from app.cli.replaced import REPLACED, is_replaced
from app.cli.signals import run_until_signal
from app.lines.line_input import FileLines, TerminalLines
from app.lines.other_models import OtherModels
from app.lines.word_wrap import WordWrap
from app.tools.form import form_of
from app.tools.toolbox import NONE
from engine.errors import OrinError, UsageError
from engine.protocol.client import Engine
from engine.protocol.events import EngineOptions, Event, Failed, Finished, Ready
from presets import GUIDE
from widgets.chat.call_text import call_line, pretty
from widgets.chat.turn import Attachment, Call, Turn
from widgets.text import clean, counted, one_line

OTHER_MODEL = f"/model NAME goes on with another model, /model {GUIDE} with the one that is built in."
WAYS_ON = "/summary begins a new chat with a summary, /shorten leaves out the oldest turns"
LONGEST = "/set context max takes the longest context"
TOO_LONG = "The message alone is too long: /edit shortens it"


class LineChat(View):
    """A session on a terminal without a full screen, or in a file. It obeys the user's lines. Printed lines stay, and
    `_observe` prints what arrives."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        lines: TerminalLines | FileLines,
        out: TextIO,
        messages: TextIO,
        *,
        chat_id: int | None = None,
        draft: str = "",
        models: OtherModels | None = None,
        **options: Unpack[ChatOptions],
    ) -> None:
        """Reads messages and commands from `lines`. Writes the chat to `out`, and progress and failures to
        `messages`. `chat_id` continues a chat of `history`. The first line begins with `draft`. `models` is None for an
        engine that has no others."""
        self.session = Session(engine, history, self, spawn=self._spawn, **options)
        self.session.other_model = OTHER_MODEL if models and lines.is_terminal else ""
        self.session.tools.form = lambda: form_of(Path(models.options.model_path) if models else None)
        longest = f", {LONGEST}" if models else ""
        self.session.ways_on, self._too_long = f"{WAYS_ON}{longest}.", f"{TOO_LONG}{longest}."
        self._models = models
        self._reader = FileReader(TokenCounter(lambda: ModelFiles.of(models.options) if models else None))
        self.session.watch = self._observe
        self._lines = lines
        self._out = WordWrap(out) if lines.is_terminal else out
        self._output = TextOutput(self._out, messages)
        self._past_chat = chat_id
        self._told: set[str] = set()  # labels of pictures, and ids of calls of tools whose end was printed
        self._draft = draft  # what the next line begins with
        self._tasks: list[asyncio.Task[None]] = []  # what the session works on
        self._ready: Ready | None = None
        self._end: Finished | None = None  # of the last reply
        self._failure: Failed | None = None
        self._problem: HistoryError | None = None

    async def run(self) -> int:
        """Chats until the user leaves or SIGTERM arrives, and returns the exit code. Raises UsageError if there is no
        chat `chat_id`."""
        leave_threads()
        try:
            return await run_until_signal(self._run(), signal.SIGTERM)
        finally:
            with contextlib.suppress(HistoryError):
                self.session.history.set_open(None)
            await self.session.close()

    async def _run(self) -> int:
        self.problem_changed(self.session.history.problem)
        if self._past_chat is not None:
            await self._open(self._past_chat)
        self.session.start()
        await self._finish_tasks()
        if self._failure and not (self.session.other_model and is_about_model(self._failure)):
            return self._failure.exit_code
        self._print("/help lists the commands, Ctrl-C stops a reply, Ctrl-D ends the chat.")
        while True:
            draft, self._draft = self._draft, ""
            try:
                await self._handle(await self._lines.read(draft))
            except EOFError:
                options = f"--plain {adapters_option(self._models.options)}" if self._models else "--plain "
                if self._lines.is_terminal and (way_back := self.session.conversation.way_back(options)):
                    self._print(way_back)
                return 0
            except KeyboardInterrupt:
                self._print("Ctrl-D or /quit ends the chat.")
                # The loop, which a blocking read has held, forgets the key: no reply is to stop.
                await asyncio.sleep(0.01)
            except OrinError as error:
                self._output.say(error.message, error.hint)
            except ImportError as error:
                if not is_replaced(error):
                    raise
                self._output.say(REPLACED.message, REPLACED.hint)

    async def _handle(self, text: str) -> None:
        """Runs a command, or sends a message and waits for the reply."""
        try:
            command = split(text)
        except UsageError:
            self._draft = " " + text
            raise
        if command is not None:
            name, argument = command
            await getattr(self, f"do_{name}")(argument)
        elif text.strip():
            await self._send(text.strip())

    async def _send(self, text: str) -> None:
        """Sends a message. What a terminal's user names with @ goes along; the lines of a file name no other files. If
        it cannot be read, or Ctrl-C gives that up, the next line begins with the message."""
        files: list[Attachment] = []

        async def read() -> None:
            files.extend(await asyncio.to_thread(self._reader.read_all, text, self.session.room()))
            refuse_pictures(files, self.session.status)
            if missing := await asyncio.to_thread(self._reader.missing, text):
                self._print(f"[{missing}]")

        if self._lines.is_terminal and "@" in text:
            self._draft = text
            if await run_until_signal(read(), signal.SIGINT):  # a disk may not answer
                return
            self._draft = ""
        self._reader.remember(files)
        for file in files:
            self._print(f"[{file.label}]")
        await self.session.send(text, files=tuple(files))
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
            self.session.save()  # SIGTERM may have ended the reply
        if self.session.is_full:
            self._output.say(self._too_long if self.session.is_too_long else self.session.ways_on)

    def _observe(self, event: Event) -> None:
        """Shows an event of the engine."""
        answers = self.session.is_answering  # else the session's notices have warnings and failures, too
        match event:
            case Failed() if not answers:
                self._failure = event
                return
            case Ready():
                self._ready = event
                self._output.show(event if answers else replace(event, warnings=()))
                self._print(describe(event))
                return
        self._output.show(event)
        match event:
            case Finished():
                self._end = event
                self._print(f"[{self._figures(event)}]")
            case Failed(request_id=None):
                self._output.say("The next message starts the engine again.")

    async def opened(self) -> None:
        for turn in self.session.conversation.turns:
            self._reader.remember(turn.files)
            self._print(f"> {turn.content}" if turn.role == "user" else turn.content)
            await self.changed(turn)

    async def changed(self, turn: Turn) -> None:
        """Prints what has come of the calls of a reply, and once how many tokens a picture took."""
        seen = {file.label for file in turn.files if file.picture and file.tokens is not None}
        for label in sorted(seen - self._told):
            self._output.clear()
            self._print(f"[{label}]")
        self._told |= seen
        for call in turn.calls:
            if call.is_over and call.id not in self._told:
                self._told.add(call.id)
                self._print(f"[{call_line(call)}]")

    async def may_run(self, call: Call) -> Permission:
        """Asks on a terminal. What a script is fed from may not answer."""
        if not self._lines.is_terminal:
            return "no"
        self._print(f"The model calls {call.name} with\n{pretty(call.arguments)}")
        self._print("May it run? y once, c always in this chat, a always for this tool; else it does not.")
        answers: dict[str, Permission] = {"y": "once", "yes": "once", "c": "chat", "a": "always"}
        try:
            return answers.get((await self._lines.read("")).strip().lower(), "no")
        except (EOFError, KeyboardInterrupt):
            return "no"

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
        return f"{figures(end)}, context {end.context_used:,} of {length:,}" if length else figures(end)

    async def _open(self, chat_id: int) -> None:
        require_chat(self.session.history, chat_id)
        await self.session.open(chat_id)

    def _last_prompt(self) -> int:
        """The index of the last turn of the user. Raises UsageError if there is none."""
        index = self.session.conversation.prompt_before()
        if index is None:
            raise UsageError("There is no message yet.")
        return index

    def _print(self, text: str) -> None:
        print(clean(text), file=self._out, flush=True)

    # --- commands ---------------------------------------------------------------------------------------

    async def do_help(self, _: str) -> None:
        for name, meaning in commands().items():
            self._print(f"  /{name:<12} {meaning}")
        self._print("Alt+Enter begins a new line; Up and Down bring back earlier prompts.")

    async def do_new(self, _: str) -> None:
        await self.session.open(None)
        self._print("A new chat.")

    async def do_chats(self, words: str) -> None:
        chats = self.session.history.chats(limit=20, query=words)
        if not chats:
            self._print("No message has these words." if words else "No chats yet.")
        for chat in chats:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.updated))
            self._print(f"  {chat.id:>4}  {when}  {one_line(chat.title)}")

    async def do_open(self, number: str) -> None:
        await self._open(chat_number("open", number))

    async def do_delete(self, number: str) -> None:
        chat_id = chat_number("delete", number)
        history = self.session.history
        require_chat(history, chat_id)
        self._print(f"Delete “{one_line(history.title(chat_id))}” for good? y deletes it.")
        if (await self._lines.read("")).strip().lower() not in ("y", "yes"):
            self._print("It stays.")
            return
        history.delete(chat_id)
        self._print("Deleted.")
        if chat_id == self.session.conversation.chat_id:
            await self.do_new("")

    async def do_continue(self, _: str) -> None:
        turns = self.session.conversation.turns
        if not turns:
            if not (chats := self.session.history.chats(limit=1)):
                raise UsageError("There is no chat to go on with yet.")
            await self._open(chats[0].id)
            return
        await self.session.go_on()
        await self._finish_reply()

    async def do_regenerate(self, _: str) -> None:
        self._last_prompt()
        await self.session.regenerate()
        await self._finish_reply()

    async def do_summary(self, _: str) -> None:
        await self.session.summarize()
        if self.session.is_busy:
            self._print(f"A new chat.\n> {self.session.conversation.turns[0].content}")
            if self.session.queued:
                self._print(f"Then: > {self.session.queued}")
        await self._finish_reply()

    async def do_shorten(self, _: str) -> None:
        await self.session.leave_out()
        await self._finish_reply()

    async def do_edit(self, _: str) -> None:
        self._draft = self.session.conversation.cut(self._last_prompt())[0].content

    async def do_fork(self, _: str) -> None:
        await self.session.fork(self._last_prompt())
        kept = len(self.session.conversation.turns)
        begins = f"A new chat with {counted(kept, 'message')} of the other" if kept else "An empty new chat"
        self._print(f"{begins}. The other stays in /chats.")

    async def do_save(self, name: str) -> None:
        if not name:
            raise UsageError("/save needs the name of a file.")
        model = self._ready.model.title if self._ready else ""
        conversation = self.session.conversation
        path = write_named(name, to_markdown(conversation.title, model, conversation.all_messages()))
        self._print(f"Saved as {path}.")

    async def do_model(self, name: str) -> None:
        if name:
            await self._switch_model(name)
            return
        ready = self._ready if self.session.status.is_ready else None
        self._print(describe(ready) if ready else "The engine is not running.")
        if self._models:
            names = await asyncio.to_thread(self._models.names)
            self._print(f"/model NAME goes on with another one. On this machine: {', '.join(names)}.")

    async def _switch_model(self, name: str) -> None:
        """Goes over to the model `name` when it is ready. Ctrl-C stops its download or its start."""
        if (models := self._models) is None:
            raise UsageError("This engine has no other models.")
        is_stopped = threading.Event()
        found: list[tuple[Engine, EngineOptions]] = []

        async def find() -> None:
            found.append(await asyncio.to_thread(models.engine, name, is_stopped.is_set))

        async def stop() -> None:
            is_stopped.set()

        await run_until_signal(find(), signal.SIGINT, stop=stop)
        await self._switch(models, *found[0], name)

    async def _switch(self, models: OtherModels, engine: Engine, options: EngineOptions, name: str) -> None:
        """Goes over to `engine` when it is ready. Ctrl-C stops its start."""

        async def give_up() -> None:
            self.session.cancel_switch()

        def adopt() -> None:
            paths = Path(models.options.model_path), Path(options.model_path)
            self.session.sampling = sampling_with_other_model(self.session.sampling, *paths)
            models.adopt(options)

        self._print(f"Starting {name}.")
        self.session.switch(engine, name, adopt)
        await run_until_signal(self._finish_tasks(), signal.SIGINT, stop=give_up)

    async def do_mcp(self, argument: str) -> None:
        toolbox = self.session.tools.toolbox
        if not toolbox.servers:
            self._print(NONE)
        await (toolbox.again() if argument == "again" else toolbox.start())
        for name, state in toolbox.states.items():
            self._print(f"{name}: {state.text}")
            for tool in state.tools:
                self._print(f"  {tool.name}  {one_line(tool.about)}")

    async def do_stats(self, _: str) -> None:
        self._print(self._figures(self._end) if self._end else "There is no reply yet.")

    async def do_thoughts(self, _: str) -> None:
        if (reply := self.session.conversation.last_reply) is None:
            raise UsageError("There is no reply yet.")
        self._print(clean(reply.thinking).strip() or "The model gave the last reply without thoughts.")

    async def do_system(self, text: str) -> None:
        if text:
            self.session.system = "" if text == "none" else text
            await self.do_new("")
        self._print(f"System prompt: {self.session.conversation.system or 'none'}")

    async def do_think(self, choice: str) -> None:
        set_think(self.session, choice)

    async def do_set(self, argument: str) -> None:
        if argument:
            name, _, value = argument.partition(" ")
            name = name.replace("-", "_")
            if name in ENGINE_OPTIONS:
                await self._set_up(name, value.strip())
                return
            set_option(self.session, name, value.strip())
            if self._ready and name in ("effort", *self._ready.unheeded):
                for sentence in without_effect(self.session.sampling, self._ready):
                    self._print(sentence)
        options = self._models.options if self._models else None
        for each, chosen in settable_values(self.session, options).items():
            self._print(f"  {each} {chosen}")

    async def _set_up(self, name: str, text: str) -> None:
        """Goes over to an engine with another option."""
        if (models := self._models) is None:
            raise UsageError(f"This engine has its own {name}, which is set where it runs.")
        changed = engine_option(name, text)
        model = self._ready.model.title if self._ready else "the engine"
        await self._switch(models, *models.with_options(**changed), f"{model} with {name} {text}")

    async def do_quit(self, _: str) -> None:
        raise EOFError
