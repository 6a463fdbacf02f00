"""Log-probabilities of tokens in OpenAI's form, and in Google's."""

from collections.abc import Iterable, Sequence

from app.serve.protocols.common.reply import Json
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Token


def reported(tokens: Iterable[Token], tokenizer: Tokenizer) -> list[Token]:
    """The tokens that have a log-probability, without the token that ends the answer."""
    return [t for t in tokens if t.logprob is not None and t.id not in tokenizer.eos_ids]


def of_chat(tokens: Iterable[Token], tokenizer: Tokenizer, n: int) -> list[Json]:
    """The entries of tokens, each with the `n` most probable ones."""

    def entry(id: int, logprob: float | None) -> Json:
        token = {"token": spelled(tokenizer, id), "logprob": logprob, "bytes": [*tokenizer.piece(id)]}
        return token | {"id": id}  # llama-server's

    return [
        entry(t.id, t.logprob) | {"top_logprobs": [entry(top.id, top.logprob) for top in t.top[:n]]}
        for t in tokens
    ]


def of_candidate(tokens: Sequence[Token], tokenizer: Tokenizer, n: int) -> Json:
    """What an answer of Gemini's protocol has of them."""

    def entry(id: int, logprob: float | None) -> Json:
        return {"token": spelled(tokenizer, id), "tokenId": id, "logProbability": logprob}

    total = sum(t.logprob or 0.0 for t in tokens)
    result: Json = {"logProbabilitySum": total, "chosenCandidates": [entry(t.id, t.logprob) for t in tokens]}
    if n:
        result["topCandidates"] = [
            {"candidates": [entry(e.id, e.logprob) for e in t.top[:n]]} for t in tokens
        ]
    return {"avgLogprobs": total / len(tokens), "logprobsResult": result}


def spelled(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.piece(id).decode("utf-8", "replace")
