"""The files of a chat that change while it goes on, and pictures that are pasted."""

import asyncio

from textual import on, work

from app.chat.files import changed, mention_of
from app.screens.clipboard import copied_picture, no_picture_because
from app.screens.engine_actions import EngineActions
from engine.errors import OrinError
from widgets.chat.prompt import Prompt
from widgets.chat.turn import Attachment


class FileActions(EngineActions):
    """A part of `ChatApp`."""

    _told: frozenset[str] = frozenset()  # the files of which the user knows that they have changed

    def _attached(self) -> list[Attachment]:
        """The files of the chat, each as it was sent last."""
        files = (file for turn in self.session.conversation.turns for file in turn.files)
        return list({file.name: file for file in files}.values())

    @work(group="files", exclusive=True)
    async def _look_at_files(self) -> None:
        """Says once that files have changed."""
        if not (attached := self._attached()):
            return
        names = frozenset(file.name for file in await asyncio.to_thread(changed, attached))
        new, self._told = names - self._told, names
        if new:
            what = sorted(new)[0] if len(new) == 1 else f"{len(new)} files"
            verb = "has" if len(new) == 1 else "have"
            self.column.notice(f"{what} {verb} changed since then · Alt+U reads again", seconds=60)

    @on(Prompt.PasteAsked)
    @work(group="paste", exclusive=True)
    async def _paste(self) -> None:
        """Adds the picture that was copied on the desktop to the prompt, or pastes what was copied here. If nothing
        was, says why there is no picture."""
        prompt = self.column.prompt
        if not (data := await copied_picture()):
            if self.clipboard:
                prompt.paste_copied()
            else:
                self.column.notice(no_picture_because(), warning=True)
            return
        try:
            name = await asyncio.to_thread(self.column.typing.reader.keep, data)
        except OrinError as error:
            self.column.notice(str(error), warning=True)
        else:
            prompt.insert(f"{mention_of(name)} ")

    async def action_read_again(self) -> None:
        """Puts the files that have changed into the prompt, which sends them as they are now."""
        stale = await asyncio.to_thread(changed, self._attached())
        prompt = self.column.prompt
        names = [mention for file in stale if (mention := mention_of(file.name)) not in prompt.text]
        if names:
            prompt.focus()
            prompt.insert(" ".join(names) + " ")
        else:
            self.column.notice("No file of this chat has changed")
