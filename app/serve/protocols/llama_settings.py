"""How an answer is sampled, in llama-server's words: what `/props` has for all requests, and an answer of its own."""

from collections.abc import Sequence

import msgspec

from app.serve.protocols.common.reply import Json
from engine.protocol.events import Generate, Sampling

_RANDOM_SEED = 2**32 - 1
_NOT_HERE = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 0,
    "dry_sequence_breakers": [],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "lora": [],
}
"""Samplers that this server does not have, as llama-server gives them when they are off: frontends show these."""
_SAMPLERS = ["penalties", "top_k", "top_p", "min_p", "temperature"]


def defaults(sampling: Sampling) -> Json:
    """The settings of a request that names none."""
    sampled = msgspec.to_builtins(sampling)
    for name in ("type", "effort"):
        sampled.pop(name, None)
    seed = _RANDOM_SEED if sampling.seed is None else sampling.seed
    return {
        **_NOT_HERE,
        **sampled,
        "seed": seed,
        "n_predict": -1,
        "max_tokens": -1,
        "n_probs": 0,
        "ignore_eos": False,
        "stop": [],
        "stream": False,
        "grammar": "",
        "samplers": _SAMPLERS,
    }


def settings(request: Generate, seed: int | None, stops: Sequence[str], is_streamed: bool) -> Json:
    """The settings of an answer, which was sampled with `seed`."""
    limit = -1 if request.max_tokens is None else request.max_tokens
    return defaults(request.sampling) | {
        "seed": _RANDOM_SEED if seed is None else seed,
        "n_predict": limit,
        "max_tokens": limit,
        "n_probs": request.logprobs,
        "ignore_eos": request.ignore_eos,
        "stop": list(stops),
        "stream": is_streamed,
        "grammar": request.grammar.source if request.grammar else "",
        "logit_bias": [{"token": id, "bias": bias} for id, bias in request.logit_bias],
    }
