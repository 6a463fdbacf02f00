"""The guide's tokenizer: byte-level BPE that splits words as Qwen2's does."""

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
    bpe.add_special_tokens(list(SPECIALS))
    if bpe.get_vocab_size() != size:
        raise ValueError(f"the texts give {bpe.get_vocab_size()} tokens, not {size}")
    return bpe


def from_merges(tokens: Sequence[str], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer from the tokens and merges of a GGUF file."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    bpe = _tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=pairs))
    bpe.add_special_tokens(list(SPECIALS))
    return bpe
