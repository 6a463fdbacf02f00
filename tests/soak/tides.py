"""Answers that a soak finds again in a history: their words, how they end, and the wait for them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from tests import synthetic

TOKENS = 60
TEXT = "The water rises twice a day, as {prompt} says, and falls as often. "
LIMIT_S = 30.0
ANSWERS = """SELECT reply.content FROM messages AS prompt JOIN messages AS reply ON reply.id =
    (SELECT min(id) FROM messages WHERE chat_id = prompt.chat_id AND id > prompt.id)
    WHERE prompt.content = ? AND reply.role = 'assistant' ORDER BY reply.id DESC"""
"""The answers to a prompt, whole or not, the last one first."""


def whole(prompt: str) -> str:
    """The whole answer of an engine that says TEXT in so many TOKENS."""
    pieces = synthetic._pieces(TEXT.replace("{prompt}", prompt))
    return "".join(itertools.islice(itertools.cycle(pieces), TOKENS))


def until(holds: Callable[[], bool], problem: str) -> None:
    """Raises TimeoutError after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(0.005)
