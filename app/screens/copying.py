"""What can be copied from the chat."""

from textual import on
from textual.app import App
from textual.events import TextSelected

from app.chat.session import Session
from app.screens.chat_column import ChatColumn
from app.screens.clipboard import copy_by_tmux, is_in_tmux
from widgets.chat.transcript import Transcript
from widgets.markdown.parser import code_blocks
from widgets.text import clean, counted


class Copying(App[None]):
    """A part of `ChatApp`."""

    session: Session
    column: ChatColumn

    def action_copy_reply(self) -> None:
        reply = self.session.conversation.last_reply
        text = clean(reply.content).strip() if reply else ""
        self._copy(text, "the reply", "There is no reply to copy yet")

    def action_copy_code(self) -> None:
        replies = (turn for turn in reversed(self.session.conversation.turns) if turn.role == "assistant")
        blocks = (block for reply in replies for block in reversed(code_blocks(clean(reply.content))))
        self._copy(next(blocks, ""), "the code block", "There is no code block to copy yet")

    def _copy(self, text: str, name: str, nothing: str = "") -> None:
        if text:
            self.copy_to_clipboard(text)
        self.column.notice(f"Copied {name} ({counted(len(text), 'character')})" if text else nothing)

    def copy_to_clipboard(self, text: str) -> None:
        super().copy_to_clipboard(text)
        if is_in_tmux():
            self.run_worker(copy_by_tmux(text))

    @on(TextSelected)
    def _copy_selection(self) -> None:
        text = self.screen.get_selected_text()
        if text and text.strip():
            self._copy(text, "the selection")

    @on(Transcript.LinkClicked)
    def _copy_link(self, event: Transcript.LinkClicked) -> None:
        self._copy(event.address, f"the link {event.address}")
