"""The guide's tokenizer: byte-level BPE that splits words as Qwen2's does."""

import json
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.formats.tokens.pretokenizers import PRETOKENIZERS
from tools.guide.template import PRETOKENIZER, SPECIALS


def _tokenizer(model: models.BPE) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(model)
    patterns = PRETOKENIZERS[PRETOKENIZER].patterns
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    return bpe


def trained(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
    """A tokenizer of `size` tokens, special ones included. Raises ValueError if `texts` are too short."""
    bpe = _tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != size - len(SPECIALS):
        raise ValueError(f"the texts give {bpe.get_vocab_size() + len(SPECIALS)} tokens, not {size}")
    vocabulary = bpe.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    return from_merges(sorted(vocabulary, key=vocabulary.__getitem__), merges)


def from_merges(tokens: Sequence[str], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer from the tokens and merges of a GGUF file, without merges of a slash or = and what follows. So a word
    has the same tokens behind one as alone, and a name can be copied into a path (the tokens of such merges are left
    unused)."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    pairs = [
        (left, right) for left, right in pairs if left[0] not in "/=" or not (left + right)[1:].isalpha()
    ]
    bpe = _tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=pairs))
    bpe.add_special_tokens(list(SPECIALS))
    return bpe
