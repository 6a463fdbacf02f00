"""Turns a conversation into one text: the chat template in the guide's file, and the same in Python."""

from collections.abc import Sequence
from typing import NamedTuple

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last tokens of the vocabulary, in this order."""
PRETOKENIZER = "qwen2"
TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor -%}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


class Message(NamedTuple):
    role: str
    content: str


def rendered(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """A conversation as TEMPLATE renders it."""
    turns = "".join(f"<|im_start|>{role}\n{content.strip()}<|im_end|>\n" for role, content in messages)
    return turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")
