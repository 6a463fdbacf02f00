"""The chat templates in a model file: most have one, some have several with names.

gguf-py writes the one named "default" as tokenizer.chat_template, and the others behind their names. As in Hugging
Face's transformers, the one named "tool_use" is for conversations with tools.
"""

from dataclasses import dataclass
from typing import Self

from engine.formats.gguf import GGUF
from engine.formats.string_array import StringArray
from engine.formats.tools.forms import HERMES, ToolForm, shown_form

_KEY = "tokenizer.chat_template"
MIN_CONTEXT = 4096
"""A model that was trained for fewer tokens, and whose template shows no tools, gets none: they would fill it."""
_OF_ITS_OWN_USE = ("tool_use", "rag", "rerank")


@dataclass(frozen=True)
class FileTemplates:
    """Sources in Jinja; "" for what the file does not have. `tools`: for conversations with tools. `rank`: what a model
    that ranks documents gets of them."""

    chat: str = ""
    tools: str = ""
    rank: str = ""

    @classmethod
    def of(cls, file: GGUF) -> Self:
        """Raises ModelFileError."""

        def named(name: str) -> str:
            source = file.get(f"{_KEY}.{name}", str, "")
            return source if source.strip() else ""

        chat = "" if isinstance(file.metadata.get(_KEY), StringArray) else file.get(_KEY, str, "")
        chat = "" if chat == "rwkv-world" else chat  # the name of one that is in llama.cpp
        if not chat.strip():  # the first one with a name
            keys = (key for key in file.metadata if key.startswith(f"{_KEY}."))
            names = (key.removeprefix(f"{_KEY}.") for key in keys)
            chat = next((named(name) for name in names if name not in _OF_ITS_OWN_USE), named("tool_use"))
        return cls(chat, named("tool_use"), named("rerank"))

    @property
    def of_calls(self) -> str:
        """The one that says how calls of tools are written."""
        return self.tools or self.chat


def tool_form(file: GGUF) -> ToolForm | None:
    """How the model of a file writes calls of tools: as its template shows, or as `tools.told` asks it to. None if its
    context is too short for that. Raises ModelFileError."""
    if form := shown_form(FileTemplates.of(file).of_calls):
        return form
    architecture = file.get("general.architecture", str, "")
    context = file.get(f"{architecture}.context_length", int, MIN_CONTEXT)
    return HERMES if context >= MIN_CONTEXT else None
