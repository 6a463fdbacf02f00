"""Tokens with which models of code are asked to fill in what lies between two texts."""

from collections.abc import Callable
from typing import NamedTuple

from engine.formats.gguf import GGUF
from engine.formats.tokenizer import Tokenizer

# As models write them: Qwen, StarCoder, DeepSeek, CodeLlama, CodeGemma, Granite. All three are from one family.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


class FillIn(NamedTuple):
    """Ids of the tokens before the text that comes first, before the one that comes last, and before the answer."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, file: GGUF, tokenizer: Tokenizer) -> "FillIn | None":
        """Those that the metadata of a model file name, else those whose names tell; None if there are none."""
        told = [file.get(f"tokenizer.ggml.fim_{name}_token_id", int, -1) for name in ("pre", "suf", "mid")]
        if all(0 <= id < tokenizer.vocab_size for id in told):
            return cls(*told)
        known = tokenizer.special_tokens
        found = next((names for names in _NAMES if all(name in known for name in names)), None)
        return cls(*(known[name] for name in found)) if found else None

    def prompt(self, tokenizer: Tokenizer, before: str, after: str) -> tuple[int, ...]:
        """The ids of a prompt that asks for the text between two others, in which special tokens are plain text."""
        encode: Callable[[str], list[int]] = tokenizer.encode
        bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        return (*bos, self.prefix, *encode(before), self.suffix, *encode(after), self.middle)
