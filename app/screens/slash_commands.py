"""The commands that begin with "/" in the prompt of the full screen. The method `command_NAME` is /NAME; most are an
action with a key."""

from textual import on

from app.chat.commands import (
    ENGINE_OPTIONS,
    chat_number,
    engine_option,
    set_option,
    set_think,
    settable_values,
)
from app.chat.configuration import without_effect
from app.chat.conversation import require_chat
from app.chat.export import to_markdown, write_named
from app.chat.history import History
from app.cli.progress import figures
from app.screens.chat_column import ChatColumn
from app.screens.engine_actions import EngineActions
from engine.errors import OrinError, UsageError


class SlashCommands(EngineActions):
    """A part of `ChatApp`."""

    history: History

    @on(ChatColumn.Commanded)
    async def _command(self, event: ChatColumn.Commanded) -> None:
        try:
            await getattr(self, f"command_{event.name}")(event.argument)
        except OrinError as error:
            self.column.notice(str(error), warning=True)
            if event.argument:
                self.column.prompt.put(f"/{event.name} {event.argument}")

    def past_chats(self, search: str = "", delete: int | None = None) -> object:
        """Opens the page of past chats, with a search or with the question whether to delete a chat."""
        raise NotImplementedError

    def show_tools(self, argument: str) -> object:
        """Opens the page of tools. `argument` "again" starts the servers that are down."""
        raise NotImplementedError

    async def command_mcp(self, argument: str) -> None:
        self.show_tools(argument)

    async def command_help(self, _: str) -> None:
        await self.run_action("help")

    async def command_new(self, _: str) -> None:
        await self.run_action("new_chat")

    async def command_chats(self, words: str) -> None:
        self.past_chats(words)

    async def command_open(self, number: str) -> None:
        chat_id = chat_number("open", number)
        require_chat(self.history, chat_id)
        await self.session.open(chat_id)

    async def command_delete(self, number: str) -> None:
        chat_id = chat_number("delete", number)
        require_chat(self.history, chat_id)
        self.past_chats(delete=chat_id)

    async def command_continue(self, _: str) -> None:
        if self.session.conversation.turns or not (chats := self.history.chats(limit=1)):
            await self.run_action("go_on")
        else:
            await self.session.open(chats[0].id)

    async def command_regenerate(self, _: str) -> None:
        if not self.session.conversation.turns:
            raise UsageError("There is no message yet.")
        await self.run_action("regenerate")

    async def command_summary(self, _: str) -> None:
        await self.run_action("summarize")

    async def command_shorten(self, _: str) -> None:
        await self.run_action("leave_out")

    async def command_edit(self, _: str) -> None:
        await self.run_action("edit")

    async def command_save(self, name: str) -> None:
        conversation = self.session.conversation
        if not name or not conversation.turns:
            await self.run_action("export")
            return
        model = self.session.status.snapshot().ready.model.title
        document = to_markdown(conversation.title, model, conversation.all_messages())
        self.column.notice(f"Saved as {write_named(name, document)}")

    async def command_model(self, name: str) -> None:
        if name:
            self.model_named(name)
        else:
            self.models()

    async def command_stats(self, _: str) -> None:
        last = self.session.status.last
        self.column.notice(figures(last) if last else "There is no reply yet", seconds=60)

    async def command_thoughts(self, _: str) -> None:
        if (reply := self.session.conversation.last_reply) is None:
            self.column.notice("There is no reply yet")
        elif not reply.thinking.strip():
            self.column.notice("The model gave the last reply without thoughts")
        else:
            await self.run_action("toggle_thinking")

    async def command_system(self, text: str) -> None:
        if not text:
            await self.run_action("system")
            return
        self.session.system = "" if text == "none" else text
        await self.session.open(None)
        self.column.notice("A new chat under this system prompt" if self.session.system else "A new chat")

    async def command_think(self, choice: str) -> None:
        set_think(self.session, choice)
        thinks = "thinks, if it can," if self.session.think else "does not think"
        self.column.notice(f"The model {thinks} from the next prompt on")

    async def command_set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if name in ENGINE_OPTIONS:
            self.switch_options(f"{name} {value}", **engine_option(name, value))
            return
        if argument:
            set_option(self.session, name, value)
            ready = self.session.status.snapshot().ready
            may_be = name in ("effort", *ready.unheeded)
            remarks = without_effect(self.session.sampling, ready) if may_be else ()
            self.column.notice(" ".join((f"{name} is {value} from the next prompt on.", *remarks)))
            return
        values = settable_values(self.session, self.setup.options if self.setup else None)
        self.column.notice(" · ".join(f"{each} {value}" for each, value in values.items()), seconds=60)

    async def command_quit(self, _: str) -> None:
        await self.run_action("quit")
