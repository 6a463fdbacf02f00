"""The token ids of a prompt in any of its forms: a chat, raw text, or token ids."""

from contextlib import suppress
from pathlib import Path

from engine.errors import TemplateError, UsageError
from engine.formats.channels import ChannelSplitter
from engine.formats.gguf import GGUF
from engine.formats.templates.template import ChatTemplate, Prompt
from engine.formats.thinking import ReplySplitter, ThinkSplitter
from engine.formats.tokens.tokenizer import Merge, Tokenizer
from engine.protocol.events import Chat, Effort, Message, RawText, TokenIds


def tokens_in(prompt: Chat | RawText | TokenIds, model: Path) -> int:
    """How many tokens `prompt` has for a model file, which need not be loaded. Takes about a second. Raises
    ModelFileError, UsageError, TemplateError."""
    with GGUF(model) as file:
        encoder = PromptEncoder(file)
    return len(encoder.encode(prompt).ids)


def think_splitter(prompt: Chat | RawText | TokenIds, encoded: Prompt) -> ReplySplitter | None:
    """Separates thinking from the answer in a chat's reply. None for other prompts: their reply is one text."""
    if not isinstance(prompt, Chat):
        return None
    if encoded.channels:
        return ChannelSplitter(encoded.channels, inside=encoded.opens_thinking, with_tools=bool(prompt.tools))
    return ThinkSplitter(encoded.marks, inside=encoded.opens_thinking)


class PromptEncoder:
    """The tokenizer and the chat template of a model file. The file needs no weights; only `__init__` reads it."""

    def __init__(self, file: GGUF, merge: Merge | None = None) -> None:
        """`merge`: see `Tokenizer`. Raises ModelFileError."""
        self.tokenizer = Tokenizer(file, merge)
        self.template = ChatTemplate.from_gguf(file, self.tokenizer)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about anything unexpected in the file. Renders a short chat, to see whether the template works."""
        with suppress(TemplateError):
            self.template.encode([Message(role="user", content="Hello")])
        warnings = self.tokenizer.warning, self.tokenizer.merge.warning, self.template.warning
        return tuple(filter(None, warnings))

    def encode(
        self, prompt: Chat | RawText | TokenIds, effort: Effort | None = None, most: int | None = None
    ) -> Prompt:
        """The ids of `prompt`, at least one. `effort` is for a chat. Raises UsageError and TemplateError, and
        ContextFullError for a text that is certain to have more than `most` tokens: it is not tokenized."""
        match prompt:
            case Chat(messages=messages, think=think, tools=tools):
                encoded = self.template.encode(messages, think=think, effort=effort, tools=tools, most=most)
            case RawText(text=text, special=special):
                ids = self.tokenizer.encode(text, special=special, add_special=True, most=most)
                encoded = Prompt(ids)
            case TokenIds(ids=ids):
                encoded = Prompt(list(ids))
        if not encoded.ids and isinstance(prompt, Chat):
            raise UsageError(
                "The model's chat template and vocabulary make no tokens of this conversation.",
                "The model file is damaged: get another copy of the model.",
            )
        if not encoded.ids:
            raise UsageError("The prompt is empty.", "Type a message or a text to continue.")
        least = None if encoded.pictures else 0  # their ids are negative
        if not all((least is None or least <= id) and id < self.tokenizer.vocab_size for id in encoded.ids):
            raise UsageError(
                "The prompt has token ids that are not in the model's vocabulary.",
                f"Use ids from 0 to {self.tokenizer.vocab_size - 1}.",
            )
        return encoded
