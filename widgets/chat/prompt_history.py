"""The earlier prompts that Up and Down bring back. Nothing that was typed is lost."""

from collections.abc import Iterable


class PromptHistory:
    """The earlier prompts, oldest first, and the draft after them. Any of them may be edited before the next prompt is
    sent; `text` is always what the prompt box holds now."""

    def __init__(self, prompts: Iterable[str] = (), draft: str = "") -> None:
        self._sent = list(prompts)
        self._restart(draft)

    def step(self, text: str, step: int) -> str | None:
        """The prompt before (-1) or after (1) the current one, None if there is none."""
        if not 0 <= self._index + step < len(self._texts):
            return None
        self._texts[self._index] = text
        self._index += step
        return self._texts[self._index]

    def sent(self, text: str) -> str:
        """Makes `text` the last of the earlier prompts. Returns the draft if the sent text was another prompt."""
        draft = "" if self._index == len(self._texts) - 1 else self._texts[-1]
        self._sent = [prompt for prompt in (*self._sent, *self._edited()) if prompt != text] + [text]
        self._restart(draft)
        return draft

    def replace(self, text: str, draft: str) -> None:
        """Makes `draft` the new draft. The text of the box and the draft before become earlier prompts."""
        self._texts[self._index] = text
        displaced = dict.fromkeys(
            t for t in (self._texts[-1], text) if t.strip() and t != draft and t not in self._sent
        )
        self._sent += [*self._edited(), *displaced]
        self._restart(draft)

    def _edited(self) -> list[str]:
        """The earlier prompts that were edited, but for the current one."""
        texts = (text for index, text in enumerate(self._texts[:-1]) if index != self._index)
        return [text for text in texts if text not in self._sent and text.strip()]

    def _restart(self, draft: str) -> None:
        self._texts = [*self._sent, draft]
        self._index = len(self._sent)
