"""How the chat is left: with Ctrl+Q, Ctrl+C twice, or Ctrl+D, and never by mistake without what is not saved."""

import time

from textual import on

from app.screens.engine_actions import EngineActions
from app.screens.pages.edit_page import EditPage
from widgets.chat.prompt import Prompt

AGAIN_S = 3.0
"""How long a key that has to be pressed twice waits for the second time."""
LOSES_S = 15.0
"""How long it waits where the user has a sentence to read before."""


class Leaving(EngineActions):
    """A part of `ChatApp`."""

    _quits_until = 0.0  # until then, Ctrl+C quits
    _loses_until = 0.0  # until then, Ctrl+Q leaves a chat that is not saved

    def action_help_quit(self) -> None:
        """Textual calls this for Ctrl+C without a selection. In a terminal that key stops what runs; then it clears the
        draft, which Up brings back; and pressed again it quits."""
        now = time.monotonic()
        if self.session.is_answering:
            self.call_later(self.run_action, "stop")
        elif self.column.editing is not None:
            self.column.leave_editing()
        elif self.column.prompt.text and self.screen is self.page:
            self.column.prompt.put("")
            self.column.notice("Cleared; Up brings it back")
        elif now < self._quits_until:
            self.call_later(self.action_quit)
        else:
            self._quits_until = now + AGAIN_S
            self.column.notice("Ctrl+C again quits, and so does Ctrl+Q", seconds=AGAIN_S)

    @on(Prompt.Left)
    async def _leave(self) -> None:
        await self.action_quit()

    async def action_quit(self) -> None:
        """Quits. A page with edits that are not saved comes to the front and asks, and so does a chat that the history
        does not take."""
        for page in reversed(self.screen_stack):
            if isinstance(page, EditPage) and not page.may_be_lost("Ctrl+Q"):
                while self.screen is not page:
                    await self.screen.dismiss(None)
                return
        self.session.save()
        if self.session.conversation.problem and time.monotonic() >= self._loses_until:
            self._loses_until = time.monotonic() + LOSES_S
            said = "This chat is not saved. Ctrl+Q again leaves it, Ctrl+S writes it to a file."
            self.column.notice(said, warning=True)
            return
        await super().action_quit()
