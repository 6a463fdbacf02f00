"""Asks whether a call of a tool may run, above the prompt. What is typed meanwhile stays in the prompt."""

import asyncio

from textual.content import Content
from textual.style import Style
from textual.widgets import Static

from widgets.text import one_line

ANSWERS = (
    ("alt+y", "once", "once"),
    ("alt+c", "chat", "always in this chat"),
    ("alt+a", "always", "always for this tool"),
    ("alt+n", "no", "no"),
)
"""Key, answer, and how it is called."""


class ToolQuestion(Static):
    DEFAULT_CSS = """
    ToolQuestion { display: none; height: auto; max-height: 6; padding: 0 2; color: $text-warning; }
    ToolQuestion.-asking { display: block; }
    """
    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._answer: asyncio.Future[str] | None = None

    async def ask(self, name: str) -> str:
        """The answer of the user to a call of the tool `name`."""
        answers = [
            Content(f"{key.title()} {label}").stylize(Style.from_meta({"@click": f"answer('{answer}')"}))
            for key, answer, label in ANSWERS
        ]
        asked = Content.styled(f"⚠ May {one_line(name)} run?  ", "bold")
        self.update(asked + Content("  ").join(answers))
        self.add_class("-asking")
        self._answer = asyncio.get_running_loop().create_future()
        try:
            return await self._answer
        finally:
            self._answer = None
            self.remove_class("-asking")

    def action_answer(self, answer: str) -> None:
        """Answers what is asked, if anything is."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)
