"""Figures of answers, as OpenAI and llama-server give them."""

from collections.abc import Sequence
from functools import cache

from app.serve.answer import AnswerEnd
from app.serve.protocols.common.reply import Json
from engine.protocol.events import Finished, decode_rate, prefill_rate
from engine.system.invocation import own_version


@cache
def fingerprint() -> str:
    """What answers, as OpenAI has it: with the same seed, the same program says the same."""
    return f"orin-chat-{own_version()}"


def figures(ends: Sequence[AnswerEnd], prompts: int = 1) -> Json:
    """The usage of all answers together. Timings are those of one."""
    timed = {"timings": timings(ends[0].finished)} if len(ends) == 1 else {}
    return {"usage": usage(ends, prompts)} | timed


def usage(ends: Sequence[AnswerEnd], prompts: int = 1) -> Json:
    """The prompt of several answers counts once: the answers to each of `prompts` follow each other. All details that
    OpenAI gives are there, since clients with strict types need them."""
    firsts = [end.finished for end in ends[:: len(ends) // prompts]]
    prompt_n = sum(first.prompt_n for first in firsts)
    predicted = sum(end.finished.predicted_n for end in ends)
    return {
        "prompt_tokens": prompt_n,
        "completion_tokens": predicted,
        "total_tokens": prompt_n + predicted,
        "prompt_tokens_details": {
            "cached_tokens": sum(first.cached_n for first in firsts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.reasoning_n for end in ends),
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def timings(end: Finished) -> Json:
    """As llama-server gives them. `prompt_n` counts the tokens that were computed; the rates are those of
    `engine.protocol.events`."""
    prompt_n = end.prompt_n - end.cached_n
    return {
        "cache_n": end.cached_n,
        "prompt_n": prompt_n,
        "prompt_ms": end.prompt_ms,
        "prompt_per_token_ms": end.prompt_ms / max(prompt_n, 1),
        "prompt_per_second": prefill_rate(end.prompt_n, end.cached_n, end.prompt_ms - end.pictures_ms),
        "predicted_n": end.predicted_n,
        "predicted_ms": end.predicted_ms,
        "predicted_per_token_ms": end.predicted_ms / max(end.predicted_n - 1, 1),
        "predicted_per_second": decode_rate(end.predicted_n, end.predicted_ms),
        **({"draft_n": end.draft_n, "draft_n_accepted": end.draft_n_accepted} if end.draft_n else {}),
    }
