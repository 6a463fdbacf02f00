"""The part of a chat that a model summarizes: the newest messages, as many as its context holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from engine.protocol.events import Message
from widgets.chat.turn import Turn
from widgets.text import counted, one_line

TOKENS_SHARE = 1 / 4
"""Of a context, for the summary."""
SOURCE_SHARE = 0.7
"""Of a context, for what is summarized."""
_MOST_WORDS = 600
_WORDS_A_TOKEN = 1 / 2
_SHORTEST_CHARS = 400  # of a message that is cut


def newest(turns: Sequence[Turn | Message], share: float) -> int:
    """The index of the first prompt from which on `turns` hold at most a `share` of their text, or else of the last
    prompt. Tokens are not known here: text stands for them. 0 if there is no prompt."""
    sizes = [len(turn.content) for turn in turns]
    prompts = [index for index, turn in enumerate(turns) if turn.role == "user"]
    small = (index for index in prompts if sum(sizes[index:]) <= share * sum(sizes))
    return next(small, prompts[-1] if prompts else 0)


@dataclass(frozen=True)
class Summarized:
    """The `messages` of the chat `title` that are summarized. `left_out` are as many that came before them; `is_cut`:
    the beginning of a message is left out."""

    title: str
    messages: tuple[Message, ...]
    left_out: int = 0
    is_cut: bool = False

    def part(self, share: float) -> Summarized | None:
        """What is left of this with about a `share` of its text: the newest messages and, if they alone are too long,
        the end of the longest one. None if so little is not worth a summary."""
        if start := newest(self.messages, share):
            rest = self.messages[start:]
            return Summarized(self.title, rest, self.left_out + start, self.is_cut)
        longest = max(self.messages, key=lambda message: len(message.content))
        chars = int(share * len(longest.content))
        if chars < _SHORTEST_CHARS:
            return None
        end = replace(longest, content=f"…{longest.content[-chars:]}")
        messages = tuple(end if message is longest else message for message in self.messages)
        return Summarized(self.title, messages, self.left_out, True)

    def request(self, context_length: int) -> str:
        """The prompt that asks for the summary, and says what it does not cover. `context_length` is in tokens (0: not
        known)."""
        words = min(_MOST_WORDS, int(context_length * TOKENS_SHARE * _WORDS_A_TOKEN)) or _MOST_WORDS
        sentences = [
            f"Summarize our chat “{one_line(self.title)}”, so that we can go on from your summary alone: what was "
            "asked and decided, the facts, names, numbers and code that are still needed, and what is open.",
            f"Use the language of the chat, and at most {words} words.",
        ]
        if self.left_out:
            oldest = f"oldest {counted(self.left_out, 'message')}"
            sentences.append(f"The {oldest} did not fit into the context and cannot be part of it.")
        if self.is_cut:
            sentences.append("Of a long message, only the end did fit.")
        return " ".join(sentences)


def summary_tokens(context_length: int, max_tokens: int | None) -> int | None:
    """The most tokens of a summary. `max_tokens`: of any reply."""
    known = [tokens for tokens in (int(context_length * TOKENS_SHARE), max_tokens) if tokens]
    return min(known, default=None)
