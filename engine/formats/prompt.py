"""From what is asked, in any of its forms, to the token ids that a model is given."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from engine.errors import TemplateError, UsageError
from engine.events import Chat, Message, RawText, TokenIds
from engine.formats.gguf import GGUF
from engine.formats.template import ChatTemplate, Prompt
from engine.formats.tokenizer import Tokenizer


def tokens_in(prompt: Chat | RawText | TokenIds, model: Path) -> int:
    """How many tokens `prompt` has for a model file, whether it is loaded or not: takes about a second.
    Raises ModelFileError, UsageError, TemplateError."""
    with GGUF(model) as file:
        encoder = PromptEncoder(file)
    return len(encoder.encode(prompt).ids)


class PromptEncoder:
    """A model file's tokenizer and template. The file needs no weights, and is not read after this."""

    def __init__(self, file: GGUF) -> None:
        """Raises ModelFileError."""
        self.tokenizer = Tokenizer(file)
        self.template = ChatTemplate.from_gguf(file, self.tokenizer)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what in the file was not as expected. That a template does not work shows in a first use."""
        with suppress(TemplateError):
            self.template.encode([Message(role="user", content="Hello")])
        return tuple(warning for warning in (self.tokenizer.warning, self.template.warning) if warning)

    def encode(self, prompt: Chat | RawText | TokenIds) -> Prompt:
        """The ids of `prompt`, at least one. Raises UsageError and TemplateError."""
        match prompt:
            case Chat(messages=messages, think=think):
                encoded = self.template.encode(messages, think=think)
            case RawText(text=text):
                encoded = Prompt(self.tokenizer.encode(text, add_special=True))
            case TokenIds(ids=ids):
                encoded = Prompt(list(ids))
        if not encoded.ids:
            raise UsageError("The prompt is empty.", "Type something for the model to go on from.")
        if not all(0 <= id < self.tokenizer.vocab_size for id in encoded.ids):
            raise UsageError(
                "The prompt has token ids that the model does not know.",
                f"Its vocabulary has ids from 0 to {self.tokenizer.vocab_size - 1}.",
            )
        return encoded
