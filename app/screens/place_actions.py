"""Where one is in a chat: versions of prompts, forks, what is searched for."""

from textual import work

from app.chat.history import History
from app.screens.engine_actions import EngineActions
from app.screens.pages.earlier_prompts import EarlierPromptsScreen


class PlaceActions(EngineActions):
    """A part of `ChatApp`."""

    history: History

    async def action_version(self, step: int) -> None:
        """Goes to the version before or after, at the prompt that is edited or else at the last one with versions."""
        column, turns = self.column, self.session.conversation.turns
        if column.refuse_while_busy():
            return
        indices = [i for i, turn in enumerate(turns) if turn.version[1] > 1]
        index = column.editing if column.editing in indices else next(iter(indices[::-1]), None)
        if index is None:
            column.notice("There is one version of this chat: Ctrl+R and F2 make others")
        elif await self.session.show_version(index, step):
            column.transcript.to_turn(index)
        else:
            column.notice("This is the newest version" if step > 0 else "This is the oldest version")

    async def action_fork(self) -> None:
        """Begins a new chat with all before the prompt that is edited, or before the last one."""
        column, conversation = self.column, self.session.conversation
        index = column.editing if column.editing is not None else conversation.prompt_before()
        if index is None:
            column.notice("There is no prompt to fork at yet")
        elif not column.refuse_while_busy():
            await self.session.fork(index)
            column.notice("A new chat that begins as the other; that one stays in the past chats")

    async def command_fork(self, _: str) -> None:
        await self.action_fork()

    def action_find(self) -> None:
        if self.is_comparing or not self.session.conversation.turns:
            self.column.notice("There is nothing to search yet")
        else:
            self.column.find_bar.open()

    def action_tint(self) -> None:
        transcript = self.column.transcript
        transcript.tint(not transcript.is_tinted)
        if not transcript.is_tinted:
            self.column.notice("Guessed words are no longer tinted")
        elif any(turn.guessed for turn in transcript.turns):
            self.column.notice("Tokens that were guessed right are tinted: a step gave several there")
        else:
            self.column.notice("Guesses in later replies will be tinted; this chat has none")

    async def open_at(self, chat_id: int, query: str) -> None:
        """Opens a past chat at the first message with the words of `query`, in the version that has it."""
        message = self.history.found_in(chat_id, query) if query else None
        if message is not None:
            versions = self.history.versions(chat_id)
            if not versions.is_shown(message):
                self.history.show(chat_id, versions.through(message))
        await self.session.open(chat_id)
        turns = self.session.conversation.turns
        index = next((i for i, turn in enumerate(turns) if turn.message_id == message), None)
        if message is None or index is None:
            return
        lower = turns[index].content.lower()
        word = next(
            (word for word in sorted(query.split(), key=len, reverse=True) if word.lower() in lower), ""
        )
        if word:
            self.column.find_bar.open(word, (index, 0))
        else:  # the search knows no diacritics
            self.column.transcript.to_turn(index)

    @work(group="prompts", exclusive=True)
    async def action_earlier_prompts(self) -> None:
        prompt = await self.push_screen_wait(EarlierPromptsScreen(self.history.prompts(limit=2000)))
        if prompt is not None:
            self.column.prompt.put(prompt)
