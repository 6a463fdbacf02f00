"""A model file that answers by means of the float32 reference: nothing has to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.protocol.events import Event, Finished, Generate
from engine.runtime.answer import Answers
from engine.runtime.sampling import log_probabilities
from tests.reference import Reference

SEEN = 16  # tokens; the reference has no cache


class ReferenceModel:
    """Each token depends on the last few only."""

    def __init__(self, path: Path, context_length: int) -> None:
        with GGUF(path) as file:
            prompts = PromptEncoder(file)
        self.tokenizer = prompts.tokenizer
        self._answers = Answers(prompts, context_length)
        self._reference = Reference(path)

    def generate(
        self, request: Generate, report: Callable[[Event], None], cancelled: Callable[[], bool]
    ) -> Finished:
        """As `engine.protocol.served_model.Answering`."""
        answer = self._answers.begin(request, report)
        answer.report_prefill(0)
        while answer.reason is None:
            if cancelled():
                answer.cancel()
                break
            [logits] = self._reference.logits(answer.tokens[-SEEN:], last=1)
            token = answer.choose(logits)
            answer.add(token, partial(log_probabilities, logits, token))
        return answer.finished()
