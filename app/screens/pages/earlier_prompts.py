"""The page on which earlier prompts are searched, as Ctrl+R does in a shell."""

from collections.abc import Sequence

from textual.content import Content

from app.screens.pages.list_page import ListPage
from widgets.text import clean


class EarlierPromptsScreen(ListPage[str, str | None]):
    """Dismissed with the prompt that was chosen, or None. `prompts` are those of all chats, oldest first."""

    FRAME_TITLE = "Earlier prompts"
    KEYS = ("Enter takes it into the prompt · Esc closes", "Enter takes it · Esc")
    PLACEHOLDER = "Search in your prompts"
    EMPTY = "No prompts yet."
    NOTHING_FOUND = "No prompt has these words."

    def __init__(self, prompts: Sequence[str]) -> None:
        super().__init__()
        self._prompts = [clean(prompt) for prompt in reversed(prompts)]

    def find(self, text: str) -> Sequence[str]:
        words = text.lower().split()
        return [prompt for prompt in self._prompts if all(word in prompt.lower() for word in words)]

    def line(self, prompt: str) -> Content:
        first, _, rest = prompt.strip().partition("\n")
        return Content.assemble((first, "bold"), "\n", ("  " + " ".join(rest.split()), "$foreground 65%"))

    def key(self, prompt: str) -> str:
        return prompt

    def choose(self, prompt: str) -> None:
        self.dismiss(prompt)

    def delete(self, prompt: str) -> None:
        self.say("A prompt goes with its chat: Ctrl+O deletes chats")
