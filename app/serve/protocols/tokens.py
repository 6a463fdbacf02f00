"""Texts to tokens and back, as llama-server does it, and as vLLM."""

from typing import Any

import msgspec

from app.serve.errors import wrong
from app.serve.protocols import chat
from app.serve.protocols.common.conversation import ChatMessage
from app.serve.protocols.common.reply import Json
from app.serve.service import Service


class TokenizeBody(msgspec.Struct):
    """llama-server's `content`, or vLLM's `prompt` or `messages`."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = True
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def tokenized(body: TokenizeBody, service: Service) -> Json:
    """Special tokens in a text are special unless the client says otherwise. vLLM adds those that the model expects
    around it, llama-server does not. May take as long as the text is. Raises ApiError."""
    tokenizer = service.file.tokenizer
    if body.messages is not None:
        ids = chat.encoded(chat.ChatBody(messages=body.messages, tools=body.tools), service).ids
    elif (text := body.content if body.content is not None else body.prompt) is not None:
        is_vllms = body.content is None
        add = is_vllms if body.add_special_tokens is None else body.add_special_tokens
        special = body.parse_special is not False
        ids = tokenizer.encode(text, special=special, add_special=bool(add or body.add_special))
    else:
        raise wrong("There is no text: content, prompt or messages.", "content")
    tokens: list[Any] = ids
    if body.with_pieces:
        pieces = {id: {"id": id, "piece": _piece(tokenizer.piece(id))} for id in set(ids)}  # not one a place
        tokens = [pieces[id] for id in ids]
    context = service.ready.context_length if service.ready else None
    return {"tokens": tokens, "count": len(ids), "max_model_len": context}


def tokenizer_info(service: Service) -> Json:
    """As vLLM has it, for lm-evaluation-harness."""
    file = service.file
    eos = None if file.tokenizer.eos_id is None else file.tokenizer.text(file.tokenizer.eos_id)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": service.ready.context_length if service.ready else None,
        "bos_token": None if file.tokenizer.bos_id is None else file.tokenizer.text(file.tokenizer.bos_id),
        "eos_token": eos,
        "pad_token": eos,
        "add_bos_token": file.tokenizer.add_bos,
        "add_eos_token": file.tokenizer.add_eos,
        "chat_template": file.templates.chat,
    }


def detokenized(body: DetokenizeBody, service: Service) -> Json:
    """Raises ApiError."""
    tokenizer = service.file.tokenizer
    if not all(0 <= id < tokenizer.vocab_size for id in body.tokens):
        raise wrong(f"Token ids are from 0 to {tokenizer.vocab_size - 1}.", "tokens")
    text = tokenizer.decode(body.tokens)
    return {"content": text, "prompt": text}


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are only a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]
