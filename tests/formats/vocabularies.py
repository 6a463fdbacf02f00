"""Small vocabularies in real GGUF files, for the tests of tokenizers and templates."""

from collections.abc import Iterable
from pathlib import Path

import gguf as peer

from engine.formats.gguf import GGUF
from engine.formats.tokenizer import StreamDecoder, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"


def byte_characters() -> list[str]:
    """GPT-2's printable character of each byte, by the rule in its paper's code: printable Latin-1 stands for
    itself, the rest follow from U+0100 on."""
    itself = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in itself else chr(next(rest)) for byte in range(256)]


def write(
    path: Path,
    model: str,
    tokens: list[tuple[str | bytes, int]],
    *,
    pre: str | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    architecture: str = "llama",
    types: bool = True,
    template: str | None = None,
    **keys: int | bool,
) -> GGUF:
    """A vocabulary-only file; `keys` are metadata under tokenizer.ggml."""
    w = peer.GGUFWriter(str(path), architecture)
    w.add_tokenizer_model(model)
    if pre is not None:
        w.add_tokenizer_pre(pre)
    w.add_token_list([text for text, _ in tokens])
    if types:
        w.add_token_types([kind for _, kind in tokens])
    if merges is not None:
        w.add_array("tokenizer.ggml.merges", merges)
    if scores is not None:
        w.add_token_scores(scores)
    for key, value in keys.items():
        add = w.add_bool if isinstance(value, bool) else w.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    if template is not None:
        w.add_chat_template(template)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return GGUF(path)


def byte_level(
    path: Path, special: tuple[tuple[str, int], ...] = (), merges: list[str] | None = None, **more
) -> GGUF:
    """All bytes, what the merges make of them, then the special tokens."""
    merges = merges or ["~ ~"]  # a file cannot have an empty list
    texts = [*byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    tokens = [(text, NORMAL) for text in texts] + list(special)
    return write(path, "gpt2", tokens, merges=merges, **({"pre": "gpt-2"} | more))


def sentencepiece(
    path: Path, pieces: dict[str, float], special: tuple[tuple[str, int], ...] = (), **more
) -> GGUF:
    """<unk>, <s> and </s>, all bytes, the pieces with their scores, then the special tokens."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    scores = [0.0] * len(tokens) + list(pieces.values()) + [0.0] * len(special)
    tokens += [(piece, NORMAL) for piece in pieces] + list(special)
    return write(path, "llama", tokens, scores=scores, **more)


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of a reply of these tokens."""
    stream = StreamDecoder(tokenizer)
    return "".join([stream.feed(id) for id in ids]) + stream.flush()


def spelled_out(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of tokens with the names of all special tokens."""
    text = b"".join(map(tokenizer.piece, ids)).decode("utf-8", "replace")
    return text.removeprefix(" ") if tokenizer.add_space_prefix else text
